"""`deepspeed --module draftsmith.train`, `torchrun -m draftsmith.train` or `python -m draftsmith.train`."""

from __future__ import annotations

import sys

from draftsmith.configs.schema import command
from draftsmith.train.config import TrainConfig
from draftsmith.train.loop import train
from draftsmith.train.world import World


@command("train", TrainConfig)
def run(config: TrainConfig) -> None:
    """Trains a drafter."""
    world = World.join()
    try:
        train(config, world)
    finally:
        world.leave()


def without_local_rank(arguments: list[str]) -> list[str]:
    """Takes off the rank that launchers add to the command line, which Hydra would refuse; it is in the environment."""
    kept, skip = [], False
    for argument in arguments:
        if skip:
            skip = False
        elif argument in ("--local_rank", "--local-rank"):
            skip = True
        elif not argument.startswith(("--local_rank=", "--local-rank=")):
            kept.append(argument)
    return kept


if __name__ == "__main__":
    sys.argv[1:] = without_local_rank(sys.argv[1:])
    run()
