"""Sequence parallelism: groups of ranks that share every row (DeepSpeed-Ulysses, arXiv 2309.14509).

What treats positions and chains one by one is divided among a group by position and by chain. Attention, which mixes
positions, is divided by head: one all-to-all gives each rank all rows of its share of the heads, another brings the
outputs back. Labels, teachers and counts come from the full row, which every rank of a group has, so that each
prediction is made once and is the same as on one rank.

DeepSpeed's engine knows nothing of the groups: as ever it averages gradients over all ranks, of which each holds the
gradient of its own part of the loss.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from deepspeed.sequence.layer import _SeqAllToAll
from torch import Tensor
from torch import distributed as dist

from draftsmith.models.grid import Grid

ROWS, HEADS = 0, 2  # axes of the tensors that change hands


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceParallel:
    """This rank's place among the ranks that share rows.

    Attributes:
        group: their process group.
        rank: 0 .. degree - 1.
        degree: how many they are.
    """

    group: Any
    rank: int
    degree: int

    @classmethod
    def join(cls, degree: int) -> SequenceParallel:
        """Makes groups of `degree` neighbouring ranks; every rank must call it."""
        group, _ = dist.new_subgroups(degree)
        return cls(group=group, rank=dist.get_rank(group), degree=degree)

    def own_chains(self, grid: Grid) -> Grid:
        """The grid with this rank's share of its chains only: an equal run of them, wherever in the row they stand."""
        exists = grid.valid[..., 0]
        order = exists.flatten().cumsum(0).view_as(exists) - 1
        own = exists & (order * self.degree // exists.sum().clamp(min=1) == self.rank)
        return Grid(
            anchor_index=grid.anchor_index.where(own, 0),
            label_index=grid.label_index.where(own[..., None], 0),
            valid=grid.valid & own[..., None],
        )

    def share(self, count: int) -> int:
        """The most that a rank has of `count` things."""
        return math.ceil(count / self.degree)

    def own_run(self, x: Tensor) -> Tensor:
        """This rank's run of rows, equally long on every rank: zeros past the end. x: (row, ...)."""
        share = self.share(len(x))
        own = x[self.rank * share : (self.rank + 1) * share]
        return torch.cat((own, own.new_zeros(share - len(own), *own.shape[1:])))

    def evened(self, *tensors: Tensor) -> list[Tensor]:
        """Tensors of one length (row, ...) with zero rows added up to the longest of the group."""
        most = torch.tensor(len(tensors[0]), device=tensors[0].device)
        dist.all_reduce(most, dist.ReduceOp.MAX, group=self.group)
        missing = int(most) - len(tensors[0])
        return [torch.cat((x, x.new_zeros(missing, *x.shape[1:]))) for x in tensors]

    def gathered(self, x: Tensor) -> Tensor:
        """The rows of all ranks, equally many on each, end to end. x: (row, ...), without gradient."""
        everyone = [torch.empty_like(x) for _ in range(self.degree)]
        dist.all_gather(everyone, x, group=self.group)
        return torch.cat(everyone)

    def to_heads(self, x: Tensor) -> Tensor:
        """The rows of all ranks, for this rank's share of the heads.

        Heads are repeated to the least common multiple of their number and the degree: a key or value head then meets
        the query heads that it met before.

        Args:
            x: (row, entry, head, head_dim), equally many rows on each rank.

        Returns:
            (degree * row, entry, head / degree, head_dim).
        """
        num_heads = x.shape[HEADS]
        repeated = x.repeat_interleave(math.lcm(num_heads, self.degree) // num_heads, HEADS)
        return _SeqAllToAll.apply(self.group, repeated, HEADS, ROWS, 1)

    def to_rows(self, x: Tensor) -> Tensor:
        """The inverse of `to_heads`: (degree * row, entry, head / degree, head_dim) -> (row, entry, head, head_dim)."""
        return _SeqAllToAll.apply(self.group, x, ROWS, HEADS, 1)
