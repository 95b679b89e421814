"""Two ranks do what one does. Both processes are started once; see tests/two_ranks.py for what they do."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from launch import run_ranks
from tiny_run import tiny_config

from draftsmith.train.config import TrainerConfig
from draftsmith.train.loop import train
from draftsmith.train.world import World

CASES = ("unequal", "chains", "no anchor", "mtp", "mixture", "filler")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("two_ranks")


@pytest.fixture(scope="module")
def report(folder: Path, target_path: Path, conversations: Path) -> dict[str, Any]:
    return run_ranks("two_ranks.py", 2, folder, target_path, conversations)


@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
@pytest.mark.parametrize("case", CASES)
def test_an_update_of_two_ranks_is_that_of_one(report: dict[str, Any], case: str, zero_stage: int) -> None:
    update = report["updates"][f"{case}, ZeRO {zero_stage}"]
    assert update["difference"] < 1e-6
    assert update["moved"] > 1e-2
    assert update["loss"][0] == pytest.approx(update["loss"][1], rel=1e-6)
    assert update["grad_norm"][0] == pytest.approx(update["grad_norm"][1], rel=1e-5)
    assert update["seconds"] < 30


def test_one_prediction_against_nine(report: dict[str, Any]) -> None:
    assert report["updates"]["unequal, ZeRO 1"]["slots"] == 10


@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_the_load_of_experts_is_that_of_both_ranks(report: dict[str, Any], zero_stage: int) -> None:
    load = report["load"]
    expected = {"expert_max_load": pytest.approx(max(load) / 10), "experts_unused": load.count(0)}
    assert report["updates"][f"mixture, ZeRO {zero_stage}"]["drafter"] == expected
    assert report["updates"][f"mtp, ZeRO {zero_stage}"]["drafter"] == {}


def test_a_step_without_any_prediction_changes_nothing(report: dict[str, Any]) -> None:
    assert report["nothing_to_predict"] == {"losses": [None, None], "moved": 0.0}


def test_both_ranks_stop_where_one_meets_a_nan(report: dict[str, Any]) -> None:
    first, second = report["not_finite"]
    assert first == second
    assert first.startswith("step 0: the target's final states is not finite; this step changed no weight")


def test_rank_0_decides_the_folder_and_the_refusal(report: dict[str, Any], folder: Path) -> None:
    found = report["folders"]
    assert found["made"] == 1
    assert found["chosen"][0] == found["chosen"][1]
    assert Path(found["chosen"][0]).parent == folder / "folders"
    assert found["refusals"][0] == found["refusals"][1]
    assert found["refusals"][0].startswith("resume=nowhere: no such folder")
    assert found["no_data"] == ["no usable conversation"] * 2


def test_two_ranks_resume_bit_for_bit(report: dict[str, Any]) -> None:
    assert report["runs"] == {"zero1": {"same": True}, "zero3": {"same": True}}


def test_two_ranks_log_the_losses_of_one(
    report: dict[str, Any], folder: Path, world: World, target_path: Path, conversations: Path, tmp_path: Path
) -> None:
    config = tiny_config(target_path, conversations, tmp_path)
    alone = train(replace(config, trainer=TrainerConfig(epochs=2, rows_per_step=4)), world)
    expected = [json.loads(line) for line in (alone / "metrics.jsonl").read_text().splitlines()]
    # 10 rows in steps of 4: the third step of each epoch has 2 rows and 2 fillers.
    assert len(expected) == 6
    for stage in (1, 3):
        lines = (folder / f"zero{stage}" / "tiny" / "metrics.jsonl").read_text().splitlines()
        for line, alone_line in zip(map(json.loads, lines), expected, strict=True):
            for name in ("step", "epoch", "lr", "tokens_seen", "predictions", "chains"):
                assert line[name] == alone_line[name]
            for name in ("loss", "grad_norm", "expected_accepted"):
                assert line[name] == pytest.approx(alone_line[name], rel=1e-3)
        assert json.loads(lines[0])["loss"] == pytest.approx(expected[0]["loss"], rel=1e-6)
