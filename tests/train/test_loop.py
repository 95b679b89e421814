"""Whole runs in this process, as one rank."""

from __future__ import annotations

import gc
import json
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from tiny_run import tiny_config, write_conversations

from draftsmith.data.cache import StatesConfig
from draftsmith.data.packing import Loader
from draftsmith.models.export import load_drafter
from draftsmith.models.target import Target, TargetConfig
from draftsmith.train import loop
from draftsmith.train.config import DeepSpeedConfig, TrainConfig, TrainerConfig, WandbConfig
from draftsmith.train.loop import start_engine, train
from draftsmith.train.optimizer import learning_rate
from draftsmith.train.plan import prepare
from draftsmith.train.step import DrafterWithObjective
from draftsmith.train.world import World


class Interrupted(BaseException):
    """Stands for a killed process."""


def metrics(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def weights(folder: Path, step: int) -> dict[str, torch.Tensor]:
    return load_file(folder / "checkpoints" / f"step_{step:06d}" / "drafter" / "model.safetensors")


@pytest.fixture(scope="module")
def straight(
    world: World, target_path: Path, conversations: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[TrainConfig, Path]:
    """A run of 10 steps from beginning to end, a checkpoint at each."""
    config = tiny_config(target_path, conversations, tmp_path_factory.mktemp("straight"))
    return config, train(config, world)


def test_a_run_leaves_its_records(straight: tuple[TrainConfig, Path]) -> None:
    config, folder = straight
    assert sorted(path.name for path in folder.iterdir()) == ["checkpoints", "config.yaml", "metrics.jsonl", "run.json"]
    lines = metrics(folder)
    assert [line["step"] for line in lines] == list(range(10))
    assert [line["epoch"] for line in lines] == [0] * 5 + [1] * 5
    assert [line["stage"] for line in lines] == ["lk"] * 5 + ["e2e_tv"] * 5
    assert [line["weights"] for line in lines[:3] + lines[5:]] == [{"lk_dpace": 1.0}] * 3 + [{"e2e_tv": 1.0}] * 5
    assert lines[3]["weights"] == pytest.approx({"lk_dpace": 2 / 3, "e2e_tv": 1 / 3})
    assert lines[4]["weights"] == pytest.approx({"lk_dpace": 1 / 3, "e2e_tv": 2 / 3})
    for line in lines:
        assert line["loss"] == pytest.approx(sum(line["weights"][k] * v for k, v in line["terms"].items()), rel=1e-6)
        assert line["grad_norm"] > 0
        assert line["tokens_per_second"] > 0
        assert 0 < line["expected_accepted"] < 3
        assert line["predictions"] > 0
        assert line["drafter"] == {}
    assert lines[0]["lr"] == pytest.approx(config.optimizer.lr / 4)
    # The second stage warms up again over two steps.
    plain = [learning_rate(config.optimizer, step, 10) for step in range(10)]
    assert [line["lr"] for line in lines] == pytest.approx([*plain[:5], plain[5] / 2, *plain[6:]])
    # Anchors are drawn anew in each epoch.
    assert [line["predictions"] for line in lines[:5]] != [line["predictions"] for line in lines[5:]]
    # The last step's end-to-end TV is 1 - expected accepted / 3 but for chains that the documents' ends cut short.
    assert lines[-1]["loss"] == pytest.approx(1 - lines[-1]["expected_accepted"] / 3, abs=0.1)


def test_training_learns(straight: tuple[TrainConfig, Path]) -> None:
    lines = metrics(straight[1])
    assert lines[2]["loss"] < lines[0]["loss"]
    assert lines[-1]["expected_accepted"] > lines[0]["expected_accepted"]


@pytest.mark.parametrize("stop_after", [3, 5])
def test_an_interrupted_run_goes_on_bit_for_bit(
    world: World,
    straight: tuple[TrainConfig, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    stop_after: int,
) -> None:
    config, folder = straight
    seen: list[tuple[int, int | None]] = []
    honest = Loader.batch

    def watched(self: Loader, rows: list[int | None]) -> Any:
        if self.states is not None:
            seen.extend((len(seen) // 2, row) for row in rows)
            if len(seen) > 2 * stop_after and len(seen) < 100:
                raise Interrupted
        return honest(self, rows)

    monkeypatch.setattr(Loader, "batch", watched)
    config = replace(config, output_dir=str(tmp_path))
    with pytest.raises(Interrupted):
        train(config, world)
    rows = [row for _, row in seen[: 2 * stop_after]]
    # What the interrupted run may have left half-written.
    torn = tmp_path / "tiny" / "checkpoints" / f"step_{stop_after + 1:06d}"
    torn.mkdir()
    with (tmp_path / "tiny" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 7, "loss": 1.0}\n{"ste')
    seen = [(0, 0)] * 100
    torch.manual_seed(12345)
    assert train(replace(config, resume="auto"), world) == tmp_path / "tiny"
    rows += [row for _, row in seen[100:]]

    assert sorted(rows[:10], key=str) == sorted(rows[10:], key=str) == list(range(10))
    resumed, plain = metrics(tmp_path / "tiny"), metrics(folder)
    for name in ("step", "epoch", "lr", "loss", "grad_norm", "terms", "tokens_seen", "predictions"):
        assert [line[name] for line in resumed] == [line[name] for line in plain]
    for name, value in weights(folder, 10).items():
        assert torch.equal(weights(tmp_path / "tiny", 10)[name], value)


def test_a_finished_run_has_nothing_left_to_do(world: World, straight: tuple[TrainConfig, Path]) -> None:
    config, folder = straight
    before = (folder / "metrics.jsonl").read_bytes()
    train(replace(config, resume="auto"), world)
    assert (folder / "metrics.jsonl").read_bytes() == before


def test_cached_states_train_as_online_ones_do(
    world: World, straight: tuple[TrainConfig, Path], tmp_path: Path
) -> None:
    config, folder = straight
    cached = replace(
        config,
        output_dir=str(tmp_path),
        states=StatesConfig(mode="cached", path=str(tmp_path / "cache")),
        trainer=replace(config.trainer, log_every_steps=4, keep_checkpoints=2),
    )
    train(cached, world)
    assert [line["step"] for line in metrics(tmp_path / "tiny")] == [0, 4, 8, 9]
    assert metrics(tmp_path / "tiny")[-1]["loss"] == metrics(folder)[-1]["loss"]
    for name, value in weights(folder, 10).items():
        assert torch.equal(weights(tmp_path / "tiny", 10)[name], value)
    steps = sorted(path.name for path in (tmp_path / "tiny" / "checkpoints").glob("step_*"))
    assert steps == ["step_000009", "step_000010"]


def test_the_target_is_neither_trained_nor_saved(
    world: World, straight: tuple[TrainConfig, Path], target_path: Path
) -> None:
    config, folder = straight
    record = json.loads((folder / "run.json").read_text())
    assert record["facts"]["target"] == Target.load(TargetConfig(path=str(target_path)), device="cpu").fingerprint
    drafter_bytes = sum(value.numel() * 4 for value in weights(folder, 10).values())
    total = sum(path.stat().st_size for path in (folder / "checkpoints" / "step_000010").rglob("*") if path.is_file())
    # Weights, masters, two moments, and the export: five times the drafter, and no target.
    assert total < 5 * drafter_bytes + 100_000
    prepared = prepare(config, world, Console(quiet=True))
    module = DrafterWithObjective(prepared.drafter, prepared.plan.schedule, ("chat",), None, world.device)
    before = prepared.target.fingerprint
    engine = start_engine(config, module, prepared.plan.batch)
    held = sum(p.numel() for group in engine.optimizer.param_groups for p in group["params"])
    assert held == prepared.plan.trainable_parameters
    assert not any(p.requires_grad for p in prepared.target.model.parameters())
    del prepared.target.__dict__["fingerprint"]
    assert prepared.target.fingerprint == before


def test_a_checkpoint_holds_the_drafter_ready_to_load(straight: tuple[TrainConfig, Path], target_path: Path) -> None:
    _, folder = straight
    loaded = load_drafter(folder / "checkpoints" / "step_000010" / "drafter")
    assert loaded.record["run"] == "tiny"
    assert loaded.record["target"]["path"] == str(target_path)
    for name, value in loaded.drafter.state_dict().items():
        assert value.dtype == torch.float32
        assert torch.equal(value, weights(folder, 10)[name])


def test_moments_and_masters_come_back_under_zero_3(
    world: World, straight: tuple[TrainConfig, Path], tmp_path: Path
) -> None:
    config = replace(straight[0], output_dir=str(tmp_path), deepspeed=DeepSpeedConfig(zero_stage=3))
    config = replace(config, trainer=TrainerConfig(steps=4, epochs=None, rows_per_step=2, checkpoint_every_steps=2))
    config = replace(config, optimizer=replace(config.optimizer, warmup=0))
    folder = train(config, world)
    straight_weights = weights(folder, 4)
    (folder / "checkpoints" / "step_000004" / "complete.json").unlink()
    train(replace(config, resume="auto"), world)
    for name, value in straight_weights.items():
        assert torch.equal(weights(folder, 4)[name], value)


def test_offline_wandb_writes_into_the_run_folder(
    world: World, straight: tuple[TrainConfig, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_SILENT", "true")
    config = replace(
        straight[0],
        output_dir=str(tmp_path),
        wandb=WandbConfig(mode="offline"),
        trainer=TrainerConfig(steps=5, epochs=None, rows_per_step=2),
    )
    folder = train(config, world)
    assert list((folder / "wandb").glob("offline-run-*/*.wandb"))


def test_a_target_that_changed_is_refused_on_resume(
    world: World, straight: tuple[TrainConfig, Path], tmp_path: Path, conversations: Path
) -> None:
    config, _ = straight
    data = tmp_path / "conversations.jsonl"
    data.write_bytes(conversations.read_bytes())
    config = tiny_config(Path(config.target.path), data, tmp_path)
    config = replace(config, trainer=replace(config.trainer, steps=5, epochs=None))
    train(config, world)
    write_conversations(data, count=11)
    with pytest.raises(ValueError, match=r"resume: (num_rows was 10 .* and is 11|documents was) "):
        train(replace(config, resume="auto"), world)


@pytest.mark.parametrize(
    "key", ["gradient_clipping", "train_batch_size", "optimizer", "fp16", "sequence_parallel_size"]
)
def test_what_the_trainer_derives_cannot_be_set_behind_its_back(
    world: World, straight: tuple[TrainConfig, Path], tmp_path: Path, key: str
) -> None:
    config = replace(straight[0], output_dir=str(tmp_path), deepspeed=DeepSpeedConfig(extra={key: 1}))
    with pytest.raises(ValueError, match=rf"deepspeed\.extra\.{key} is set by the trainer"):
        train(config, world)


@pytest.mark.parametrize("zero_stage", [1, 2])
def test_a_finished_run_holds_no_weights(
    world: World,
    straight: tuple[TrainConfig, Path],
    tmp_path: Path,
    zero_stage: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Or an ablation would keep the drafter, the gradients and the moments of every cell."""
    begun: list[weakref.ref[Any]] = []
    honest = loop.start_engine

    def watched(*args: Any) -> Any:
        engine = honest(*args)
        begun.extend((weakref.ref(engine), weakref.ref(engine.module)))
        return engine

    monkeypatch.setattr(loop, "start_engine", watched)
    config = replace(straight[0], output_dir=str(tmp_path), deepspeed=DeepSpeedConfig(zero_stage=zero_stage))
    trainer = TrainerConfig(steps=4, epochs=None, rows_per_step=2)
    train(replace(config, trainer=trainer, optimizer=replace(config.optimizer, warmup=0)), world)
    gc.collect()
    assert [reference() for reference in begun] == [None, None]
