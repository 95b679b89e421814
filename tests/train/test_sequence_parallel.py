"""Ranks that share rows do what one does. See tests/sequence_ranks.py for what the processes do, started once."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from launch import run_ranks
from rich.console import Console
from sequence_ranks import CASES, run_config
from tiny_run import tiny_config

from draftsmith.train.config import TrainerConfig
from draftsmith.train.loop import train
from draftsmith.train.plan import prepare
from draftsmith.train.world import World


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sequence_ranks")


@pytest.fixture(scope="module")
def reports(folder: Path, target_path: Path, conversations: Path) -> dict[int, dict[str, Any]]:
    found = {}
    for ranks in CASES:
        (folder / str(ranks)).mkdir()
        found[ranks] = run_ranks(
            "sequence_ranks.py", ranks, folder / str(ranks), target_path, conversations, timeout_seconds=400
        )
    return found


@pytest.mark.parametrize(("ranks", "case"), [(ranks, case) for ranks, cases in CASES.items() for case in cases])
def test_an_update_of_ranks_that_share_rows_is_that_of_one(
    reports: dict[int, dict[str, Any]], ranks: int, case: str
) -> None:
    update = reports[ranks]["updates"][case]
    assert update["difference"] < 1e-6
    assert update["moved"] > 1e-2
    assert update["loss"][0] == pytest.approx(update["loss"][1], rel=1e-6)
    assert update["grad_norm"][0] == pytest.approx(update["grad_norm"][1], rel=1e-5)
    assert update["tokens"][0] == update["tokens"][1]


def test_groups_resume_bit_for_bit_and_log_the_losses_of_one(
    reports: dict[int, dict[str, Any]],
    folder: Path,
    world: World,
    target_path: Path,
    conversations: Path,
    tmp_path: Path,
) -> None:
    assert reports[4]["runs"] == {"same": True}
    config = run_config(target_path, conversations, tmp_path)
    alone = train(replace(config, trainer=replace(config.trainer, sequence_parallel=1)), world)
    logs = [run / "metrics.jsonl" for run in (alone, folder / "4" / "run" / "tiny")]
    expected, shared = ([json.loads(line) for line in log.read_text().splitlines()] for log in logs)
    assert len(shared) == len(expected) == 4
    for line, alone_line in zip(shared, expected, strict=True):
        for name in ("step", "epoch", "lr", "tokens_seen", "predictions", "chains"):
            assert line[name] == alone_line[name]
        for name in ("loss", "grad_norm", "expected_accepted"):
            assert line[name] == pytest.approx(alone_line[name], rel=1e-3)


def test_a_drafter_that_cannot_share_rows_is_refused_before_any_work(
    world: World, target_path: Path, conversations: Path, tmp_path: Path
) -> None:
    config = tiny_config(target_path, conversations, tmp_path, trainer=TrainerConfig(sequence_parallel=2))
    with pytest.raises(ValueError, match="DFly does not share rows between ranks"):
        prepare(config, replace(world, size=2), Console(quiet=True))
