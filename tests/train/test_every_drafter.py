"""Each drafter of configs/drafter takes a step in bfloat16 from its YAML, on CUDA where there is a device."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hydra import compose, initialize_config_module

from draftsmith.configs.schema import parse
from draftsmith.train.config import TrainConfig
from draftsmith.train.loop import train
from draftsmith.train.world import World


@pytest.mark.parametrize("drafter", ["dfly", "dflash", "dflare", "dspark", "mtp", "mtp_moe"])
def test_a_step_in_bfloat16(world: World, target_path: Path, conversations: Path, tmp_path: Path, drafter: str) -> None:
    overrides = [
        f"drafter={drafter}",
        "loss=dspark" if drafter == "dspark" else "loss=lk",
        "target=hf",
        f"target.path={target_path}",
        "data=files",
        f"data.sources=[{{path: {conversations}, domain: chat}}]",
        "data.row_tokens=64",
        "data.max_length=64",
        "states.mode=online",
        "trainer.dtype=bfloat16",
        "trainer.steps=1",
        "trainer.epochs=null",
        "trainer.rows_per_step=2",
        "trainer.rows_per_micro_batch=1",
        "optimizer.warmup=0",
        f"output_dir={tmp_path}",
        "run_name=step",
    ]
    with initialize_config_module("draftsmith.configs", version_base="1.3"):
        folder = train(parse(compose("train", overrides), TrainConfig), world)
    (line,) = [json.loads(text) for text in (folder / "metrics.jsonl").read_text().splitlines()]
    assert 0 < line["loss"] < 20
    assert line["grad_norm"] > 0
    assert (folder / "checkpoints" / "step_000001").is_dir()
