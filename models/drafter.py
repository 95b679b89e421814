"""What every drafter is: a grid to train on, one training forward, and proposals for decoding."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from draftsmith.data.batch import Batch, Document, TargetStates
from draftsmith.models.grid import Grid, build_grid, choose_anchors
from draftsmith.models.head import Head, TokenStats
from draftsmith.models.target import TargetSpec

if TYPE_CHECKING:
    from draftsmith.models.sequence_parallel import SequenceParallel
    from draftsmith.models.target import Target


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterConfig:
    """What every drafter's configuration has.

    Attributes:
        anchors_per_document: how many of its legal anchors a document draws in an epoch; None: all.
        anchors_per_row: how many anchors a packed row keeps; None: all.
        early_anchor_decay: None: anchors are drawn uniformly; else an anchor n tokens into its answer is drawn with
            weight exp(-n / early_anchor_decay).
    """

    anchors_per_document: int | None = None
    anchors_per_row: int | None = None
    early_anchor_decay: float | None = None

    def __post_init__(self) -> None:
        for name, number in (
            ("anchors_per_document", self.anchors_per_document),
            ("anchors_per_row", self.anchors_per_row),
        ):
            if number is not None and number < 1:
                raise ValueError(f"drafter.{name}={number}: it must be at least 1; null takes every legal anchor")
        if self.early_anchor_decay is not None:
            if self.early_anchor_decay <= 0:
                raise ValueError(f"drafter.early_anchor_decay={self.early_anchor_decay}: it must be above 0")
            if self.anchors_per_document is None and self.anchors_per_row is None:
                raise ValueError(
                    "drafter.early_anchor_decay has no effect where every legal anchor is taken; set "
                    "drafter.anchors_per_document"
                )

    def build(self, target_spec: TargetSpec) -> Drafter[Any]:
        """A drafter of this configuration with random weights, for a target of this shape."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """What a drafter proposes in one round.

    Attributes:
        tokens: (batch, step) int64.
        probs: (batch, step, vocab) float32, the distributions that the tokens were drawn from; None for greedy drafts.
        confidence: (batch, step) float32, max_v q_v of each draft's distribution at temperature 1, or what a
            confidence head says of the draft's acceptance.
    """

    tokens: Tensor
    probs: Tensor | None
    confidence: Tensor


Cache = TypeVar("Cache")


class Drafter(nn.Module, ABC, Generic[Cache]):
    """A drafter. Subclasses give `forward`, `hidden`, `initialise`, and the three parts of decoding.

    Attributes:
        config: the configuration it was built from, with every default filled in.
        spec: the shape of its target.
        target_layer_ids: the 0-based decoder layers whose outputs it reads; empty: only the final state.
        num_draft_tokens: how many tokens it proposes in one round, the length of the grid's step axis.
        has_confidence_head: whether it estimates the acceptance of its own drafts.
        sequence: the ranks that share rows with this one in training; None: each rank has rows of its own.
    """

    config: DrafterConfig
    spec: TargetSpec
    target_layer_ids: tuple[int, ...]
    num_draft_tokens: int
    has_confidence_head: bool = False
    sequence: SequenceParallel | None = None

    def grid(self, batch: Batch, *, seed: int, epoch: int, static: bool = False) -> Grid:
        """The grid to train on: a pure function of (batch, seed, epoch), the same for every drafter.

        Args:
            batch: best on the CPU, where anchors are drawn without waiting for a device.
            static: fill up every row to anchors_per_row, so that shapes stay the same from batch to batch.
        """
        anchors = choose_anchors(
            batch,
            anchors_per_document=self.config.anchors_per_document,
            anchors_per_row=self.config.anchors_per_row,
            seed=seed,
            epoch=epoch,
            early_decay=self.config.early_anchor_decay,
        )
        width = self.config.anchors_per_row if static else None
        return build_grid(batch, anchors, num_steps=self.num_draft_tokens, num_anchors=width)

    def check_documents(self, documents: Iterable[Document]) -> None:
        """Refuses data that this drafter cannot be trained on (ValueError); most accept all."""

    def check_sequence_parallel(self, degree: int) -> None:
        """Refuses groups of `degree` ranks that share rows (ValueError); a drafter that can share them overrides it."""
        if degree > 1:
            raise ValueError(
                f"trainer.sequence_parallel={degree}: {type(self).__name__} does not share rows between ranks, only "
                "MTP does; set trainer.sequence_parallel=1, or choose drafter=mtp"
            )

    @abstractmethod
    def initialise(self, target: Target, documents: Sequence[Document] = ()) -> str:
        """Sets the starting weights as the configuration says; returns one sentence that says what was done.

        Args:
            documents: those of training, for a start that is fitted to the target's states on some of them.
        """

    def measures(self, total: Callable[[Tensor], Tensor]) -> dict[str, float]:
        """What a drafter has to say about itself in the log, by name; most say nothing.

        The trainer asks once for each optimizer step, on every rank, for what all forwards since the last time show.

        Args:
            total: sums a tensor over ranks.
        """
        return {}

    @abstractmethod
    def forward(self, batch: Batch, grid: Grid, target_head: Head, want: Sequence[str]) -> TokenStats:
        """The only training path: statistics scattered on the grid, each (batch, anchor, step)."""

    @abstractmethod
    def hidden(self, batch: Batch, grid: Grid, target_head: Head) -> Tensor:
        """(batch, anchor, step, hidden): the states that meet lm_head, gold predecessors only."""

    @abstractmethod
    def new_cache(self, batch_size: int) -> Cache:
        """An empty decoding cache for batch_size requests."""

    @abstractmethod
    def observe(self, cache: Cache, states: TargetStates, next_ids: Tensor, lengths: Tensor) -> None:
        """Takes newly verified positions into the cache.

        Args:
            states: (batch, seq, ...), the target's states at the new positions, left-aligned, in order.
            next_ids: (batch, seq), the token that follows each of those positions.
            lengths: (batch,), how many of the seq positions are real in each request.
        """

    @abstractmethod
    def propose(
        self,
        cache: Cache,
        anchor_ids: Tensor,
        target_head: Head,
        *,
        temperature: float = 0.0,
        top_p: float = 1.0,
        generator: torch.Generator | None = None,
    ) -> Proposal:
        """Proposes num_draft_tokens after the last committed token of each request.

        Args:
            anchor_ids: (batch,), that token; it stands at the position after the last observed one.
            temperature: 0: greedy (`Proposal.probs` is None); else tokens are drawn from
                `draftsmith.models.sampling.distribution(logits, temperature, top_p)`, as the target's are.
            top_p: mass of the nucleus that tokens are drawn from, at temperature > 0.
        """


def stats_on_grid(hidden: Tensor, batch: Batch, grid: Grid, target_head: Head, want: Sequence[str]) -> TokenStats:
    """Statistics of every valid grid position, scattered back; invalid entries are 0 (label_prob 1).

    Args:
        hidden: (batch, anchor, step, hidden).
    """
    if batch.states is None:
        raise ValueError("the batch has no target states; load it with states: cached or online")
    row, anchor, step = grid.slots
    label_position = grid.label_index[row, anchor, step]
    stats = target_head.stats(
        hidden[row, anchor, step],
        batch.states.final[row, label_position - 1],
        batch.input_ids[row, label_position],
        want=want,
    )
    return scatter(stats, grid.valid, grid.slots)


def scatter(stats: TokenStats, valid: Tensor, where: tuple[Tensor, ...]) -> TokenStats:
    """Puts statistics of rows at their places of the grid; other entries are 0 (label_prob 1)."""

    return stats.map(lambda value, fill: value.new_full(valid.shape, fill).index_put(where, value))


def join(parts: Sequence[TokenStats]) -> TokenStats:
    """Statistics of several sets of rows (with the same `want`), end to end."""
    collected: list[list[Tensor]] = []
    for part in parts:
        values: list[Tensor] = []
        part.map(lambda value, _, values=values: values.append(value) or value)  # type: ignore[misc]
        collected.append(values)
    joined = iter([torch.cat(values) for values in zip(*collected, strict=True)])
    return parts[0].map(lambda value, fill: next(joined))
