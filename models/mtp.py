"""The MTP drafter: one shared block, unrolled over depths on its own tokens as a server runs it (training-time test).

Column j of a row serves the anchor a = j + 1, depth k serves its step k. At depth 0 the block reads the target's final
state of j and the token at j + 1; at depth k >= 1 its own output and token of depth k - 1. Its attention sees the
depth-0 entries of every position up to j in the document, then this column's own entries of depths 1..k: the committed
prefix and the chain, exactly the KV state that decoding holds. Sources: AngelSpec (arXiv 2607.25852), EAGLE-3
(arXiv 2503.01840).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from draftsmith.data.batch import Batch, Document, TargetStates
from draftsmith.models.drafter import Drafter, Proposal, join, scatter
from draftsmith.models.grid import Grid, draw_uniform
from draftsmith.models.head import Head, TokenStats
from draftsmith.models.moe import MoE, load_balance
from draftsmith.models.mtp_block import Columns, Entries, MTPBlock, MTPBlockConfig, SharedColumns, check_choice
from draftsmith.models.mtp_init import from_last_layer, from_target_mtp
from draftsmith.models.mtp_scoring import Scorer, gold_tokens, piece_size
from draftsmith.models.sampling import distribution, sample
from draftsmith.models.target import TargetSpec

if TYPE_CHECKING:
    from draftsmith.models.sequence_parallel import SequenceParallel
    from draftsmith.models.target import Target


@dataclass(frozen=True, slots=True, kw_only=True)
class MTPConfig(MTPBlockConfig):
    """The block (see `MTPBlockConfig`) and how it is unrolled.

    Attributes:
        num_draft_tokens: D, the number of depths.
        tokens: what depth k >= 1 reads. own: the drafter's argmax of depth k - 1 (on-policy, as greedy decoding does).
            sampled: a token drawn from its distribution there, at loss.temperature (on-policy for decoding at that
            temperature). gold: the data's token. Labels and teachers are the data's in all.
        init: random; last_layer: the target's last decoder layer, with the fusion fitted to what that layer reads (see
            `draftsmith.models.mtp_init.fit_fusion`); target_mtp: the checkpoint's own MTP layer.
        stop_gradient: cut the gradient through the hidden state that depth k hands to depth k + 1.
        checkpoint_depths: recompute each depth in backward instead of keeping its activations.
    """

    num_draft_tokens: int = 3
    tokens: str = "own"
    init: str = "random"
    stop_gradient: bool = False
    checkpoint_depths: bool = False

    def build(self, target_spec: TargetSpec) -> MTP:
        """An MTP drafter with random weights for a target of this shape.

        Raises:
            ValueError: a choice or a size that no block can have.
        """
        if self.num_draft_tokens < 1:
            raise ValueError(f"num_draft_tokens is {self.num_draft_tokens}; it must be at least 1")
        check_choice("tokens", self.tokens, ("own", "sampled", "gold"))
        check_choice("init", self.init, ("random", "last_layer", "target_mtp"))
        return MTP(self, target_spec)


@dataclass(slots=True, kw_only=True)
class MTPCache:
    """Depth-0 entries of each request's committed prefix, left-aligned.

    Attributes:
        key: (batch, capacity, kv_head, head_dim).
        value: like key.
        lengths: (batch,) how many entries are real.
        final: (batch, hidden) the target's state at the last of them.
        pending: observed positions whose entries are made when the embedding is next at hand.
    """

    key: Tensor
    value: Tensor
    lengths: Tensor
    final: Tensor
    pending: list[tuple[Tensor, Tensor, Tensor]]


Choose = Callable[[int, Tensor], Tensor]
"""From a depth and its states (column, hidden), the tokens (column,) that the next depth reads."""


class MTP(Drafter[MTPCache]):
    """See the module's docstring."""

    config: MTPConfig
    expert_load: Tensor

    def __init__(self, config: MTPConfig, spec: TargetSpec) -> None:
        super().__init__()
        self.block = MTPBlock(config, spec)
        self.config = replace(config, **self.block.sizes)
        self.spec = spec
        self.target_layer_ids = ()
        self.num_draft_tokens = config.num_draft_tokens
        load = torch.zeros(config.moe.num_experts, dtype=torch.int64)
        self.register_buffer("expert_load", load, persistent=False)

    def measures(self, total: Callable[[Tensor], Tensor]) -> dict[str, float]:
        """See `Drafter.measures`: the load of the experts by all columns at all depths, see `load_balance`."""
        if not self.config.moe.num_experts:
            return {}
        measured = load_balance(total(self.expert_load))
        self.expert_load.zero_()
        return measured

    def initialise(self, target: Target, documents: Sequence[Document] = ()) -> str:
        """See `Drafter.initialise`; the ways are those of `MTPConfig.init`."""
        if self.config.init == "last_layer":
            return from_last_layer(self.block, target, documents)
        if self.config.init == "target_mtp":
            return from_target_mtp(self.block, target)
        return "MTP block: random weights"

    def check_sequence_parallel(self, degree: int) -> None:
        """See `Drafter.check_sequence_parallel`: each rank attends with an equal share of the query heads."""
        heads = self.block.num_heads
        if heads % degree:
            legal = ", ".join(str(n) for n in range(1, heads + 1) if heads % n == 0)
            raise ValueError(
                f"trainer.sequence_parallel={degree} does not divide the drafter's {heads} query heads; choose from "
                f"{legal}"
            )

    def grid(self, batch: Batch, *, seed: int, epoch: int, static: bool = False) -> Grid:
        """See `Drafter.grid`; with what decides the sampled tokens, where tokens are sampled.

        Of ranks that share rows each has its own chains of that grid.
        """
        grid = super().grid(batch, seed=seed, epoch=epoch, static=static)
        if self.sequence is not None:
            grid = self.sequence.own_chains(grid)
        if self.config.tokens != "sampled":
            return grid
        return replace(grid, uniform=draw_uniform(batch, grid, seed=seed, epoch=epoch))

    def forward(self, batch: Batch, grid: Grid, target_head: Head, want: Sequence[str]) -> TokenStats:
        """Statistics on the grid, each (batch, anchor, step).

        Columns are independent once all depth-0 entries are known: piece after piece runs all its depths, one after
        the other, since own tokens come out of the statistics.
        """
        ids, final = batch.input_ids.flatten(), _final(batch)
        context = self._context(batch, target_head)
        row, anchor = grid.valid[..., 0].nonzero(as_tuple=True)
        columns, valid, most = _columns(batch, grid, row, anchor), grid.valid[row, anchor], ids.numel()
        uniform = None if grid.uniform is None else grid.uniform[row, anchor]
        if self.sequence is not None:
            columns, valid = _evened(columns, valid, self.sequence)
            most = self.sequence.share(most)
        size = piece_size(most, target_head)
        scored, steps = [], []
        # As many pieces as a batch of this shape can have, empty ones too: under ZeRO-3 all ranks must run the
        # block equally often.
        for start in range(0, most, size):
            piece = slice(start, start + size)
            draws = None if uniform is None else uniform[piece]
            scorer = Scorer(columns[piece], valid[piece], ids, final, target_head, want, self.config.tokens, draws)
            first_tokens = ids[columns.last[piece] + 1]
            seen = columns[piece] if self.sequence is None else SharedColumns.of(columns[piece], self.sequence)
            self._unroll(first_tokens, final[columns.last[piece]], seen, context, target_head, scorer)
            scored += scorer.stats
            steps += [(start + live, depth) for depth, live in enumerate(scorer.live)]
        column = torch.cat([live for live, _ in steps])
        step = torch.cat([torch.full_like(live, depth) for live, depth in steps])
        return scatter(join(scored), grid.valid, (row[column], anchor[column], step))

    def hidden(self, batch: Batch, grid: Grid, target_head: Head) -> Tensor:
        """(batch, anchor, step, hidden): the states that meet lm_head; 0 where a chain has no valid step.

        Raises:
            ValueError: the drafter is trained on its own tokens, which come out of the statistics.
        """
        if self.config.tokens != "gold":
            raise ValueError(
                "hidden() exists for gold tokens only; build the drafter with tokens=gold, or use forward()"
            )
        assert self.sequence is None
        ids, final = batch.input_ids.flatten(), _final(batch)
        row, anchor = grid.valid[..., 0].nonzero(as_tuple=True)
        columns = _columns(batch, grid, row, anchor)
        first_tokens, context = ids[columns.last + 1], self._context(batch, target_head)
        states = self._unroll(
            first_tokens,
            final[columns.last],
            columns,
            context,
            target_head,
            lambda depth, _: gold_tokens(ids, columns, depth),
        )
        empty = states[0].new_zeros(*grid.valid.shape, self.spec.hidden_size)
        return empty.index_put((row, anchor), torch.stack(states, 1))

    def _context(self, batch: Batch, target_head: Head) -> Entries:
        """Depth-0 keys and values of every position, each (batch * seq, kv_head, head_dim).

        A document's last position reads a token of its neighbour here; no chain sees that entry. Ranks that share rows
        each make those of a run of positions and get those of all positions for their heads.
        """
        inputs = F.pad(batch.input_ids.flatten()[1:], (0, 1)), batch.position_ids.flatten(), _final(batch)
        next_ids, position_ids, final = inputs if self.sequence is None else map(self.sequence.own_run, inputs)

        def make() -> Entries:
            embedding = self._embed(next_ids, position_ids, target_head)
            return self.block.entries(embedding, self._cast(final), position_ids)

        key, value = checkpoint(make, use_reentrant=False) if self._recompute else make()
        if self.sequence is not None:
            key, value = self.sequence.to_heads(torch.stack((key, value), 1)).unbind(1)
        return key, value

    def _unroll(
        self,
        tokens: Tensor,
        hidden: Tensor,
        columns: Columns,
        context: Entries,
        target_head: Head,
        choose: Choose,
    ) -> list[Tensor]:
        """Runs every depth of every column.

        Args:
            tokens: (column,), the anchors' tokens, which depth 0 reads.
            hidden: (column, hidden), the target's final states at the columns.

        Returns:
            For each depth the states that meet lm_head, (column, hidden).
        """
        own: tuple[Entries, ...] = ()
        states = []
        hidden = self._cast(hidden)
        for depth in range(self.num_draft_tokens):
            embedding = self._embed(tokens, columns.position_ids + depth, target_head)
            inputs = (embedding, hidden, depth, columns, context, own)
            if self._recompute:
                state, hidden, own = checkpoint(self.block, *inputs, use_reentrant=False)
            else:
                state, hidden, own = self.block(*inputs)
            if isinstance(self.block.mlp, MoE):  # here, not in the block, which runs again where depths are recomputed
                self.expert_load += self.block.mlp.experts.load
            if self.config.stop_gradient:
                hidden = hidden.detach()
            states.append(state)
            tokens = choose(depth, state)
        return states

    @property
    def _recompute(self) -> bool:
        return self.config.checkpoint_depths and torch.is_grad_enabled()

    def _cast(self, x: Tensor) -> Tensor:
        """In the block's type, whatever the target's is."""
        return x.to(self.block.eh_proj.weight.dtype)

    def _embed(self, tokens: Tensor, position_ids: Tensor, target_head: Head) -> Tensor:
        embedding = self._cast(target_head.embed(tokens))
        if self.config.zero_first_embedding:
            embedding = embedding.masked_fill((position_ids == 0)[..., None], 0)
        return embedding

    def new_cache(self, batch_size: int) -> MTPCache:
        """An empty decoding cache for batch_size requests."""
        weight = self.block.eh_proj.weight
        empty = weight.new_empty(batch_size, 0, self.block.num_kv_heads, self.block.head_dim)
        lengths = torch.zeros(batch_size, dtype=torch.int64, device=weight.device)
        final = weight.new_zeros(batch_size, self.spec.hidden_size)
        return MTPCache(key=empty, value=empty, lengths=lengths, final=final, pending=[])

    def observe(self, cache: MTPCache, states: TargetStates, next_ids: Tensor, lengths: Tensor) -> None:
        """See `Drafter.observe`. The target's true states replace what the drafter had made up for these positions."""
        cache.pending.append((states.final, next_ids, lengths))

    @torch.no_grad()
    def propose(
        self,
        cache: MTPCache,
        anchor_ids: Tensor,
        target_head: Head,
        *,
        temperature: float = 0.0,
        top_p: float = 1.0,
        generator: torch.Generator | None = None,
    ) -> Proposal:
        """See `Drafter.propose`.

        Raises:
            ValueError: a request of which nothing has been observed.
        """
        for states, next_ids, lengths in cache.pending:
            self._absorb(cache, states, next_ids, lengths, target_head)
        cache.pending.clear()
        if (cache.lengths == 0).any():
            raise ValueError("a request has no observed position; observe its prompt before proposing")
        start = torch.arange(len(anchor_ids), device=anchor_ids.device) * cache.key.shape[1]
        columns = Columns(first=start, last=start + cache.lengths - 1, position_ids=cache.lengths - 1)
        tokens, probs, confidence = [], [], []

        def choose(depth: int, states: Tensor) -> Tensor:
            logits = target_head.logits(states).float()
            confidence.append(logits.softmax(-1).amax(-1))
            if temperature == 0:
                tokens.append(logits.argmax(-1))
            else:
                probs.append(distribution(logits, temperature, top_p))
                tokens.append(sample(probs[-1], generator))
            return tokens[-1]

        context = (cache.key.flatten(0, 1), cache.value.flatten(0, 1))
        self._unroll(anchor_ids, cache.final, columns, context, target_head, choose)
        return Proposal(
            tokens=torch.stack(tokens, 1),
            probs=torch.stack(probs, 1) if probs else None,
            confidence=torch.stack(confidence, 1),
        )

    def _absorb(self, cache: MTPCache, states: Tensor, next_ids: Tensor, lengths: Tensor, target_head: Head) -> None:
        """Appends the depth-0 entries of observed positions."""
        batch, seq = next_ids.shape
        slot = torch.arange(seq, device=next_ids.device)
        position_ids = cache.lengths[:, None] + slot
        embedding = self._embed(next_ids, position_ids, target_head)
        key, value = self.block.entries(embedding, self._cast(states), position_ids)
        missing = int((cache.lengths + lengths).max()) - cache.key.shape[1]
        if missing > 0:
            growth = max(missing, cache.key.shape[1])
            cache.key, cache.value = (F.pad(x, (0, 0, 0, 0, 0, growth)) for x in (cache.key, cache.value))
        row, column = (slot < lengths[:, None]).nonzero(as_tuple=True)
        where = (row, position_ids[row, column])
        cache.key[where], cache.value[where] = key[row, column], value[row, column]
        newest = self._cast(states)[torch.arange(batch, device=slot.device), (lengths - 1).clamp(min=0)]
        cache.final = torch.where((lengths > 0)[:, None], newest, cache.final)
        cache.lengths = cache.lengths + lengths


def _final(batch: Batch) -> Tensor:
    """(batch * seq, hidden): the target's final states."""
    if batch.states is None:
        raise ValueError("the batch has no target states; load it with states: cached or online")
    return batch.states.final.flatten(0, 1)


def _evened(columns: Columns, valid: Tensor, sequence: SequenceParallel) -> tuple[Columns, Tensor]:
    """Adds columns that predict nothing, up to as many on every rank: all take part in each other's attention."""
    first, last, position_ids, valid = sequence.evened(columns.first, columns.last, columns.position_ids, valid)
    return Columns(first=first, last=last, position_ids=position_ids), valid


def _columns(batch: Batch, grid: Grid, row: Tensor, anchor: Tensor) -> Columns:
    """The column of each chain (row, anchor), with batch rows laid end to end: a document is a run of entries."""
    column = grid.anchor_index[row, anchor] - 1
    position_ids = batch.position_ids[row, column]
    last = row * batch.input_ids.shape[1] + column
    return Columns(first=last - position_ids, last=last, position_ids=position_ids)
