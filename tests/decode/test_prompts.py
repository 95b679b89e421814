"""Which prompts a drafter is evaluated on, and that they are rendered as in training."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from draftsmith.data.batch import Document
from draftsmith.data.rendering import Renderer
from draftsmith.decode.prompts import held_out_prompts, read_prompts


def write(path: Path, *records: Any) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def document(tokens: list[int], start: int, id: str) -> Document:
    supervised = torch.arange(len(tokens)) >= start
    return Document(tokens=torch.tensor(tokens), supervised=supervised, domain="chat", id=id)


def test_held_out_prompts_are_chosen_by_hash() -> None:
    documents = [
        document([1, 2, 3, 4], 2, "ffff-cc"),
        document([5, 6, 7], 1, "0000-bb"),
        document([1, 2, 9, 9], 2, "ffff-aa"),  # the first document's prompt, answered otherwise
        document([8, 8], 0, "0000-00"),  # supervised from its first token on: no prompt
    ]
    prompts = held_out_prompts(documents, 10)
    assert [(prompt.id, prompt.tokens.tolist()) for prompt in prompts] == [("ffff-aa", [1, 2]), ("0000-bb", [5])]
    assert [prompt.id for prompt in held_out_prompts(documents[::-1], 1)] == ["ffff-aa"]


@pytest.mark.parametrize("template", ["C2", "C4", "C5", "C6"])
def test_a_file_renders_as_training_does(template: str, new_tokenizer: Callable[..., Any], tmp_path: Path) -> None:
    tokenizer = new_tokenizer(template, bos="<|bos|>")
    question = {"role": "user", "content": "How many apples are left?"}
    answer = {"role": "assistant", "content": "<think>12 - 5</think>7" if template == "C6" else "7"}
    documents, _ = Renderer(tokenizer, max_length=64).documents([question, answer], domain="chat")
    expected = held_out_prompts(documents, 1)[0]
    path = write(tmp_path / "apples.jsonl", {"prompt": question["content"]}, {"messages": [question]})
    for line, prompt in enumerate(read_prompts(path, tokenizer, thinking=None, count=5), 1):
        assert prompt.tokens.tolist() == expected.tokens.tolist()
        assert prompt.hash == expected.hash
        assert (prompt.id, prompt.domain) == (f"{path}:{line}", "apples")


def test_thinking_reaches_the_template(tokenizer: Any, new_tokenizer: Callable[..., Any], tmp_path: Path) -> None:
    switched = new_tokenizer("C2")
    switched.chat_template += "{% if enable_thinking %}<think>{% endif %}"
    path = write(tmp_path / "p.jsonl", {"prompt": "a"})
    plain, thinking = (
        read_prompts(path, switched, thinking=mode, count=1)[0].tokens.tolist() for mode in (False, True)
    )
    assert thinking == [*plain, switched.convert_tokens_to_ids("<think>")]


def test_count_takes_the_first(tokenizer: Any, tmp_path: Path) -> None:
    path = write(tmp_path / "p.jsonl", *({"prompt": text} for text in "abcd"))
    assert [prompt.id for prompt in read_prompts(path, tokenizer, thinking=None, count=2)] == [f"{path}:1", f"{path}:2"]


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ({"text": "a"}, "a prompt is"),
        ({"prompt": None}, "a prompt is"),
        ({"messages": []}, "must be the user's"),
        ({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}, "must be the user's"),
        ({"messages": [{"role": "user"}]}, "a prompt is"),
        ([1], "a prompt is"),
    ],
)
def test_a_record_that_is_no_prompt_is_refused_with_its_place(
    record: Any, reason: str, tokenizer: Any, tmp_path: Path
) -> None:
    path = write(tmp_path / "p.jsonl", {"prompt": "a"}, record)
    with pytest.raises(ValueError, match=rf"p\.jsonl:2: .*{reason}"):
        read_prompts(path, tokenizer, thinking=None, count=5)


def test_missing_and_empty_files_are_refused(tokenizer: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no such file"):
        read_prompts(tmp_path / "absent.jsonl", tokenizer, thinking=None, count=1)
    with pytest.raises(
        ValueError, match=r'holds no prompts; write lines of {"prompt": text} or {"messages": .*"content": text}\]}'
    ):
        read_prompts(write(tmp_path / "empty.jsonl"), tokenizer, thinking=None, count=1)
