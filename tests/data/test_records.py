"""Readers: whole records of cut-off files, line numbers, laziness, and folders of the datasets library."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import pytest

from draftsmith.data import records
from draftsmith.data.records import CUT_OFF, Unreadable, read_dataset, read_file

RECORDS: list[dict[str, Any]] = [
    {"id": i, "text": 'quote " backslash \\ brace } ] → 👨‍👩‍👧 \n', "n": [1.5, None, {"a": []}]} for i in range(7)
]


def read(path: Path) -> list[tuple[str, Any]]:
    return [(place.removeprefix(f"{path}:"), record) for place, record in read_file(path)]


@pytest.mark.parametrize("chunk", [1, 7, 1 << 18])
@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("ascii_only", [True, False])
def test_an_array_gives_its_records_and_their_lines(
    chunk: int, indent: int | None, ascii_only: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records, "_CHUNK", chunk)
    path = tmp_path / "a.json"
    path.write_text("\n " + json.dumps(RECORDS, indent=indent, ensure_ascii=ascii_only), encoding="utf-8")
    found = read(path)
    assert [record for _, record in found] == RECORDS
    lines = path.read_text(encoding="utf-8").split("\n")
    expected = [2] * 7 if indent is None else [n for n, line in enumerate(lines, 1) if line == "  {"]
    assert [int(place) for place, _ in found] == expected


@pytest.mark.parametrize("ascii_only", [True, False])
def test_an_array_cut_off_anywhere_yields_all_whole_records(
    ascii_only: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records, "_CHUNK", 16)
    whole = json.dumps(RECORDS[:3], ensure_ascii=ascii_only).encode()
    ends, decoder, text = [], json.JSONDecoder(), whole.decode()
    position = 1
    for _ in range(3):
        _, end = decoder.raw_decode(text, position)
        ends.append(len(text[:end].encode()))
        position = end + 2
    path = tmp_path / "a.json"
    for cut in range(1, len(whole)):
        path.write_bytes(whole[:cut])
        *complete, (_, last) = read(path)
        assert [record for _, record in complete] == RECORDS[: sum(end <= cut for end in ends)]
        assert last == Unreadable(reason=CUT_OFF)


def test_an_array_that_breaks_in_the_middle_says_so(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text('[{"a": 1},\n{"a": 2 "b": 3},\n' + '{"a": 3},' * 20 + '{"a": 4}]')
    assert read(path) == [
        ("1", {"a": 1}),
        ("2", Unreadable(reason="invalid JSON; the array is not read any further")),
    ]


def test_lines_with_a_bad_one_an_empty_one_and_a_cut_off_one(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"a": 1}\n\n{"a": }\n[1]\n{"a": "\xff"}\n{"a": 2}\n{"a": "thr')
    assert read(path) == [
        ("1", {"a": 1}),
        ("3", Unreadable(reason="invalid JSON")),
        ("4", [1]),
        ("5", {"a": "\udcff"}),
        ("6", {"a": 2}),
        ("7", Unreadable(reason=CUT_OFF)),
    ]


def test_an_empty_file_has_no_records(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("")
    assert read(path) == []


def test_no_more_is_read_than_is_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text("[" + "1," * (1 << 20) + "oops")
    reader = read_file(path)
    assert [next(reader)[1] for _ in range(3)] == [1, 1, 1]


@pytest.mark.parametrize("kind", ["dict", "single", "files"])
def test_folders_that_datasets_can_load(kind: str, tmp_path: Path) -> None:
    rows = [{"messages": [{"role": "user", "content": f"q{i}"}, {"role": "assistant", "content": "a"}]} for i in (0, 1)]
    folder = tmp_path / "d"
    if kind == "files":
        folder.mkdir()
        (folder / "train.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    else:
        dataset = datasets.Dataset.from_list(rows)
        saved = datasets.DatasetDict({"train": dataset, "test": dataset.select([1])}) if kind == "dict" else dataset
        saved.save_to_disk(folder)
    for streaming in (False, True):
        found = list(read_dataset(str(folder), name=None, split=None, streaming=streaming))
        assert found == [(f"{folder} record 1", rows[0]), (f"{folder} record 2", rows[1])]
    if kind == "dict":
        assert len(list(read_dataset(str(folder), name=None, split="test", streaming=False))) == 1
        with pytest.raises(ValueError, match="no split 'dev'; set split to one of train, test"):
            list(read_dataset(str(folder), name=None, split="dev", streaming=False))
    if kind == "single":
        with pytest.raises(ValueError, match="has no splits; leave split='dev' out"):
            list(read_dataset(str(folder), name=None, split="dev", streaming=False))


def test_a_dataset_that_is_not_there_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"cannot be loaded: .* Give a file \(.jsonl, .json\), a folder"):
        list(read_dataset(str(tmp_path / "empty"), name=None, split=None, streaming=False))
