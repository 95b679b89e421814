"""The grid (anchor, step) on which every drafter predicts.

An *anchor* is the position of the last committed token, a *step* one drafted token after it: step s (0-based) at anchor
a predicts the token at a + s + 1, and its teacher is the target's distribution there, lm_head(final[a + s]). Anchor a
is legal when the token at a and the one after it are supervised and a has a predecessor in its own document. The
document's end or the first unsupervised token ends a chain: valid steps of a chain have no holes.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor

from draftsmith.data.batch import Batch


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """Where a drafter predicts. Indices only: known before any forward.

    Attributes:
        anchor_index: (batch, anchor) int64, position of the anchor in its row; 0 where the anchor is invalid.
        label_index: (batch, anchor, step) int64, position of the token to predict; 0 where invalid.
        valid: (batch, anchor, step) bool.
        uniform: (batch, anchor, step) float64 in [0, 1), see `draw_uniform`; None for a drafter that draws nothing.
        slots: where `valid` is True, (row, anchor, step) each (slot,); found once, before the grid moves to a device
            that the host would have to wait for.
    """

    anchor_index: Tensor
    label_index: Tensor
    valid: Tensor
    uniform: Tensor | None = None
    slots: tuple[Tensor, ...] = ()

    def __post_init__(self) -> None:
        if not self.slots:
            object.__setattr__(self, "slots", self.valid.nonzero(as_tuple=True))

    @property
    def num_slots(self) -> Tensor:
        """The number of valid predictions, the denominator of slot-wise terms."""
        return self.valid.sum()

    @property
    def num_chains(self) -> Tensor:
        """The number of chains with at least one valid step, the denominator of chain-wise terms."""
        return self.valid[..., 0].sum()

    def to(self, device: torch.device | str) -> Grid:
        """The same grid on another device."""
        return Grid(
            anchor_index=self.anchor_index.to(device),
            label_index=self.label_index.to(device),
            valid=self.valid.to(device),
            uniform=None if self.uniform is None else self.uniform.to(device),
            slots=tuple(index.to(device) for index in self.slots),
        )


def legal_anchors(batch: Batch) -> Tensor:
    """Marks every position that may be an anchor.

    Returns:
        (batch, seq) bool.
    """
    following = torch.zeros_like(batch.supervised)
    following[:, :-1] = batch.supervised[:, 1:] & (batch.document_ids[:, 1:] == batch.document_ids[:, :-1])
    return batch.supervised & following & (batch.position_ids >= 1) & (batch.document_ids >= 0)


def draw_order(seed: int, epoch: int, document_id: int, offsets: Tensor, early_decay: float | None) -> Tensor:
    """The order in which a document draws its candidates: it depends on (seed, epoch, document) alone.

    Args:
        offsets: (candidate,), how far into its answer each candidate stands.
        early_decay: None: all are equally likely; else a candidate weighs exp(-offset / early_decay), drawn without
            replacement by the keys -log(u) / weight (Efraimidis and Spirakis, 2006).
    """
    generator = _generator(f"{seed}:{epoch}:{document_id}")
    if early_decay is None:
        return torch.randperm(len(offsets), generator=generator)
    waiting = -torch.rand(len(offsets), generator=generator, dtype=torch.float64).log()
    return (waiting.log() + offsets / early_decay).argsort()


def _generator(key: str) -> torch.Generator:
    digest = hashlib.blake2b(key.encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)


def draw_uniform(batch: Batch, grid: Grid, *, seed: int, epoch: int) -> Tensor:
    """A number for each step of each anchor that decides what a drafter draws there.

    It depends on (seed, epoch, document, position, step) alone, however rows are packed and divided.

    Returns:
        (batch, anchor, step) float64 in [0, 1).
    """
    num_steps = grid.valid.shape[-1]
    document_ids = batch.document_ids.cpu()
    numbers = torch.zeros(*document_ids.shape, num_steps, dtype=torch.float64)
    for row, owners in enumerate(document_ids):
        for document_id in owners[owners >= 0].unique_consecutive().tolist():
            own = owners == document_id
            generator = _generator(f"tokens:{seed}:{epoch}:{document_id}")
            numbers[row, own] = torch.rand(int(own.sum()), num_steps, generator=generator, dtype=torch.float64)
    numbers = numbers.to(grid.anchor_index.device)
    return numbers.gather(1, grid.anchor_index[..., None].expand(-1, -1, num_steps))


def choose_anchors(
    batch: Batch,
    *,
    anchors_per_document: int | None,
    anchors_per_row: int | None,
    seed: int,
    epoch: int,
    early_decay: float | None = None,
) -> list[Tensor]:
    """Draws each row's anchors.

    Each document draws min(anchors_per_document, legal) of its legal anchors without replacement (None: all of them, in
    drawn order); the row keeps the first anchors_per_row of its documents' draws, taken round-robin (None: all).

    Returns:
        One ascending int64 tensor of positions for each row.
    """
    legal, document_ids = legal_anchors(batch).cpu(), batch.document_ids.cpu()
    rows = []
    for row_legal, row_documents in zip(legal, document_ids, strict=True):
        positions = row_legal.nonzero().squeeze(1)
        owners = row_documents[positions]
        draws = []
        for document_id in owners.unique_consecutive().tolist():
            candidates = positions[owners == document_id]
            order = draw_order(seed, epoch, document_id, _offsets(candidates), early_decay)
            draws.append(candidates[order[:anchors_per_document]].tolist())
        turns = max((len(d) for d in draws), default=0)
        kept = [d[turn] for turn in range(turns) for d in draws if turn < len(d)][:anchors_per_row]
        rows.append(torch.tensor(sorted(kept), dtype=torch.int64))
    return rows


def _offsets(candidates: Tensor) -> Tensor:
    """How far into its run of neighbouring positions each candidate stands; a run is one answer."""
    opens = torch.ones_like(candidates, dtype=torch.bool)
    opens[1:] = candidates[1:] != candidates[:-1] + 1
    return candidates - torch.where(opens, candidates, 0).cummax(dim=0).values


def build_grid(batch: Batch, anchors: list[Tensor], *, num_steps: int, num_anchors: int | None = None) -> Grid:
    """Lays num_steps steps after each anchor.

    Args:
        anchors: one tensor of positions for each row.
        num_anchors: width of the anchor axis; rows with fewer anchors are filled with invalid ones. None: the largest
            row's count (at least 1, so that an empty grid still has a shape that a forward can run on).
    """
    batch_size, seq = batch.input_ids.shape
    device = batch.input_ids.device
    width = num_anchors if num_anchors is not None else max([1, *(len(a) for a in anchors)])
    anchor_index = torch.zeros(batch_size, width, dtype=torch.int64)
    exists = torch.zeros(batch_size, width, dtype=torch.bool)
    for row, positions in enumerate(anchors):
        anchor_index[row, : len(positions)] = positions
        exists[row, : len(positions)] = True
    anchor_index, exists = anchor_index.to(device), exists.to(device)

    label_index = anchor_index[..., None] + torch.arange(1, num_steps + 1, device=device)
    inside = label_index < seq
    clamped = label_index.clamp(max=seq - 1).flatten(1)
    own_document = batch.document_ids.gather(1, anchor_index)[..., None]
    same = batch.document_ids.gather(1, clamped).view_as(label_index) == own_document
    supervised = batch.supervised.gather(1, clamped).view_as(label_index)
    valid = (exists[..., None] & inside & same & supervised).cumprod(dim=-1).bool()
    return Grid(anchor_index=anchor_index, label_index=label_index.masked_fill(~valid, 0), valid=valid)
