"""Checkpoints: whole or not there at all.

A step's folder holds DeepSpeed's own state, each rank's `TrainState`, and the drafter as it would be exported. Last of
all comes `complete.json`, which lists every file with its size; a folder without it, or that differs from it, is torn.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from deepspeed import DeepSpeedEngine
from deepspeed.utils import safe_get_full_fp32_param
from torch import Tensor

from draftsmith.models.drafter import Drafter
from draftsmith.models.export import save_drafter
from draftsmith.train.world import World

CHECKPOINTS = "checkpoints"
COMPLETE = "complete.json"
EVALUATION = "evaluation.json"  # comes later, so it is not in the list


@dataclass(slots=True, kw_only=True)
class TrainState:
    """Where a run stands: exactly what resuming means. The loop advances it, so it is not frozen.

    Attributes:
        step: optimizer steps done.
        epoch: the epoch of the next row.
        next_row: the next row of that epoch.
        tokens_seen: tokens of all rows so far, over all ranks, without padding.
        rng: this rank's state of torch's generators, by device type.
    """

    step: int = 0
    epoch: int = 0
    next_row: int = 0
    tokens_seen: int = 0
    rng: dict[str, Tensor]

    @classmethod
    def start(cls, device: torch.device) -> TrainState:
        """The state before the first step."""
        return cls(rng=random_state(device))

    def advance(self, rows: int, rows_per_epoch: int, tokens: int) -> None:
        """One optimizer step of `rows` rows is done; a step never spans two epochs."""
        self.step += 1
        self.next_row += rows
        self.tokens_seen += tokens
        if self.next_row >= rows_per_epoch:
            self.epoch, self.next_row = self.epoch + 1, 0


def random_state(device: torch.device) -> dict[str, Tensor]:
    """The states of torch's generators that a step can draw from."""
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def step_of(checkpoint: Path) -> int:
    """The step that a checkpoint folder is of: step_000100 -> 100."""
    return int(checkpoint.name.removeprefix("step_"))


def save_checkpoint(
    engine: DeepSpeedEngine,
    drafter: Drafter[Any],
    state: TrainState,
    folder: Path,
    record: dict[str, Any],
    world: World,
) -> Path:
    """Writes a checkpoint; every rank must call it.

    Args:
        folder: the run's checkpoints folder.
        record: what the drafter's export says about its target and its run.
    """
    path = folder / f"step_{state.step:06d}"
    if world.rank == 0 and path.exists():
        shutil.rmtree(path)  # left torn by an interrupted run: a whole one would have been resumed from
    world.wait()
    engine.save_checkpoint(str(folder), tag=path.name, save_latest=False)
    state.rng = random_state(world.device)
    torch.save(asdict(state), path / f"train_state_rank_{world.rank}.pt")
    weights = full_weights(drafter)
    if world.rank == 0:
        save_drafter(path / "drafter", drafter, record, weights)
    world.wait()
    if world.rank == 0:
        files = {str(p.relative_to(path)): p.stat().st_size for p in sorted(path.rglob("*")) if p.is_file()}
        write_whole(path / COMPLETE, json.dumps({"step": state.step, "files": files}, indent=2))
    world.wait()
    return path


def full_weights(drafter: Drafter[Any]) -> dict[str, Tensor]:
    """The drafter's state in float32 on the CPU, gathered from all ranks; every rank must call it.

    Under ZeRO the master weights are the optimizer's; under stage 0 in float32 they are the module's own.
    """
    weights = {name: buffer.detach().cpu().clone() for name, buffer in drafter.state_dict().items()}
    for name, parameter in drafter.named_parameters():
        master = safe_get_full_fp32_param(parameter)
        weights[name] = (parameter if master is None else master).detach().float().cpu().clone()
    return weights


def load_checkpoint(engine: DeepSpeedEngine, path: Path, world: World) -> TrainState:
    """Puts engine and random generators back to a checkpoint; every rank must call it.

    Raises:
        ValueError: DeepSpeed found nothing to load.
    """
    loaded, _ = engine.load_checkpoint(str(path.parent), tag=path.name)
    if loaded is None:
        raise ValueError(f"DeepSpeed could not load {path}; resume from an earlier checkpoint of {path.parent}")
    saved = torch.load(path / f"train_state_rank_{world.rank}.pt", weights_only=True)
    state = TrainState(**saved)
    torch.set_rng_state(state.rng["cpu"])
    if world.device.type == "cuda":
        torch.cuda.set_rng_state(state.rng["cuda"], world.device)
    return state


def what_is_torn(path: Path) -> str | None:
    """What makes a checkpoint folder unusable; None: it is whole."""
    if not (path / COMPLETE).is_file():
        return f"{COMPLETE} is missing: the checkpoint was never finished"
    for name, size in json.loads((path / COMPLETE).read_text())["files"].items():
        if not (path / name).is_file():
            return f"{name} is missing"
        if (found := (path / name).stat().st_size) != size:
            return f"{name} has {found} bytes, not {size}"
    return None


def refuse_torn(path: Path) -> None:
    """Raises ValueError where a checkpoint is not whole."""
    if (torn := what_is_torn(path)) is not None:
        raise ValueError(
            f"{path} cannot be loaded: {torn}; name another checkpoint, or the run folder for its last one"
        )


def find_checkpoint(folder: Path) -> tuple[Path, tuple[str, ...]]:
    """The last whole checkpoint of a run, and a warning for each torn one that was passed over.

    Raises:
        ValueError: there is none.
    """
    warnings: list[str] = []
    for path in sorted(folder.glob("step_*"), key=step_of, reverse=True):
        torn = what_is_torn(path)
        if torn is None:
            return path, tuple(warnings)
        warnings.append(f"WARNING: {path} is torn ({torn}); falling back to the checkpoint before it")
    detail = f" ({len(warnings)} torn)" if warnings else ""
    raise ValueError(f"no whole checkpoint in {folder}{detail}; remove the run folder to start anew")


def best_checkpoint(folder: Path) -> Path | None:
    """The whole checkpoint with the largest acceptance length, the latest of equals; None: none was evaluated."""
    found = []
    for path in sorted(folder.glob("step_*"), key=step_of):
        if (path / EVALUATION).is_file() and what_is_torn(path) is None:
            length = json.loads((path / EVALUATION).read_text(encoding="utf-8"))["acceptance_length"]
            found.append((-math.inf if length is None else length, step_of(path), path))
    return max(found)[2] if found else None


def keep_checkpoints(folder: Path, count: int) -> None:
    """Removes all but the last `count` checkpoints and the best one, if any was evaluated.

    The completion file goes first: half removed is torn, not whole.
    """
    best = best_checkpoint(folder)
    for path in sorted(folder.glob("step_*"), key=step_of)[:-count]:
        if path != best:
            (path / COMPLETE).unlink(missing_ok=True)
            shutil.rmtree(path)


def clear_later(folder: Path, checkpoint: Path) -> None:
    """Removes torn checkpoints of later steps than the one that a run goes on from, which would pass for newer ones.

    Raises:
        ValueError: a later one is whole.
    """
    for path in folder.glob("step_*"):
        if step_of(path) > step_of(checkpoint):
            if what_is_torn(path) is None:
                raise ValueError(
                    f"resume={checkpoint}: the run already has {path.name}; remove it to go back, or go on from "
                    f"the last checkpoint by resume={folder.parent}"
                )
            shutil.rmtree(path)


def write_whole(path: Path, text: str) -> None:
    """Writes a file that is there with all of the text, or not at all."""
    partial = path.with_name(f".{path.name}.partial")
    with partial.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
