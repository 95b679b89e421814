"""Where a run gets the target's states from: a cache that all ranks fill together, or the target itself."""

from __future__ import annotations

from pathlib import Path

from draftsmith.data.cache import CachedStates, OnlineStates, StateSource, build_cache, states_folder
from draftsmith.train.config import TrainConfig
from draftsmith.train.plan import Prepared
from draftsmith.train.world import World


def open_states(config: TrainConfig, prepared: Prepared, world: World) -> StateSource:
    """The source of states that `states.mode` names; a cache is filled first where it is not complete.

    Raises:
        ValueError: a cache made with other settings, or no room for it.
    """
    if config.states.mode == "online":
        return OnlineStates(prepared.target, prepared.manifest.layer_ids)
    return CachedStates(fill_cache(config, prepared, world), prepared.manifest)


def fill_cache(config: TrainConfig, prepared: Prepared, world: World) -> Path:
    """Makes what the cache lacks, each rank its share, and returns its folder once all are done.

    Ranks on several machines need a folder that all of them see.

    Raises:
        ValueError: a cache made with other settings, or no room for it.
    """
    folder = states_folder(config.states, prepared.manifest)
    build_cache(
        prepared.documents.documents,
        prepared.target,
        prepared.manifest,
        folder,
        rank=world.rank,
        world_size=world.size,
    )
    world.wait()
    return folder
