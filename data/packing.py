"""Rows of whole documents, batches of rows, and the order in which a run visits them."""

from __future__ import annotations

import hashlib
from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from draftsmith.data.batch import Batch, Document, TargetStates

if TYPE_CHECKING:
    from draftsmith.data.conversations import Documents

PADDING = -1


def content_number(document: Document) -> int:
    """63 bits of the hash of a document's content, its number in `Batch.document_ids`."""
    return int(document.id.rsplit("-", 1)[1][:16], 16) >> 1


def pack(lengths: Sequence[int], row_tokens: int) -> list[list[int]]:
    """Best-fit decreasing: longest first, each document goes to the fullest row that still holds it.

    Args:
        lengths: tokens of each document.

    Returns:
        For each row the indices of its documents, ascending.

    Raises:
        ValueError: a document is longer than a row.
    """
    rows: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (free tokens, row), ascending
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        length = lengths[index]
        if length > row_tokens:
            raise ValueError(
                f"document {index} has {length} tokens, more than row_tokens={row_tokens}; raise data.row_tokens or"
                " lower data.max_length"
            )
        place = bisect_left(room, (length, -1))
        if place == len(room):
            free, row = row_tokens, len(rows)
            rows.append([])
        else:
            free, row = room.pop(place)
        rows[row].append(index)
        if free > length:
            insort(room, (free - length, row))
    return [sorted(row) for row in rows]


def collate(rows: Sequence[Sequence[Document]], *, row_tokens: int, domains: Sequence[str] = ()) -> Batch:
    """Lays documents one after the other, each row padded to row_tokens; a row without documents is all padding.

    Args:
        domains: the run's domains; with fewer than two the batch has no domain_ids.
    """
    shape = (len(rows), row_tokens)
    input_ids = torch.zeros(shape, dtype=torch.int64)
    supervised = torch.zeros(shape, dtype=torch.bool)
    document_ids = torch.full(shape, PADDING, dtype=torch.int64)
    position_ids = torch.zeros(shape, dtype=torch.int64)
    domain_ids = torch.zeros(shape, dtype=torch.int64)
    for row, documents in enumerate(rows):
        start = 0
        for document in documents:
            place = slice(start, start + len(document))
            input_ids[row, place] = document.tokens
            supervised[row, place] = document.supervised
            document_ids[row, place] = content_number(document)
            position_ids[row, place] = torch.arange(len(document))
            if len(domains) > 1:
                domain_ids[row, place] = domains.index(document.domain)
            start += len(document)
    return Batch(
        input_ids=input_ids,
        supervised=supervised,
        document_ids=document_ids,
        position_ids=position_ids,
        domain_ids=domain_ids if len(domains) > 1 else None,
    )


def collate_states(
    rows: Sequence[Sequence[Document]],
    *,
    row_tokens: int,
    states: Callable[[Document], TargetStates],
    blank: TargetStates,
) -> TargetStates:
    """The target's states on the rows that `collate` lays, zero at padding.

    Args:
        states: gives a document's states, with a batch axis of 1.
        blank: any states of the same target; they give the shape where there is no document.

    Raises:
        ValueError: a document's states do not have one row for each of its tokens.
    """
    shape = (len(rows), row_tokens)
    layers = blank.layers.new_zeros(*shape, *blank.layers.shape[2:])
    final = blank.final.new_zeros(*shape, *blank.final.shape[2:])
    for row, documents in enumerate(rows):
        start = 0
        for document in documents:
            given, place = states(document), slice(start, start + len(document))
            for name, tensor in (("layers", given.layers), ("final", given.final)):
                if tensor.shape[1] != len(document):
                    raise ValueError(
                        f"document {document.id} has {len(document)} tokens but {tensor.shape[1]} rows of {name}"
                        " states; delete the cache and build it again"
                    )
            layers[row, place] = given.layers[0]
            final[row, place] = given.final[0]
            start += len(document)
    return TargetStates(layers=layers, final=final)


class Loader:
    """Packed rows of a run. The packing is fixed; only the order of the rows depends on the epoch."""

    def __init__(
        self,
        documents: Documents,
        *,
        row_tokens: int,
        seed: int,
        states: Callable[[Document], TargetStates] | None,
    ) -> None:
        """Packs the documents.

        Args:
            row_tokens: tokens of a row.
            seed: of the order of rows.
            states: gives a document's states on the CPU, with a batch axis of 1; None: batches have no states.

        Raises:
            ValueError: a document is longer than a row.
        """
        self.documents, self.row_tokens, self.seed, self.states = documents, row_tokens, seed, states
        self.packed = pack([len(document) for document in documents.documents], row_tokens)
        self._blank: TargetStates | None = None

    @property
    def num_rows(self) -> int:
        """Rows of one epoch."""
        return len(self.packed)

    def rows(self, epoch: int, first: int, count: int) -> list[int | None]:
        """The epoch's rows first, ..., first + count - 1 in its order; None, a filler, past the epoch's end."""
        order = self._order(epoch).tolist()
        return [order[place] if place < len(order) else None for place in range(first, first + count)]

    def _order(self, epoch: int) -> Tensor:
        digest = hashlib.blake2b(f"rows:{self.seed}:{epoch}".encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
        return torch.randperm(self.num_rows, generator=generator)

    def batch(self, rows: Sequence[int | None]) -> Batch:
        """A batch of these rows on the CPU, (len(rows), row_tokens); a filler is a row of padding.

        Raises:
            ValueError: a document's states do not have one row for each of its tokens.
        """
        whole = [[] if row is None else [self.documents.documents[i] for i in self.packed[row]] for row in rows]
        batch = collate(whole, row_tokens=self.row_tokens, domains=self.documents.domains)
        if self.states is None:
            return batch
        if self._blank is None:
            given = self.states(min(self.documents.documents, key=len))
            self._blank = TargetStates(layers=given.layers[:, :0], final=given.final[:, :0])
        return replace(
            batch, states=collate_states(whole, row_tokens=self.row_tokens, states=self.states, blank=self._blank)
        )
