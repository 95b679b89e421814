"""Where a run's target states come from."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from tiny_run import tiny_config

from draftsmith.data.cache import StatesConfig
from draftsmith.models.moe import MoEConfig
from draftsmith.models.mtp import MTPConfig
from draftsmith.train.config import TrainerConfig
from draftsmith.train.loop import train
from draftsmith.train.optimizer import OptimizerConfig
from draftsmith.train.plan import prepare
from draftsmith.train.states import fill_cache
from draftsmith.train.world import World

CACHED, SHORT = StatesConfig(mode="cached"), TrainerConfig(epochs=1, rows_per_step=2)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "checkpoints" / "step_000005" / "drafter" / "model.safetensors")


def test_mtp_trains_from_the_cache_that_dfly_used(
    world: World,
    target_path: Path,
    conversations: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    dfly = tiny_config(
        target_path, conversations, tmp_path / "dfly", states=CACHED, trainer=SHORT, optimizer=OptimizerConfig(warmup=1)
    )
    moe = MoEConfig(num_experts=4, expert_intermediate_size=16, shared_intermediate_size=16)
    mtp = replace(dfly, drafter=MTPConfig(moe=moe), output_dir=str(tmp_path / "mtp"))

    train(dfly, world)
    (folder,) = (tmp_path / "user" / "draftsmith" / "states").iterdir()
    assert folder.name.endswith("_0_2")
    assert f"target states of 10 documents: {folder}\n" in capsys.readouterr().out

    before = {file.name: file.stat().st_mtime_ns for file in folder.iterdir()}
    shared = train(mtp, world)
    said = f"{folder}, already there; of its layers [0, 2] this drafter reads none: the final state is enough\n"
    assert f"target states of 10 documents: {said}" in capsys.readouterr().out
    assert {file.name: file.stat().st_mtime_ns for file in folder.iterdir()} == before
    assert list(folder.parent.iterdir()) == [folder]

    alone = train(replace(mtp, output_dir=str(tmp_path / "online"), states=StatesConfig(mode="online")), world)
    expected = weights(alone)
    assert all(torch.equal(value, expected[name]) for name, value in weights(shared).items())

    for folder_of_run in (shared, alone):
        for line in map(json.loads, (folder_of_run / "metrics.jsonl").read_text().splitlines()):
            assert 1 < line["drafter"]["expert_max_load"] < 4
            assert line["drafter"]["experts_unused"] in (0, 1, 2)

    # A damaged one is named, and MTP makes its own.
    file = folder / "shard_00000.safetensors"
    file.write_bytes(file.read_bytes()[:100])
    prepared = prepare(mtp, world, Console(quiet=True))
    assert fill_cache(mtp, prepared, world, Console()) == folder.with_name(folder.name.removesuffix("_0_2"))
    said = capsys.readouterr().out
    assert f"a cache with more layers is not used: {file} is damaged: 100 bytes" in said
    assert said.endswith(f"target states of 10 documents: {folder.with_name(prepared.manifest.digest)}\n")
