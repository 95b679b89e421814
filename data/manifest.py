"""What decides the numbers in a cache of target states, and how they are laid into files."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise, zip_longest
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from torch import Tensor

from draftsmith.data.batch import Document
from draftsmith.models.target import DTYPES, Target, check_layer_ids

MANIFEST = "manifest.json"
CHECKSUMS = "xxh3_64"  # the key of a file's metadata that holds them, a line for each tensor
SHARD_TOKENS = 16384


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheManifest:
    """All that decides the numbers in a cache, and how they are laid into files.

    Attributes:
        format: version of this layout.
        target: fingerprint of the target's configuration and weights.
        layer_ids: captured 0-based decoder layers; whoever needs fewer of them can read the cache too.
        dtype: of the states, which is the target's.
        attention: the target's attention implementation.
        final: the final state is taken after the target's final norm.
        chat_template: hash of the template that rendered the documents.
        rendering: what else decided how conversations became documents, such as max_length and thinking.
        document_ids: content hashes, in order.
        document_tokens: length of each document.
        shard_tokens: the layout; not part of what decides the numbers.
    """

    format: int = 2
    target: str
    layer_ids: tuple[int, ...]
    hidden_size: int
    dtype: str
    attention: str
    final: str = "post_norm"
    chat_template: str
    rendering: dict[str, Any]
    document_ids: tuple[str, ...]
    document_tokens: tuple[int, ...]
    shard_tokens: int = SHARD_TOKENS

    @classmethod
    def of(
        cls,
        documents: Sequence[Document],
        target: Target,
        layer_ids: Sequence[int],
        *,
        rendering: Mapping[str, Any],
        shard_tokens: int = SHARD_TOKENS,
    ) -> CacheManifest:
        """The manifest of a cache of these documents' states.

        Args:
            rendering: settings that decided the documents, by name: they are compared, and named when they differ.

        Raises:
            ValueError: illegal layer ids, or two documents with one id.
        """
        check_layer_ids(layer_ids, target.spec.num_layers)
        ids = tuple(document.id for document in documents)
        document_id, times = Counter(ids).most_common(1)[0] if ids else ("", 0)
        if times > 1:
            raise ValueError(f"document {document_id} is there {times} times; remove identical documents")
        template = json.dumps(target.tokenizer.chat_template)
        return cls(
            target=target.fingerprint,
            layer_ids=tuple(layer_ids),
            hidden_size=target.spec.hidden_size,
            dtype=target.config.dtype,
            attention=str(target.model.config._attn_implementation),
            chat_template=hashlib.sha256(template.encode()).hexdigest()[:16],
            rendering=json.loads(json.dumps(dict(rendering))),  # as it will be read back
            document_ids=ids,
            document_tokens=tuple(len(document) for document in documents),
            shard_tokens=shard_tokens,
        )

    @property
    def digest(self) -> str:
        """Hash of all that decides the numbers, whichever layers are captured."""
        content = asdict(replace(self, layer_ids=(), shard_tokens=0))
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]

    @property
    def folder_name(self) -> str:
        """The digest and the layers: caches that differ in their layers alone stand side by side."""
        return "_".join([self.digest, *map(str, self.layer_ids)])

    @property
    def shapes(self) -> dict[str, list[int]]:
        """The tensors of a document and their shapes after the axis of tokens."""
        states = {part: [self.hidden_size] for part in (*map(layer_part, self.layer_ids), "final")}
        return {"tokens": [], "supervised": [], **states}

    @property
    def bytes_per_token(self) -> int:
        """Bytes on disk of one token: states, token id, supervision."""
        states = (len(self.layer_ids) + 1) * self.hidden_size * DTYPES[self.dtype].itemsize
        return states + torch.int64.itemsize + torch.bool.itemsize

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole cache, the small headers of its files left out."""
        return sum(self.document_tokens) * self.bytes_per_token

    def shards(self, folder: Path) -> list[Shard]:
        """The files of the cache, in order."""
        bounds, tokens = [0], 0
        for index, length in enumerate(self.document_tokens, start=1):
            tokens += length
            if tokens >= self.shard_tokens or index == len(self.document_tokens):
                bounds.append(index)
                tokens = 0
        return [
            Shard(file=folder / f"shard_{number:05d}.safetensors", manifest=self, first=first, stop=stop)
            for number, (first, stop) in enumerate(pairwise(bounds))
        ]

    def differences(self, other: CacheManifest) -> list[str]:
        """What decides the numbers and is not the same here (in the cache) and in other (asked for).

        Layers that nobody asks for are no difference.
        """
        ours, theirs = asdict(self), asdict(other)
        if set(other.layer_ids) <= set(self.layer_ids):
            theirs["layer_ids"] = ours["layer_ids"]
        for side in (ours, theirs):
            side |= {f"rendering.{name}": value for name, value in side.pop("rendering").items()}
            for name in ("shard_tokens", "document_ids", "document_tokens"):
                del side[name]
        found = [
            f"{key} is {ours.get(key)} in the cache, {theirs.get(key)} here"
            for key in [*ours, *(key for key in theirs if key not in ours)]
            if ours.get(key) != theirs.get(key)
        ]
        if self.document_ids != other.document_ids:
            pairs = zip_longest(self.document_ids, other.document_ids)
            first = next(i for i, (one, another) in enumerate(pairs) if one != another)
            counts = f"{len(self.document_ids)} in the cache, {len(other.document_ids)} here"
            found.append(f"documents are not the same from number {first} on ({counts})")
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """One file of a cache: documents first..stop-1 of its manifest."""

    file: Path
    manifest: CacheManifest
    first: int
    stop: int

    @property
    def num_tokens(self) -> int:
        """Tokens of its documents."""
        return sum(self.manifest.document_tokens[self.first : self.stop])

    @property
    def num_bytes(self) -> int:
        """Bytes of its tensors."""
        return self.num_tokens * self.manifest.bytes_per_token

    def fault(self) -> str | None:
        """What is wrong with the file, by its header alone; None: nothing."""
        if not self.file.is_file():
            return f"{self.file} is missing"
        try:
            with safe_open(self.file, framework="pt") as opened:
                shapes = {name: list(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            size = self.file.stat().st_size
            return f"{self.file} is damaged: {size} bytes, where its states alone need {self.num_bytes} ({error})"
        for index in range(self.first, self.stop):
            document_id, tokens = self.manifest.document_ids[index], self.manifest.document_tokens[index]
            for part, tail in self.manifest.shapes.items():
                shape = shapes.get(f"{document_id}.{part}", [0])
                if shape != [tokens, *tail]:
                    rows = f"{shape[0]} rows of {part} for {tokens} tokens"
                    return f"{self.file}: document {document_id} has {rows} (shape {shape}, not {[tokens, *tail]})"
        return None


def layer_part(layer_id: int) -> str:
    """The name of a layer's states among a document's tensors."""
    return f"layer_{layer_id}"


def checksum_line(name: str, tensor: Tensor) -> str:
    """A tensor's name and the XXH3 of its bytes, which costs a fraction of copying them."""
    return f"{name} {xxhash.xxh3_64_hexdigest(tensor.view(torch.uint8).numpy().data)}"


def read_manifest(folder: Path) -> CacheManifest | None:
    """The manifest of the cache in a folder; None: there is none.

    Raises:
        ValueError: it is of another version of the layout, or not a manifest.
    """
    file = folder / MANIFEST
    if not file.is_file():
        return None
    try:
        stored: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        stored |= {name: tuple(stored[name]) for name in ("layer_ids", "document_ids", "document_tokens")}
        return CacheManifest(**stored)
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{file} is not a manifest that this version reads ({error}); delete {folder}") from error
