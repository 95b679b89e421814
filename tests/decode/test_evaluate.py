"""A drafter's folder is evaluated by itself: target, data, template and thinking mode come from its record."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from draftsmith.data.conversations import DataConfig, SourceConfig, load_documents
from draftsmith.decode.evaluate import EvaluateConfig, choose_device, evaluate
from draftsmith.models.dfly import DFlyConfig
from draftsmith.models.export import new_record, save_drafter
from draftsmith.models.target import Target, TargetConfig
from draftsmith.scripts.main import main

THINKING = "{% if enable_thinking is defined and enable_thinking %}<think>{% endif %}"


def conversation(index: int) -> dict[str, Any]:
    return {
        "messages": [
            {"role": "user", "content": f"How many apples are left of {index}?"},
            {"role": "assistant", "content": f"There were {index} apples, so {index} are left."},
        ]
    }


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> DataConfig:
    path = tmp_path_factory.mktemp("data") / "chat.jsonl"
    path.write_text("".join(json.dumps(conversation(index)) + "\n" for index in range(40)))
    return DataConfig(sources=[SourceConfig(path=str(path))], held_out_fraction=0.3)


@pytest.fixture(scope="module")
def target(target_path: Path) -> Target:
    return Target.load(TargetConfig(path=str(target_path)), device="cpu")


def export(folder: Path, target: Target, data: DataConfig) -> Path:
    torch.manual_seed(0)
    drafter = DFlyConfig(block_size=4, target_layer_ids=[0, 2]).build(target.spec)
    save_drafter(folder, drafter, new_record(target, data, run="a-run"))
    return folder


@pytest.fixture(scope="module")
def drafter_path(target: Target, data: DataConfig, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export(tmp_path_factory.mktemp("run") / "export", target, data)


def run(drafter_path: Path, **settings: Any) -> tuple[dict[str, Any], str]:
    console = Console(file=io.StringIO(), width=140)
    config = EvaluateConfig(**{"drafter_path": str(drafter_path), "num_prompts": 3, "max_new_tokens": 8, **settings})
    report = evaluate(config, console)
    return report, console.file.getvalue()  # type: ignore[attr-defined]


def test_held_out_prompts_by_themselves(drafter_path: Path, target: Target, data: DataConfig) -> None:
    report, text = run(drafter_path)
    written = json.loads((drafter_path / "evaluation.json").read_text())
    assert written == json.loads(json.dumps(report))
    held_out = load_documents(data, target.tokenizer, held_out=True).documents
    chosen = sorted(held_out, key=lambda document: document.id.split("-")[1])[:3]
    assert [prompt["id"] for prompt in written["prompts"]] == [document.id for document in chosen]
    for prompt, document in zip(written["prompts"], chosen, strict=True):
        assert prompt["prompt_tokens"] == document.tokens[~document.supervised].tolist()[: len(prompt["prompt_tokens"])]
        assert target.tokenizer.decode(prompt["prompt_tokens"]).endswith("?<|end|><|asst|>")
        assert prompt["tokens"] == prompt["baseline_tokens"]
    assert written["identical_to_target"] is True
    assert written["warnings"] == []
    assert (written["num_prompts"], written["num_draft_tokens"], written["run"]) == (3, 3, "a-run")
    assert text.index("drafter") < text.index("decoded plainly") < text.index("acceptance length with bonus")


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_twice_gives_the_same(drafter_path: Path, temperature: float, tmp_path: Path) -> None:
    timed = ("tokens_per_second", "baseline_tokens_per_second", "speedup", "seconds", "baseline_seconds")

    def figures(node: Any) -> Any:
        if isinstance(node, dict):
            return {key: figures(value) for key, value in node.items() if key not in timed}
        return [figures(value) for value in node] if isinstance(node, list) else node

    settings = {"temperature": temperature, "seed": 3, "output": str(tmp_path / "e.json")}
    first, second = (figures(run(drafter_path, **settings)[0]) for _ in range(2))
    assert first == second
    assert len(first["prompts"]) == 3


def test_every_figure_follows_from_the_prompts(drafter_path: Path, tmp_path: Path) -> None:
    report, _ = run(drafter_path, output=str(tmp_path / "e.json"), max_new_tokens=16)
    accepted = [count for prompt in report["prompts"] for count in prompt["accepted"]]
    assert report["num_rounds"] == len(accepted)
    assert report["acceptance_length"] == pytest.approx(1 + sum(accepted) / len(accepted))
    seconds = sum(prompt["seconds"] for prompt in report["prompts"])
    assert report["tokens_per_second"] == pytest.approx(sum(len(p["tokens"]) for p in report["prompts"]) / seconds)


def test_a_batch_gives_the_same_acceptance(drafter_path: Path, tmp_path: Path) -> None:
    alone, together = (run(drafter_path, output=str(tmp_path / "e.json"), batch_size=size) for size in (1, 2))
    keys = ("id", "tokens", "baseline_tokens", "accepted")
    assert [[prompt[key] for key in keys] for prompt in alone[0]["prompts"]] == [
        [prompt[key] for key in keys] for prompt in together[0]["prompts"]
    ]
    assert (alone[0]["batch"], together[0]["batch"]) == (1, 2)
    assert "batch 2, at most 8 new tokens" in together[1]


def test_a_prompt_file(drafter_path: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "mine.jsonl"
    prompts.write_text('{"prompt": "Tell me a story"}\n')
    output = tmp_path / "elsewhere" / "e.json"
    report, _ = run(drafter_path, prompts=str(prompts), output=str(output))
    assert json.loads(output.read_text())["prompts"][0]["id"] == f"{prompts}:1"
    assert report["prompt_set"] == str(prompts)
    assert report["num_prompts"] == 1


def test_the_recorded_template_is_used_whatever_the_target_brings(
    target: Target, data: DataConfig, new_target: Callable[..., Path], chat_templates: dict[str, str], tmp_path: Path
) -> None:
    """The same weights with another template beside them."""
    path = new_target(tmp_path / "moved", template="C5")
    folder = export(tmp_path / "export", target, data)
    report, _ = run(folder, target_path=str(path))
    think = target.tokenizer.convert_tokens_to_ids("<think>")
    assert all(think not in prompt["prompt_tokens"] for prompt in report["prompts"])
    assert report["target"] == str(path)


@pytest.mark.parametrize("prompts", ["held_out", "file"])
def test_another_thinking_mode_is_used_and_warned_of(
    prompts: str, data: DataConfig, new_target: Callable[..., Path], tmp_path: Path
) -> None:
    folder = new_target(tmp_path / "thinking")
    target = Target.load(TargetConfig(path=str(folder)), device="cpu")
    answer_first = (
        "{{ '<think>' if m['role'] == 'assistant' and enable_thinking is defined and enable_thinking else '' }}"
    )
    template = target.tokenizer.chat_template
    target.tokenizer.chat_template = template.replace("<|asst|>{{ m", f"<|asst|>{answer_first}{{{{ m") + THINKING
    exported = export(tmp_path / "export", target, data)
    file = tmp_path / "p.jsonl"
    file.write_text('{"prompt": "Tell me a story"}\n')
    chosen = "held_out" if prompts == "held_out" else str(file)
    think = target.tokenizer.convert_tokens_to_ids("<think>")
    report, text = run(exported, prompts=chosen)
    assert (report["warnings"], report["thinking"]) == ([], None)
    assert all(prompt["prompt_tokens"][-1] != think for prompt in report["prompts"])
    report, text = run(exported, prompts=chosen, thinking=True)
    assert report["thinking"] is True
    assert all(prompt["prompt_tokens"][-1] == think for prompt in report["prompts"])
    assert "trained with thinking=None" in report["warnings"][0]
    assert "WARNING" in text


def test_another_target_is_refused(drafter_path: Path, new_target: Callable[..., Path], tmp_path: Path) -> None:
    other = new_target(tmp_path / "other", seed=5)
    before = sorted(drafter_path.iterdir())
    with pytest.raises(ValueError, match=r"was trained for target .* has fingerprint"):
        run(drafter_path, target_path=str(other))
    assert sorted(drafter_path.iterdir()) == before


def command(monkeypatch: pytest.MonkeyPatch, *overrides: str) -> None:
    """`draftsmith evaluate` as typed."""
    monkeypatch.setattr("sys.argv", ["draftsmith", "evaluate", "num_prompts=2", "max_new_tokens=4", *overrides])
    main()


def test_the_command_takes_a_target_from_elsewhere_and_refuses_another(
    drafter_path: Path,
    target: Target,
    new_target: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    same, other = new_target(tmp_path / "same"), new_target(tmp_path / "other", seed=5)
    output = tmp_path / "e.json"
    command(monkeypatch, f"drafter_path={drafter_path}", f"target_path={same}", f"output={output}")
    report = json.loads(output.read_text())
    assert (report["target"], report["target_fingerprint"]) == (str(same), target.fingerprint)
    capsys.readouterr()
    with pytest.raises(SystemExit, match="1"):
        command(monkeypatch, f"drafter_path={drafter_path}", f"target_path={other}", f"output={output}")
    error = capsys.readouterr().err
    fingerprint = Target.load(TargetConfig(path=str(other)), device="cpu").fingerprint
    assert "error: the drafter was trained for target" in error
    assert f"fingerprint {target.fingerprint}" in error
    assert f"{other} (revision None, dtype float32) has fingerprint {fingerprint}" in error
    assert json.loads(output.read_text()) == report


def test_the_command_refuses_an_output_or_a_device_before_any_work(
    drafter_path: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    (tmp_path / "file").touch()
    for override, message in (
        ("output=/proc/nope/e.json", "output=/proc/nope/e.json cannot be written (No such file or directory: /proc/"),
        (f"output={tmp_path}/file/e.json", f"output={tmp_path}/file/e.json cannot be written ("),
        (f"output={tmp_path}", f"output={tmp_path} is a folder; give a file"),
        ("device=cuda", "device=cuda: no CUDA device here; use device=cpu\n"),
        ("device=cuda:1", "device=cuda:1: no CUDA device here; use device=cpu\n"),
        ("device=gpu", "device=gpu: this is no device; use device=cpu, device=cuda or device=cuda:N\n"),
        ("device=cuda:x", "device=cuda:x: this is no device; use device=cpu"),
        ("device=meta", "device=meta: this is no device; use device=cpu"),
    ):
        with pytest.raises(SystemExit, match="1"):
            command(monkeypatch, f"drafter_path={drafter_path}", override)
        printed = capsys.readouterr()
        assert printed.err.startswith(f"error: {message}")
        assert printed.out == ""


def test_a_device_beyond_the_last_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert [str(choose_device(name)) for name in (None, "cuda:1", "cpu")] == ["cuda", "cuda:1", "cpu"]
    with pytest.raises(ValueError, match=r"device=cuda:2: the last CUDA device here is cuda:1; use device=cuda:1"):
        choose_device("cuda:2")


def test_dtype_and_attention_can_be_chosen(drafter_path: Path, tmp_path: Path) -> None:
    report, _ = run(drafter_path, dtype="bfloat16", attention="eager", output=str(tmp_path / "e.json"))
    assert (report["dtype"], report["attention"]) == ("bfloat16", "eager")
    if not report["identical_to_target"]:  # bfloat16: a near-tie may be decided otherwise, and the file says where
        gaps = [prompt["divergence"]["top2_gap"] for prompt in report["prompts"] if prompt["divergence"]]
        assert gaps
        assert max(gaps) < 0.1


def test_nothing_held_out_is_an_error_that_says_what_to_give(target: Target, data: DataConfig, tmp_path: Path) -> None:
    folder = export(tmp_path / "export", target, replace(data, held_out_fraction=0.0))
    with pytest.raises(ValueError, match=r"give prompts=FILE\.jsonl"):
        run(folder)
    folder = export(tmp_path / "small", target, replace(data, held_out_fraction=1e-9))
    with pytest.raises(ValueError, match=r"leaves none of 40 documents held out; give prompts=FILE\.jsonl"):
        run(folder)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_prompts": 0}, "num_prompts is 0"),
        ({"max_new_tokens": 0}, "max_new_tokens is 0"),
        ({"prompts": "absent.jsonl"}, "no such file"),
        ({"dtype": "int8"}, "choose one of"),
        ({"target_path": "/absent"}, "with target_path=PATH"),
    ],
)
def test_what_cannot_be_evaluated_is_refused(drafter_path: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run(drafter_path, **settings)
    with pytest.raises(ValueError, match="which drafter"):
        EvaluateConfig()
