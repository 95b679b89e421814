"""The target's states of documents: made when asked for (online), or read from a cache on disk.

Both ways run the same function on one whole document at a time, so they give the same bits.

A cache is a folder with `manifest.json`, which names all that decides its content and is written first, and
`shard_XXXXX.safetensors`, each with `<document id>.{tokens,supervised,layer_<i>,final}` of some consecutive documents
and a checksum of each tensor. A shard appears whole or not at all. Rank r of n makes shards r, r + n, r + 2n, ... A
drafter reads the layers it needs and no others, so that one cache serves several drafters.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from draftsmith.data.batch import Document, TargetStates
from draftsmith.data.manifest import CHECKSUMS, MANIFEST, SHARD_TOKENS, Shard, checksum_line, layer_part, read_manifest
from draftsmith.data.manifest import CacheManifest as CacheManifest
from draftsmith.data.wheels import user_cache
from draftsmith.models.target import Target, check_layer_ids

MODES = ("cached", "online")

StateSource = Callable[[Document], TargetStates]
"""Gives a document's states on the CPU, with a batch axis of 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StatesConfig:
    """Where the target's states come from.

    Attributes:
        mode: cached: computed once, kept on disk; online: computed at each use.
        path: folder of the cache; None: one in the user's cache folder, named by what decides its content. A cache that
            holds more layers than the drafter reads serves as well: at `path`, and under None where it is finished and
            there is none of exactly these layers.
        shard_tokens: about how many tokens one file of a new cache holds; a cache keeps the layout, and the layers,
            it was begun with.
    """

    mode: str = "cached"
    path: str | None = None
    shard_tokens: int = SHARD_TOKENS

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ValueError(f"states.mode={self.mode}: choose one of {', '.join(MODES)}")
        if self.shard_tokens < 1:
            raise ValueError(f"states.shard_tokens={self.shard_tokens} must be at least 1")


class OnlineStates:
    """Computes a document's states when asked; a `StateSource`.

    Args:
        layer_ids: 0-based decoder layers to capture.
    """

    def __init__(self, target: Target, layer_ids: Sequence[int]) -> None:
        check_layer_ids(layer_ids, target.spec.num_layers)
        self.target, self.layer_ids = target, tuple(layer_ids)

    def __call__(self, document: Document) -> TargetStates:
        """States with a batch axis of 1, on the CPU.

        Raises:
            ValueError: a state is not finite (float16 overflows at 65504).
        """
        made = self.target.states(document.tokens[None], self.layer_ids)
        named = {f"layer {i}": made.layers[:, :, place] for place, i in enumerate(self.layer_ids)}
        for name, values in (named | {"the final norm": made.final}).items():
            finite = values.isfinite()
            if not finite.all():
                raise ValueError(
                    f"document {document.id}: {int((~finite).sum())} of {finite.numel()} states of {name} are not "
                    f"finite in {self.target.config.dtype}; load the target with target.dtype=float32 or bfloat16"
                )
        return TargetStates(layers=made.layers.cpu(), final=made.final.cpu())


class CachedStates:
    """Reads documents' states from a finished cache, memory-mapped; a `StateSource`.

    Args:
        folder: the cache.
        manifest: what the cache must hold, see `CacheManifest.of`; it may hold more layers, which are not read.

    Raises:
        ValueError: there is no cache, it was made with other settings, it is unfinished, or a file is damaged.
    """

    def __init__(self, folder: Path, manifest: CacheManifest) -> None:
        stored = read_manifest(folder)
        if stored is None:
            raise ValueError(f"{folder}: there is no cache of target states here; make it with `draftsmith cache`")
        _refuse_differences(folder, stored, manifest)
        shards = stored.shards(folder)
        missing = [shard.file.name for shard in shards if not shard.file.is_file()]
        if missing:
            raise ValueError(
                f"{folder}: the cache is unfinished, {len(missing)} of {len(shards)} files are missing (first: "
                f"{missing[0]}); run `draftsmith cache` with the same settings to finish it"
            )
        for shard in shards:
            fault = shard.fault()
            if fault is not None:
                raise ValueError(f"{fault}; run `draftsmith cache` with the same settings: it makes damaged files anew")
        self._files = {i: s.file for s in shards for i in stored.document_ids[s.first : s.stop]}
        self._parts = ("tokens", *map(layer_part, manifest.layer_ids), "final")
        self._verified: set[str] = set()

    def __call__(self, document: Document) -> TargetStates:
        """States with a batch axis of 1, on the CPU.

        Raises:
            ValueError: the document is not in the cache, or not with these tokens; a byte of it has changed on disk,
                which is looked for when it is first read.
        """
        file = self._files.get(document.id)
        if file is None:
            raise ValueError(f"document {document.id} is not in the cache; run `draftsmith cache` for this data")
        with safe_open(file, framework="pt") as opened:
            read = {f"{document.id}.{part}": opened.get_tensor(f"{document.id}.{part}") for part in self._parts}
            if document.id not in self._verified:
                _verify(file, read, opened.metadata() or {})
                self._verified.add(document.id)
        tokens, *layers, final = read.values()
        if not torch.equal(tokens, document.tokens):
            raise ValueError(f"{file}: document {document.id} is there with other tokens; delete the cache")
        stacked = torch.stack(layers, 1) if layers else final.new_empty(len(final), 0, final.shape[1])
        return TargetStates(layers=stacked[None], final=final[None])


