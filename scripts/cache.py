"""draftsmith cache: runs the target over the training documents and keeps its states on disk."""

from __future__ import annotations

from rich.console import Console

from draftsmith.configs.schema import command
from draftsmith.train.config import TrainConfig
from draftsmith.train.plan import prepare
from draftsmith.train.states import fill_cache
from draftsmith.train.world import World


@command("cache", TrainConfig)
def main(config: TrainConfig) -> None:
    """Prints the plan, then makes what the cache lacks.

    Raises:
        ValueError: the run would not read a cache.
    """
    if config.states.mode != "cached":
        raise ValueError(f"states.mode={config.states.mode} reads no cache; use states.mode=cached, or train at once")
    world = World.join()
    console = Console(quiet=world.rank != 0)
    try:
        fill_cache(config, prepare(config, world, console), world, console)
    finally:
        world.leave()


if __name__ == "__main__":
    main()
