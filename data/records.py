"""Raw records of a data source, one at a time, each with the place it came from.

A file is JSON Lines or one JSON array; anything else is for the `datasets` library. Nothing is read before it is asked
for, and what cannot be read is handed on as an `Unreadable`, so that one bad record never ends a job.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, TextIO

# Characters. A record that does not fit is read on by at least as much as is there, so its cost stays linear.
_CHUNK = 1 << 18

# A record that breaks off shows its fault at the very end of what is read: at most a surrogate pair, \uXXXX\uXXXX.
_LONGEST_SPLIT = 16

CUT_OFF = "the file ends in the middle of a record"


@dataclass(frozen=True, slots=True, kw_only=True)
class Unreadable:
    """Stands in for a record that cannot be read.

    Attributes:
        reason: why.
    """

    reason: str


def read_file(path: Path) -> Iterator[tuple[str, Any]]:
    """Records of a JSON Lines file or of a JSON array, told apart by their first character.

    Yields:
        (place, record): `file:line` where the record begins, and what stands there or an `Unreadable`.
    """
    # Bytes that are not UTF-8 become lone surrogates, which the check of each message's content finds.
    with path.open(encoding="utf-8-sig", errors="surrogateescape") as file:
        line = 1
        while (first := file.read(1)).isspace():
            line += first == "\n"
        if first == "[":
            yield from ((f"{path}:{number}", record) for number, record in _array(file, line))
        else:
            yield from ((f"{path}:{number}", record) for number, record in _lines(file, first, line))


def _lines(file: TextIO, first: str, line: int) -> Iterator[tuple[int, Any]]:
    """(line, record) of JSON Lines; `first` is the character already taken from the file, at line `line`."""
    for number, text in enumerate(chain([first + file.readline()], file), line):
        if not text.strip():
            continue
        try:
            record = json.loads(text)
        except ValueError as error:
            record = Unreadable(reason="invalid JSON" if text.endswith("\n") else _reason(text, error))
        yield number, record


def _array(file: TextIO, line: int) -> Iterator[tuple[int, Any]]:
    """(line, record) of a JSON array after its opening bracket; a cut-off array still yields its whole records."""
    decoder, buffer, start = json.JSONDecoder(), "", 0
    while True:
        begin = _skip(buffer, start, ", \t\r\n")
        line += buffer.count("\n", start, begin)
        start = begin
        if buffer[start : start + 1] == "]":
            if (buffer[start + 1 :] + file.read(_CHUNK)).strip():
                yield line, Unreadable(reason="what follows the end of the JSON array is not read")
            return
        try:
            record, end = decoder.raw_decode(buffer, start)
        except ValueError as error:
            more = file.read(max(_CHUNK, len(buffer) - start)) if _incomplete(buffer, error) else ""
            if not more:
                yield line, Unreadable(reason=_reason(buffer, error, after="; the array is not read any further"))
                return
            buffer, start = buffer[start:] + more, 0
            continue
        yield line, record
        line += buffer.count("\n", start, end)
        start = end


def _skip(text: str, start: int, characters: str) -> int:
    """The first position from start on that holds none of these characters."""
    while text[start : start + 1] and text[start] in characters:
        start += 1
    return start


def _incomplete(text: str, error: ValueError) -> bool:
    """Whether more text could mend this error."""
    if not isinstance(error, json.JSONDecodeError):
        return False
    return error.msg.startswith("Unterminated string") or error.pos >= len(text) - _LONGEST_SPLIT


def _reason(text: str, error: ValueError, after: str = "") -> str:
    return CUT_OFF if _incomplete(text, error) else f"invalid JSON{after}"


def read_dataset(path: str, *, name: str | None, split: str | None, streaming: bool) -> Iterator[tuple[str, Any]]:
    """Records of a Hugging Face dataset id, or of a local folder that `datasets` can load.

    Args:
        name: the dataset's configuration; None: its only one.
        split: None: train.

    Yields:
        (place, record): `path record N`, counted from 1, and the record.

    Raises:
        ValueError: the dataset, its configuration or its split does not exist or cannot be reached.
    """
    for number, record in enumerate(_open_dataset(path, name, split, streaming), 1):
        yield f"{path} record {number}", record


def _open_dataset(path: str, name: str | None, split: str | None, streaming: bool) -> Any:
    import datasets  # takes a second, which runs on files need not pay

    folder = Path(path)
    saved = (folder / "dataset_dict.json").exists() or (folder / "state.json").exists()
    try:
        if not saved:
            return datasets.load_dataset(path, name, split=split or "train", streaming=streaming)
        loaded = datasets.load_from_disk(path)
    except OSError as error:  # not found, not reachable, offline
        raise ValueError(
            f"data source {path!r} cannot be loaded: {error}. Give a file (.jsonl, .json), a folder, or a Hugging Face"
            " dataset id that this machine can reach"
        ) from error
    if name is not None:
        raise ValueError(f"{path} is a folder saved by datasets and has no configurations; leave name={name!r} out")
    if isinstance(loaded, datasets.Dataset):
        if split is not None:
            raise ValueError(f"{path} is a single saved dataset and has no splits; leave split={split!r} out")
        return loaded
    if (split or "train") not in loaded:
        raise ValueError(f"{path} has no split {split or 'train'!r}; set split to one of {', '.join(loaded)}")
    return loaded[split or "train"]
