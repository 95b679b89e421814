"""draftsmith ablate: trains several drafters alike, and compares them by real speculative decoding."""

from __future__ import annotations

from hydra.core.hydra_config import HydraConfig
from rich.console import Console

from draftsmith.configs.schema import command
from draftsmith.train.ablation import AblateConfig, ablate
from draftsmith.train.world import World


@command("ablate", AblateConfig)
def main(config: AblateConfig) -> None:
    """Trains, decodes and prints the table, cell by cell."""
    world = World.join()
    try:
        ablate(config, list(HydraConfig.get().overrides.task), world, Console())
    finally:
        world.leave()


if __name__ == "__main__":
    main()
