"""What two ranks do: `two_ranks.py FOLDER TARGET DATA`, run once as two processes by tests/train/test_two_ranks.py.

Rank 0 writes what it found to FOLDER/report.json.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from tiny_run import (
    document,
    documents_of,
    largest_difference,
    load_by_hand,
    mixture,
    random_drafter,
    tiny_config,
    update_by_hand,
    update_by_trainer,
    with_random_weights,
)

from draftsmith.data.batch import Document, TargetStates
from draftsmith.data.cache import OnlineStates, StatesConfig
from draftsmith.models.mtp import MTPConfig
from draftsmith.models.target import Target, TargetConfig
from draftsmith.train.config import DeepSpeedConfig, TrainerConfig
from draftsmith.train.loop import train
from draftsmith.train.run_folder import choose_run_folder, write_records
from draftsmith.train.world import World


def updates(world: World, target: Target) -> dict[str, Any]:
    """How far an update is from one process's, and the loss beside it, for each case and ZeRO stage."""
    cases = {
        # 1 prediction on rank 0, 9 on rank 1.
        "unequal": (random_drafter(target, block_size=2), [document(5, 2), document(8, 10)]),
        # Each rank draws where own tokens are read as one process does.
        "chains": (random_drafter(target, own_token_rate=0.5), [document(5, 2), document(8, 10)]),
        # Only rank 0 has anything to predict: rank 1's last token is its only supervised one.
        "no anchor": (random_drafter(target), [document(8, 10), document(23, 1)]),
        # The same on an MTP drafter's own tokens.
        "mtp": (
            with_random_weights(MTPConfig(checkpoint_depths=True).build(target.spec)),
            [document(8, 10), document(23, 1)],
        ),
        "mixture": (mixture(target), [document(5, 2), document(8, 10)]),
        # Three rows and two ranks: the fourth is a filler.
        "filler": (random_drafter(target), [document(8, 10), document(4, 6), document(6, 3)]),
    }
    found = {}
    for name, (drafter, documents) in cases.items():
        expected, loss, norm = update_by_hand(target, drafter, documents_of(*documents))
        for stage in (0, 1, 2, 3):
            began = time.monotonic()
            weights, (result,) = update_by_trainer(
                world,
                target,
                drafter,
                documents_of(*documents),
                zero_stage=stage,
                accumulation_steps=(len(documents) + 1) // 2,
            )
            found[f"{name}, ZeRO {stage}"] = {
                "difference": largest_difference(weights, expected),
                "moved": largest_difference(weights, drafter.state_dict()),
                "loss": [result.loss, loss],
                "grad_norm": [result.grad_norm, norm],
                "slots": result.counts.slots,
                "drafter": result.drafter,
                "seconds": time.monotonic() - began,
            }
    return found


def nothing_to_predict(world: World, target: Target) -> dict[str, Any]:
    """Two steps of rows without an anchor."""
    drafter = random_drafter(target)
    weights, results = update_by_trainer(
        world, target, drafter, documents_of(document(23, 1), document(22, 1)), zero_stage=2, steps=2
    )
    return {"losses": [r.loss for r in results], "moved": largest_difference(weights, drafter.state_dict())}


def not_finite_on_one_rank(world: World, target: Target) -> list[str]:
    """What each rank says when rank 1's target states hold a NaN."""
    honest = OnlineStates.__call__

    def broken(self: OnlineStates, document: Document) -> TargetStates:
        states = honest(self, document)
        if world.rank == 1:
            states.final[0, 12] = float("nan")
        return states

    type.__setattr__(OnlineStates, "__call__", broken)
    try:
        update_by_trainer(world, target, random_drafter(target), documents_of(document(5, 2), document(8, 10)))
        said = "nothing"
    except ValueError as error:
        said = str(error)
    finally:
        type.__setattr__(OnlineStates, "__call__", honest)
    return all_say(world, said)


def folders(world: World, base: Path) -> dict[str, Any]:
    """Which folder each rank has when one comes late, and what each says when rank 0 refuses."""
    config = replace(tiny_config(base / "target", base / "data", base / "folders"), run_name=None)
    if world.rank == 1:
        time.sleep(1.1)
    folder = world.decided_by_rank_zero(lambda: choose_run_folder(config))
    world.decided_by_rank_zero(lambda: write_records(folder, config, {}))
    chosen = all_say(world, str(folder.path))
    try:
        world.decided_by_rank_zero(lambda: choose_run_folder(replace(config, resume="nowhere")))
        said = "nothing"
    except ValueError as error:
        said = str(error)
    made = len(list((base / "folders").iterdir()))
    return {"chosen": chosen, "made": made, "refusals": all_say(world, said), "no_data": all_say(world, no_data(world))}


def no_data(world: World) -> str:
    """What this rank says when loading fails on the rank that loads first, while the other waits for it."""

    def load() -> str:
        if world.rank == 0:
            raise ValueError("no usable conversation")
        return "loaded"

    try:
        return world.first_on_each_machine(load)
    except ValueError as error:
        return str(error)


def runs(world: World, base: Path, target: Path, data: Path) -> dict[str, Any]:
    """Whole runs, under ZeRO 1 and 3, the second half of each after a resume; states cached by both ranks."""
    found = {}
    for stage in (1, 3):
        config = tiny_config(
            target,
            data,
            base / f"zero{stage}",
            states=StatesConfig(mode="cached", path=str(base / "cache"), shard_tokens=100),
            deepspeed=DeepSpeedConfig(zero_stage=stage),
            trainer=TrainerConfig(epochs=2, rows_per_step=4, checkpoint_every_steps=2, keep_checkpoints=9),
        )
        folder = train(config, world)
        last = folder / "checkpoints" / "step_000006"
        before = (last / "drafter" / "model.safetensors").read_bytes()
        world.wait()
        if world.rank == 0:
            for step in (4, 6):
                (folder / "checkpoints" / f"step_{step:06d}" / "complete.json").unlink()
        world.wait()
        train(replace(config, resume="auto"), world)
        found[f"zero{stage}"] = {"same": (last / "drafter" / "model.safetensors").read_bytes() == before}
    return found


def all_say(world: World, text: str) -> list[str]:
    said: list[Any] = [None] * world.size
    torch.distributed.all_gather_object(said, text)
    return said


def main() -> None:
    base, target_path, data = map(Path, sys.argv[1:])
    world = World.join()
    target = Target.load(TargetConfig(path=str(target_path)), device="cpu")
    report = {
        "updates": updates(world, target),
        "load": load_by_hand(target, mixture(target), documents_of(document(5, 2), document(8, 10))),
        "nothing_to_predict": nothing_to_predict(world, target),
        "not_finite": not_finite_on_one_rank(world, target),
        "folders": folders(world, base),
        "runs": runs(world, base, target_path, data),
    }
    if world.rank == 0:
        (base / "report.json").write_text(json.dumps(report))
    world.leave()


if __name__ == "__main__":
    main()
