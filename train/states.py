"""Where a run gets the target's states from: a cache that all ranks fill together, or the target itself."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from draftsmith.data.cache import CachedStates, OnlineStates, StateSource, build_cache, choose_folder
from draftsmith.train.config import TrainConfig
from draftsmith.train.plan import Prepared
from draftsmith.train.world import World


def open_states(config: TrainConfig, prepared: Prepared, world: World, console: Console) -> StateSource:
    """The source of states that `states.mode` names; a cache is filled first where it is not complete.

    Raises:
        ValueError: a cache made with other settings, or no room for it.
    """
    if config.states.mode == "online":
        return OnlineStates(prepared.target, prepared.manifest.layer_ids)
    return CachedStates(fill_cache(config, prepared, world, console), prepared.manifest)


def fill_cache(config: TrainConfig, prepared: Prepared, world: World, console: Console) -> Path:
    """Makes what the cache lacks, each rank its share, and returns its folder once all are done.

    Ranks on several machines need a folder that all of them see. One line says which cache it is.

    Raises:
        ValueError: a cache made with other settings, or no room for it.
    """
    asked, documents = prepared.manifest, prepared.documents.documents
    folder, faults = world.decided_by_rank_zero(lambda: choose_folder(config.states, asked))
    for fault in faults:
        console.print(f"a cache with more layers is not used: {fault}", soft_wrap=True)
    stored, num_made = build_cache(documents, prepared.target, asked, folder, rank=world.rank, world_size=world.size)
    world.wait()
    line = f"target states of {len(documents):,} documents: {folder}" + ("" if num_made else ", already there")
    if stored.layer_ids != asked.layer_ids:
        read = list(asked.layer_ids) or "none: the final state is enough"
        line += f"; of its layers {list(stored.layer_ids)} this drafter reads {read}"
    console.print(line, soft_wrap=True)
    return folder
