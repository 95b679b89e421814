"""Statistics of an MTP rollout, depth by depth, with the teacher's logits computed once for a piece of columns."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from draftsmith.models.head import Head, TokenStats
from draftsmith.models.mtp_block import Columns
from draftsmith.models.token_stats import needs_teacher

# For the teacher's logits of one piece of columns.
TEACHER_BYTES = 128 << 20


class Scorer:
    """Takes the statistics of a piece of columns depth by depth and hands out the tokens of the next depth.

    The teacher at depth k + 1 of column j is that at depth k of column j + 1, so its logits are computed once for the
    piece (and a halo of D - 1 rows).

    Args:
        tokens: see `MTPConfig`.
        uniform: (column, step), what decides the sampled tokens.

    Attributes:
        stats: of each depth's valid predictions.
        live: (valid,) for each depth which columns have one.
    """

    def __init__(
        self,
        columns: Columns,
        valid: Tensor,
        ids: Tensor,
        final: Tensor,
        target_head: Head,
        want: Sequence[str],
        tokens: str,
        uniform: Tensor | None,
    ) -> None:
        self.columns, self.ids, self.target_head = columns, ids, target_head
        self.want, self.tokens, self.uniform = want, tokens, uniform
        self.live = [step.nonzero().squeeze(1) for step in valid.unbind(1)]
        self.stats: list[TokenStats] = []
        steps = torch.arange(1, valid.shape[1] + 1, device=valid.device)
        self.teachers = (columns.last[:, None] + steps)[valid].unique()
        self.teacher_hidden = final[self.teachers]
        self.teacher_logits = target_head.teacher_logits(self.teacher_hidden) if needs_teacher(want) else None

    def __call__(self, depth: int, states: Tensor) -> Tensor:
        """states: (column, hidden), of this depth -> (column,)."""
        live = self.live[depth]
        teacher = self.columns.last[live] + depth + 1
        stats = self.target_head.stats(
            states[live],
            self.teacher_hidden,
            self.ids[teacher + 1],
            want=self.want,
            teacher_index=torch.searchsorted(self.teachers, teacher),
            teacher_logits=self.teacher_logits,
            uniform=None if self.uniform is None else self.uniform[live, depth],
        )
        self.stats.append(stats)
        if self.tokens == "gold":
            return gold_tokens(self.ids, self.columns, depth)
        own = stats.draft_token if self.tokens == "own" else stats.sampled_token
        assert own is not None
        return torch.zeros_like(self.columns.last).index_put((live,), own)


def piece_size(num_positions: int, target_head: Head) -> int:
    """How many columns share one set of teacher logits: equal pieces of at most TEACHER_BYTES."""
    vocab_bytes = len(target_head.lm_head) * target_head.lm_head.element_size()
    limit = max(64, TEACHER_BYTES // vocab_bytes)
    return math.ceil(num_positions / math.ceil(num_positions / limit))


def gold_tokens(ids: Tensor, columns: Columns, depth: int) -> Tensor:
    """The data's tokens that depth + 1 reads; past the row's end no prediction is valid and any id serves."""
    return ids[(columns.last + depth + 2).clamp(max=len(ids) - 1)]
