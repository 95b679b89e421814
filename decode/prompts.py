"""The prompts that a drafter is evaluated on: held-out conversations, or a file of prompts."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from draftsmith.data.batch import Document
from draftsmith.data.records import Unreadable, read_file
from draftsmith.data.rendering import Message, RenderError, render_prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One prompt as the target reads it.

    Attributes:
        id: the document's id, or `file:line`.
        tokens: (seq,) int64, generation prompt included.
        domain: the document's domain, or the file's name.
    """

    id: str
    tokens: Tensor
    domain: str

    @property
    def hash(self) -> str:
        """Hash of the tokens alone."""
        return hashlib.blake2b(self.tokens.cpu().numpy().tobytes(), digest_size=16).hexdigest()


def held_out_prompts(documents: Sequence[Document], count: int) -> list[Prompt]:
    """The first `count` distinct prompts in the order of the documents' content hashes.

    A document's prompt is what stands before its first supervised token.

    Args:
        documents: held-out ones.
    """
    prompts: dict[str, Prompt] = {}
    for document in sorted(documents, key=lambda document: document.id.rpartition("-")[2]):
        start = int(document.supervised.int().argmax())
        if start == 0:
            continue  # nothing stands before the first answer: there is no prompt
        prompt = Prompt(id=document.id, tokens=document.tokens[:start], domain=document.domain)
        prompts.setdefault(prompt.hash, prompt)
        if len(prompts) == count:
            break
    return list(prompts.values())


def read_prompts(path: Path, tokenizer: PreTrainedTokenizerBase, *, thinking: bool | None, count: int) -> list[Prompt]:
    """The first `count` prompts of a JSONL or JSON file, rendered as in training.

    A record is {"prompt": text} or {"messages": [{"role", "content"}, ...]} that ends with a user message.

    Raises:
        ValueError: the file is missing or empty, or a record is neither (a prompt set is never used in part).
    """
    if not path.is_file():
        raise ValueError(f"prompts={path}: no such file; give a JSONL file of prompts, or prompts=held_out")
    prompts: list[Prompt] = []
    for place, record in read_file(path):
        if len(prompts) == count:
            break
        try:
            tokens = render_prompt(_messages(record), tokenizer, thinking=thinking)
        except RenderError as error:
            raise ValueError(f"{place}: {error}; mend or remove this record") from error
        prompts.append(Prompt(id=place, tokens=tokens, domain=path.stem))
    if not prompts:
        raise ValueError(
            f'prompts={path} holds no prompts; write lines of {{"prompt": text}} or {{"messages": [{{"role": "user", '
            '"content": text}]}'
        )
    return prompts


def _messages(record: Any) -> list[Message]:
    if isinstance(record, Unreadable):
        raise RenderError(record.reason)
    if isinstance(record, dict) and isinstance(record.get("prompt"), str):
        return [{"role": "user", "content": record["prompt"]}]
    messages = record.get("messages") if isinstance(record, dict) else None
    if not isinstance(messages, list) or not all(
        isinstance(message, dict) and isinstance(message.get("role"), str) and isinstance(message.get("content"), str)
        for message in messages
    ):
        raise RenderError('a prompt is {"prompt": text} or {"messages": [{"role": ..., "content": ...}, ...]}')
    if not messages or messages[-1]["role"] != "user":
        raise RenderError("the last message of a prompt must be the user's")
    return [{"role": message["role"], "content": message["content"]} for message in messages]