def _verify(file: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    """Compares tensors that were read from a file with the checksums that were written with them."""
    lines = set(metadata.get(CHECKSUMS, "").splitlines())
    for name, value in tensors.items():
        if checksum_line(name, value) not in lines:
            document_id, part = name.split(".")
            raise ValueError(
                f"{file}: document {document_id} is damaged, its {part} does not match the checksum; delete this file "
                "and run the same command again: only it is made anew"
            )


def choose_folder(config: StatesConfig, manifest: CacheManifest) -> tuple[Path, list[str]]:
    """The folder of a run's cache, and why caches that hold more layers were not taken.

    It is `states.path`; else, in the user's cache folder, that of exactly these layers where it was begun; else a
    finished one that holds these layers among others; else a new one.
    """
    if config.path is not None:
        return Path(config.path).expanduser(), []
    own = user_cache() / "states" / manifest.folder_name
    if (own / MANIFEST).exists():
        return own, []
    faults = []
    for folder in sorted(own.parent.glob(f"{manifest.digest}*")):
        try:
            stored = read_manifest(folder)
            if stored is not None and not stored.differences(manifest):
                CachedStates(folder, manifest)
                return folder, []
        except ValueError as fault:
            faults.append(str(fault))
    return own, faults


def build_cache(
    documents: Sequence[Document],
    target: Target,
    manifest: CacheManifest,
    folder: Path,
    *,
    rank: int = 0,
    world_size: int = 1,
) -> tuple[CacheManifest, int]:
    """Writes this rank's share of what a cache still lacks; it is finished when every rank has returned.

    Args:
        manifest: of these documents and this target, see `CacheManifest.of`.

    Returns:
        The cache's manifest, which may name more layers than were asked for, and how many tokens' states all ranks
        together had to make.

    Raises:
        ValueError: the folder holds a cache made with other settings, the disk has no room, a state is not finite.
    """
    stored = _begin(folder, manifest)
    shards = stored.shards(folder)
    faults = {shard.file: shard.fault() for shard in shards}
    lacking = [shard for shard in shards if faults[shard.file] is not None]
    needed, free = sum(shard.num_bytes for shard in lacking), shutil.disk_usage(folder).free
    if needed > free:
        raise ValueError(
            f"{folder}: the cache still needs {needed / 2**30:.3g} GiB ({stored.bytes_per_token} bytes for each "
            f"token), the disk has {free / 2**30:.3g} GiB; make room, give another states.path, or train with "
            "states.mode=online"
        )
    own = [shard for number, shard in enumerate(shards) if number % world_size == rank]
    console = Console(stderr=True, quiet=rank != 0)
    for shard in own:
        for stale in folder.glob(f".{shard.file.name}.*.part"):
            stale.unlink()
        if shard in lacking and shard.file.exists():
            console.print(f"{faults[shard.file]}; it is made anew")
    todo = [shard for shard in own if shard in lacking]
    columns = [
        TextColumn("target states"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("tokens"),
        TimeRemainingColumn(),
    ]
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("states", total=sum(shard.num_tokens for shard in todo))
        for shard in todo:
            _write_shard(shard, documents, OnlineStates(target, stored.layer_ids), partial(progress.advance, task))
    return stored, sum(shard.num_tokens for shard in lacking)


def _write_shard(
    shard: Shard, documents: Sequence[Document], states: StateSource, progress: Callable[[int], object]
) -> None:
    """Computes a shard's states and writes them: whole, or not at all."""
    tensors: dict[str, Tensor] = {}
    for document in documents[shard.first : shard.stop]:
        made = states(document)
        parts = {"tokens": document.tokens.clone(), "supervised": document.supervised.clone()}
        parts |= {layer_part(i): made.layers[0, :, n].contiguous() for n, i in enumerate(shard.manifest.layer_ids)}
        parts["final"] = made.final[0].contiguous()
        tensors |= {f"{document.id}.{part}": value for part, value in parts.items()}
        progress(len(document))
    part = shard.file.with_name(f".{shard.file.name}.{os.getpid()}.part")
    try:
        checksums = "\n".join(checksum_line(name, value) for name, value in tensors.items())
        save_file(tensors, part, metadata={CHECKSUMS: checksums})
        _to_disk(part)
        part.rename(shard.file)
        _to_disk(shard.file.parent)
    except (OSError, SafetensorError) as error:
        raise ValueError(
            f"{shard.file} cannot be written ({error}); it needs {shard.num_bytes} bytes: make room and run the same "
            "command again, which keeps the files that are done"
        ) from error
    finally:
        part.unlink(missing_ok=True)


def _begin(folder: Path, manifest: CacheManifest) -> CacheManifest:
    """Writes the manifest where there is none; returns the one on disk, whose layout stands."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        stored = read_manifest(folder)
        if stored is None:
            # Ranks that start together write the same bytes; the last rename wins.
            part = folder / f".{MANIFEST}.{os.getpid()}.part"
            part.write_text(json.dumps(asdict(manifest)), encoding="utf-8")
            _to_disk(part)
            part.rename(folder / MANIFEST)
            _to_disk(folder)
            stored = manifest
    except OSError as error:
        raise ValueError(f"{folder}: a cache cannot be begun here ({error}); give another states.path") from error
    _refuse_differences(folder, stored, manifest)
    return stored


def _refuse_differences(folder: Path, stored: CacheManifest, asked: CacheManifest) -> None:
    differences = stored.differences(asked)
    if differences:
        raise ValueError(
            f"{folder}: the cache was made with other settings: {'; '.join(differences)}. Give another states.path "
            "(states.path=null chooses one by content), or delete this folder"
        )


def _to_disk(path: Path) -> None:
    """Waits until a file's content, or a folder's list of names, is on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
