from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from draftsmith.train.checkpoint import (
    COMPLETE,
    EVALUATION,
    TrainState,
    clear_later,
    find_checkpoint,
    keep_checkpoints,
    what_is_torn,
    write_whole,
)


def checkpoint(folder: Path, step: int) -> Path:
    path = folder / f"step_{step:06d}"
    (path / "drafter").mkdir(parents=True)
    (path / "drafter" / "model.safetensors").write_text("weights")
    (path / "state.pt").write_text("moments")
    files = {"drafter/model.safetensors": 7, "state.pt": 7}
    (path / COMPLETE).write_text(json.dumps({"step": step, "files": files}))
    return path


def test_a_step_never_spans_two_epochs_and_every_row_comes_once_an_epoch() -> None:
    state = TrainState.start(torch.device("cpu"))
    seen = []
    for _ in range(10):
        seen.append((state.epoch, state.next_row))
        state.advance(2, 10, 7)
    assert seen == [(epoch, row) for epoch in (0, 1) for row in (0, 2, 4, 6, 8)]
    assert (state.step, state.epoch, state.next_row, state.tokens_seen) == (10, 2, 0, 70)


def test_an_epoch_that_does_not_divide_ends_early() -> None:
    state = TrainState.start(torch.device("cpu"))
    for _ in range(3):
        state.advance(4, 10, 0)
    assert (state.epoch, state.next_row) == (1, 0)


def test_the_last_whole_checkpoint_is_found(tmp_path: Path) -> None:
    for step in (2, 10, 1_000_000):
        checkpoint(tmp_path, step)
    assert find_checkpoint(tmp_path) == (tmp_path / "step_1000000", ())


@pytest.mark.parametrize(
    ("tear", "reason"),
    [
        (lambda path: (path / COMPLETE).unlink(), "complete.json is missing: the checkpoint was never finished"),
        (lambda path: (path / "state.pt").write_text("mom"), "state.pt has 3 bytes, not 7"),
        (lambda path: (path / "drafter" / "model.safetensors").unlink(), "drafter/model.safetensors is missing"),
    ],
)
def test_a_torn_checkpoint_is_passed_over_loudly(tmp_path: Path, tear, reason: str) -> None:  # type: ignore[no-untyped-def]
    good, torn = checkpoint(tmp_path, 1), checkpoint(tmp_path, 2)
    tear(torn)
    assert what_is_torn(good) is None
    path, (warning,) = find_checkpoint(tmp_path)
    assert path == good
    assert warning == f"WARNING: {torn} is torn ({reason}); falling back to the checkpoint before it"


def test_no_whole_checkpoint_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no whole checkpoint in"):
        find_checkpoint(tmp_path)
    (checkpoint(tmp_path, 1) / "state.pt").unlink()
    with pytest.raises(ValueError, match=r"\(1 torn\); remove the run folder to start anew"):
        find_checkpoint(tmp_path)


def test_only_the_last_ones_are_kept(tmp_path: Path) -> None:
    for step in (9, 10, 11):
        checkpoint(tmp_path, step)
    keep_checkpoints(tmp_path, 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_000010", "step_000011"]


def test_the_best_one_is_kept_beside_the_last_ones(tmp_path: Path) -> None:
    for step, length in ((1, 1.1), (2, 1.5), (3, 1.4), (4, 1.3), (5, 1.5)):
        (checkpoint(tmp_path, step) / EVALUATION).write_text(json.dumps({"acceptance_length": length}))
        keep_checkpoints(tmp_path, 1)
        kept = {int(path.name[5:]) for path in tmp_path.iterdir()}
        assert kept == {1: {1}, 2: {2}, 3: {2, 3}, 4: {2, 4}, 5: {5}}[step]
        assert what_is_torn(tmp_path / f"step_{step:06d}") is None


def test_going_back_needs_a_word_where_a_later_checkpoint_is_whole(tmp_path: Path) -> None:
    first, second, third = (checkpoint(tmp_path, step) for step in (1, 2, 3))
    (third / COMPLETE).unlink()
    clear_later(tmp_path, second)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_000001", "step_000002"]
    with pytest.raises(ValueError, match="the run already has step_000002; remove it to go back"):
        clear_later(tmp_path, first)


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run.json"
    write_whole(path, "before")

    def no_space(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", no_space)
    with pytest.raises(OSError, match="No space left"):
        write_whole(path, "after")
    assert path.read_text() == "before"
