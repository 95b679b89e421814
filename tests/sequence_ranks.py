"""What ranks that share rows do: `sequence_ranks.py FOLDER TARGET DATA`, run by tests/train/test_sequence_parallel.py.

Three or four processes; rank 0 writes what it found to FOLDER/report.json.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import tiny_run
from tiny_run import document, documents_of, largest_difference, tiny_config, update_by_hand, update_by_trainer

from draftsmith.models.moe import MoEConfig
from draftsmith.models.mtp import MTPConfig
from draftsmith.models.target import Target, TargetConfig
from draftsmith.train.config import DeepSpeedConfig, TrainConfig, TrainerConfig
from draftsmith.train.loop import train
from draftsmith.train.optimizer import OptimizerConfig
from draftsmith.train.world import World

EIGHT = {"num_heads": 8, "num_kv_heads": 2}
NINE = {"num_heads": 9, "num_kv_heads": 3}

MANY = document(3, 18)
# Only the last positions of the row are supervised: the first ranks' shards have none.
LATE = document(18, 6)
# Two chains: with more ranks than that, some have none.
FEW = document(10, 3)
NONE = document(23, 1)

# By the number of ranks: heads, degree, ZeRO stage, rows per micro-batch, documents, and settings of the drafter.
CASES: dict[int, dict[str, tuple[dict[str, int], int, int, int, tuple[Any, ...], dict[str, Any]]]] = {
    4: {
        **{f"8/2 on 4, ZeRO {stage}": (EIGHT, 4, stage, 1, (MANY, LATE), {}) for stage in (0, 1, 2, 3)},
        "two groups": (EIGHT, 2, 1, 1, (MANY, LATE), {"tokens": "sampled"}),
        "two groups, ZeRO 3, one without a chain": (EIGHT, 2, 3, 1, (MANY, NONE), {"checkpoint_depths": True}),
        "fewer chains than ranks": (EIGHT, 4, 3, 1, (FEW,), {"checkpoint_depths": True}),
        "two rows in a micro-batch": (EIGHT, 4, 1, 2, (LATE, MANY), {"tokens": "gold", "stop_gradient": True}),
        "experts": (EIGHT, 4, 3, 1, (LATE, FEW), {"moe": MoEConfig(num_experts=4, expert_intermediate_size=16)}),
    },
    3: {
        "9/3 on 3, ZeRO 1": (NINE, 3, 1, 1, (MANY, LATE), {}),
        "9/3 on 3, ZeRO 3": (NINE, 3, 3, 1, (FEW, LATE), {"attention_output_gate": True, "qk_norm": True}),
    },
}


def updates(world: World, target: Target) -> dict[str, Any]:
    """How far an update is from one process's, and the loss beside it."""
    found = {}
    for name, (heads, degree, stage, micro, documents, settings) in CASES[world.size].items():
        drafter = tiny_run.with_random_weights(MTPConfig(**heads, **settings).build(target.spec))
        expected, loss, norm = update_by_hand(target, drafter, documents_of(*documents))
        groups = world.size // degree
        weights, (result,) = update_by_trainer(
            world,
            target,
            drafter,
            documents_of(*documents),
            zero_stage=stage,
            rows_per_micro_batch=micro,
            accumulation_steps=len(documents) // (groups * micro),
            sequence_parallel=degree,
        )
        found[name] = {
            "difference": largest_difference(weights, expected),
            "moved": largest_difference(weights, drafter.state_dict()),
            "loss": [result.loss, loss],
            "grad_norm": [result.grad_norm, norm],
            "tokens": [result.counts.tokens, sum(len(document) for document in documents)],
        }
    return found


def run_config(target: Path, data: Path, output_dir: Path) -> TrainConfig:
    """Four steps of four rows, two steps before the resume and two after."""
    return tiny_config(
        target,
        data,
        output_dir,
        drafter=MTPConfig(**EIGHT),
        optimizer=OptimizerConfig(lr=1e-2, warmup=1),
        deepspeed=DeepSpeedConfig(zero_stage=3),
        trainer=TrainerConfig(steps=4, epochs=None, rows_per_step=4, sequence_parallel=2, checkpoint_every_steps=2),
    )


def runs(world: World, base: Path, target: Path, data: Path) -> dict[str, Any]:
    """A whole run of two groups of two ranks, the second half of it again after a resume."""
    config = run_config(target, data, base / "run")
    folder = train(config, world)
    last = folder / "checkpoints" / "step_000004"
    before = (last / "drafter" / "model.safetensors").read_bytes()
    world.wait()
    if world.rank == 0:
        (last / "complete.json").unlink()
    world.wait()
    train(replace(config, resume="auto"), world)
    return {"same": (last / "drafter" / "model.safetensors").read_bytes() == before}


def main() -> None:
    tiny_run.ROW_TOKENS = 25  # no degree divides the positions of a row
    base, target_path, data = map(Path, sys.argv[1:])
    world = World.join()
    target = Target.load(TargetConfig(path=str(target_path)), device="cpu")
    report = {"updates": updates(world, target)}
    if world.size == 4:
        report["runs"] = runs(world, base, target_path, data)
    if world.rank == 0:
        (base / "report.json").write_text(json.dumps(report))
    world.leave()


if __name__ == "__main__":
    main()
