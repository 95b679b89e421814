"""Checkpoints are evaluated by real decoding, which changes nothing about the run."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from tiny_run import tiny_config, write_conversations

from draftsmith.decode.evaluate import EvaluateConfig, evaluate
from draftsmith.train.config import EvaluationConfig, TrainConfig, TrainerConfig
from draftsmith.train.loop import train
from draftsmith.train.world import World


@pytest.fixture
def config(target_path: Path, tmp_path: Path) -> TrainConfig:
    """4 steps with a checkpoint at each, every second predecessor a drafted one, drawn at random."""
    base = tiny_config(target_path, write_conversations(tmp_path / "chat.jsonl", 16), tmp_path / "plain")
    return replace(
        base,
        data=replace(base.data, held_out_fraction=0.3),
        drafter=replace(base.drafter, own_token_rate=0.5),
        optimizer=replace(base.optimizer, warmup=0),
        trainer=TrainerConfig(steps=4, epochs=None, rows_per_step=2, checkpoint_every_steps=1, keep_checkpoints=4),
    )


def evaluated(config: TrainConfig, tmp_path: Path) -> TrainConfig:
    evaluation = EvaluationConfig(num_prompts=3, max_new_tokens=8, batch_size=2)
    return replace(config, output_dir=str(tmp_path / "evaluated"), evaluation=evaluation)


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def report_of(folder: Path, step: int) -> dict[str, Any]:
    report: dict[str, Any] = json.loads((folder / "checkpoints" / f"step_{step:06d}" / "evaluation.json").read_text())
    return report


def test_every_checkpoint_is_decoded_and_no_weight_changes(world: World, config: TrainConfig, tmp_path: Path) -> None:
    plain, folder = train(config, world), train(evaluated(config, tmp_path), world)
    weights = "checkpoints/step_000004/drafter/model.safetensors"
    expected = load_file(plain / weights)
    for name, value in load_file(folder / weights).items():
        assert torch.equal(value, expected[name])
    decoded = [line for line in lines(folder) if "acceptance_length" in line]
    assert [line["step"] for line in decoded] == [1, 2, 3, 4]
    assert [line for line in lines(plain) if "acceptance_length" in line] == []
    for line in decoded:
        report = report_of(folder, line["step"])
        assert report["num_prompts"] == 3
        assert report["identical_to_target"] is True
        assert report["acceptance_length"] == line["acceptance_length"] >= 1
        assert report["acceptance_length_interval"] == line["acceptance_length_interval"]

    path = folder / "checkpoints" / "step_000004" / "drafter"
    settings = EvaluateConfig(drafter_path=str(path), num_prompts=3, max_new_tokens=8, output=str(tmp_path / "e.json"))
    later = evaluate(settings, Console(file=io.StringIO()))
    report = report_of(folder, 4)
    for one, other in zip(report["prompts"], later["prompts"], strict=True):
        assert (one["id"], one["tokens"], one["accepted"]) == (other["id"], other["tokens"], other["accepted"])
    assert report["acceptance_length"] == later["acceptance_length"]
    assert set(report) == set(later)


def test_an_interrupted_evaluation_is_made_up_for(world: World, config: TrainConfig, tmp_path: Path) -> None:
    config = evaluated(config, tmp_path)
    folder = train(config, world)
    before = (folder / "metrics.jsonl").read_text().splitlines()
    report = report_of(folder, 4)
    (folder / "checkpoints" / "step_000004" / "evaluation.json").unlink()
    (folder / "metrics.jsonl").write_text("".join(line + "\n" for line in before[:-1]))
    train(replace(config, resume="auto"), world)
    assert (folder / "metrics.jsonl").read_text().splitlines() == before
    assert report_of(folder, 4)["acceptance_length"] == report["acceptance_length"]


def test_a_report_on_other_prompts_is_made_anew(world: World, config: TrainConfig, tmp_path: Path) -> None:
    config = evaluated(config, tmp_path)
    folder = train(config, world)
    first = report_of(folder, 4)
    train(replace(config, resume="auto"), world)
    assert report_of(folder, 4) == first
    longer = replace(config.evaluation, max_new_tokens=12, num_prompts=2)
    train(replace(config, resume="auto", evaluation=longer), world)
    again = report_of(folder, 4)
    assert (again["num_prompts"], again["max_new_tokens"]) == (2, 12)
    assert lines(folder)[-1]["acceptance_length"] == again["acceptance_length"]


def test_what_cannot_be_decoded_is_refused_before_the_first_step(
    world: World, config: TrainConfig, tmp_path: Path
) -> None:
    config = evaluated(config, tmp_path)
    nothing = replace(config, data=replace(config.data, held_out_fraction=0.0))
    with pytest.raises(ValueError, match="held_out_fraction=0"):
        train(nothing, world)
    long = replace(config, evaluation=replace(config.evaluation, max_new_tokens=600))
    with pytest.raises(ValueError, match=r"target's .* positions leave"):
        train(long, world)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"num_prompts": -1}, r"evaluation\.num_prompts=-1 must be at least 0"),
        ({"max_new_tokens": 1}, "at least 2"),
        ({"batch_size": 0}, r"evaluation\.batch_size=0 must be at least 1"),
    ],
)
def test_settings_out_of_range_are_refused(setting: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EvaluationConfig(**setting)
