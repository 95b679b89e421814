"""The block-diffusion family: DFlash, DFlare, DFly and DSpark from one module with switched parts.

A block of B slots is drafted in one pass: slot 0 holds the anchor token, the others mask tokens. Every draft layer
attends from the block to the target's states before the anchor (the context) and to the block itself. What the layers
see of the target is the `context` part, what turns the last states into drafts the `head` part:

    drafter   context   head         source
    DFlash    shared    none         arXiv 2602.06036
    DFlare    fused     none         arXiv 2606.02091
    DFly      hybrid    correction   arXiv 2607.25852
    DSpark    shared    markov       arXiv 2607.05147
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from draftsmith.data.batch import Batch, Document, TargetStates
from draftsmith.models.block_attention import Blocks, context_in_use, document_starts
from draftsmith.models.context_cache import ContextCache
from draftsmith.models.dfly_init import initialise
from draftsmith.models.dfly_layers import Backbone, CorrectionHead, MarkovHead, draw_weights
from draftsmith.models.dfly_shape import check, shape_of
from draftsmith.models.drafter import Drafter, DrafterConfig, Proposal, join, scatter
from draftsmith.models.grid import Grid, draw_uniform
from draftsmith.models.head import Head, TokenStats
from draftsmith.models.sampling import distribution, sample
from draftsmith.models.target import Target, TargetSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class DFlyConfig(DrafterConfig):
    """A drafter of the block-diffusion family. None means the target's own value, or the published rule.

    Attributes:
        block_size: slots of a block, the anchor's included: it drafts block_size - 1 tokens.
        num_layers: draft layers (L).
        num_target_layers: how many of the target's layers are captured (T); None: min(5, N - 3).
        target_layer_ids: those layers, 0-based and ascending; None: spread by the published rule.
        context: shared, fused or hybrid.
        head: none, correction or markov.
        confidence_head: learn each draft's acceptance (needs the objective `confidence`).
        markov_rank: rank of the markov head.
        intermediate_size: width of the draft layers' MLP.
        num_heads: query heads.
        num_kv_heads: key/value heads.
        head_dim: width of a head.
        qk_norm: RMSNorm on each head's queries and keys.
        qkv_bias: biases of the query, key and value projections.
        sliding_window: a slot at position t sees context positions > t - sliding_window only; None: all.
        init: target_layers, random, or auto: target_layers where the target allows it, else random, saying why.
        own_token_rate: in training, how often the head part's predecessor is the drafter's own token, not the data's.
        own_token_agreeing: only where that token is the target's most probable one.
        base_loss_weight: weight of the uncorrected states' gradient beside the corrected ones'.
        activation_checkpointing: compute draft layers again in backward instead of keeping what they need.
        compile: run draft layers through torch.compile.
    """

    block_size: int = 8
    num_layers: int = 2
    num_target_layers: int | None = None
    target_layer_ids: list[int] | None = None
    context: str = "hybrid"
    head: str = "correction"
    confidence_head: bool = False
    markov_rank: int = 256
    intermediate_size: int | None = None
    num_heads: int | None = None
    num_kv_heads: int | None = None
    head_dim: int | None = None
    qk_norm: bool | None = None
    qkv_bias: bool | None = None
    sliding_window: int | None = None
    init: str = "auto"
    own_token_rate: float = 0.0
    own_token_agreeing: bool = False
    base_loss_weight: float = 0.0
    activation_checkpointing: bool = False
    compile: bool = False

    def build(self, target_spec: TargetSpec) -> DFly:
        """A drafter with random weights for a target of this shape.

        Raises:
            ValueError: a setting out of its range or that the target's shape does not allow, with a legal choice.
        """
        return DFly(self, target_spec)


class DFly(Drafter[ContextCache]):
    """A block-diffusion drafter; see the module's docstring."""

    config: DFlyConfig

    def __init__(self, config: DFlyConfig, spec: TargetSpec) -> None:
        super().__init__()
        check(config, spec)
        assert spec.mask_token_id is not None
        shape = shape_of(config, spec)
        self.config = replace(
            config,
            target_layer_ids=list(shape.target_layer_ids),
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            intermediate_size=shape.intermediate_size,
            qk_norm=shape.qk_norm,
            qkv_bias=shape.qkv_bias,
        )
        self.spec, self.shape = spec, shape
        self.target_layer_ids = shape.target_layer_ids
        self.num_draft_tokens = config.block_size - 1
        self.mask_token_id = spec.mask_token_id
        self.backbone = Backbone(shape, spec, checkpointing=config.activation_checkpointing)
        self.correction = CorrectionHead(shape) if config.head == "correction" else None
        self.markov = MarkovHead(spec.vocab_size, config.markov_rank) if config.head == "markov" else None
        self.confidence = nn.Linear(shape.hidden, 1) if config.confidence_head else None
        self.has_confidence_head = config.confidence_head
        self.apply(draw_weights)
        if config.compile:
            for layer in self.backbone.layers:
                layer.compile()

    def initialise(self, target: Target, documents: Sequence[Document] = ()) -> str:
        """Sets the starting weights as `init` says; returns one sentence that says what was done."""
        return initialise(self, target)

    def check_documents(self, documents: Iterable[Document]) -> None:
        """Refuses documents that contain the mask token: the drafter could not tell it from an empty slot."""
        found = sum(bool((document.tokens == self.mask_token_id).any()) for document in documents)
        if found:
            raise ValueError(
                f"{found} documents contain the mask token {self.mask_token_id}; name a token that the data never "
                "contains: target.mask_token_id=<row>"
            )

    def grid(self, batch: Batch, *, seed: int, epoch: int, static: bool = False) -> Grid:
        """See `Drafter.grid`; with what decides where own tokens are read, where any are."""
        grid = super().grid(batch, seed=seed, epoch=epoch, static=static)
        if self.config.own_token_rate == 0:
            return grid
        return replace(grid, uniform=draw_uniform(batch, grid, seed=seed, epoch=epoch))

    def forward(self, batch: Batch, grid: Grid, target_head: Head, want: Sequence[str]) -> TokenStats:
        """Statistics scattered on the grid, each (batch, anchor, step).

        The head part reads each slot's predecessor: the data's own token, or in training, with probability
        own_token_rate, the token that the drafter itself would have drafted there. Labels and teachers are the data's.
        """
        draft, previous = self.uncorrected(batch, grid, target_head), _gold_predecessors(batch, grid)
        if not self.training or self.config.own_token_rate == 0:
            stats = self._stats(draft, previous, grid.slots, batch, grid, target_head, want)
            return scatter(stats, grid.valid, grid.slots)
        assert grid.uniform is not None
        take = grid.uniform < self.config.own_token_rate
        parts, places = [], []
        for step in range(self.num_draft_tokens):
            row, anchor = grid.valid[..., step].nonzero(as_tuple=True)
            where: tuple[Tensor, ...] = (row, anchor, torch.full_like(row, step))
            parts.append(self._stats(draft, previous, where, batch, grid, target_head, (*want, "target_token")))
            places.append(where)
            if step + 1 < self.num_draft_tokens:
                gold = previous[row, anchor, step + 1]
                mixed = self._mix_in_own(gold, parts[-1], take[row, anchor, step])
                previous = previous.index_put((row, anchor, torch.full_like(row, step + 1)), mixed)
        where = tuple(torch.cat(axis) for axis in zip(*places, strict=True))
        return scatter(join(parts), grid.valid, where)

    def _mix_in_own(self, gold: Tensor, stats: TokenStats, take: Tensor) -> Tensor:
        """The data's tokens, but where `take` says so those that the drafter would have drafted; each (row,)."""
        own, target_token = stats.draft_token, stats.target_token
        assert own is not None
        if self.config.own_token_agreeing:
            take = take & (own == target_token)
        return torch.where(take, own, gold)

    def _stats(
        self,
        draft: Tensor,
        previous: Tensor,
        where: tuple[Tensor, ...],
        batch: Batch,
        grid: Grid,
        target_head: Head,
        want: Sequence[str],
    ) -> TokenStats:
        """Statistics of the grid's places `where`, each (row,); previous: (batch, anchor, step)."""
        assert batch.states is not None
        states, before, label = draft[where], previous[where], grid.label_index[where]
        teacher, labels = batch.states.final[where[0], label - 1], batch.input_ids[where[0], label]
        corrected = self._corrected(states, before, target_head)
        bias = None if self.markov is None else self.markov(before)
        weight = self.config.base_loss_weight
        if weight == 0:
            stats = target_head.stats(corrected, teacher, labels, want=want, bias=bias)
        else:
            # Each uncorrected state is a row beside its corrected one, of which only the gradient stays.
            rows = torch.stack((corrected, states), dim=1).flatten(0, 1)
            if bias is not None:
                bias = (torch.stack((bias[0], torch.zeros_like(bias[0])), dim=1).flatten(0, 1), bias[1])
            pairs = torch.arange(len(labels), device=label.device).repeat_interleave(2)
            both = target_head.stats(rows, teacher, labels[pairs], want=want, bias=bias, teacher_index=pairs)
            stats = both.map(lambda value, _: _add_gradient(value[::2], value[1::2], weight))
        if self.confidence is None:
            return stats
        return replace(stats, confidence_logit=self.confidence(corrected).squeeze(-1).float())

    def _corrected(self, draft: Tensor, previous: Tensor, target_head: Head) -> Tensor:
        """draft: (..., hidden); previous: (...) token ids."""
        return draft if self.correction is None else self.correction(draft, target_head.embed(previous))

    def hidden(self, batch: Batch, grid: Grid, target_head: Head) -> Tensor:
        """(batch, anchor, step, hidden): the states that meet lm_head; predecessors are the data's own tokens.

        Raises:
            ValueError: in training with own tokens, where the states depend on the drafts.
        """
        if self.training and self.config.own_token_rate > 0:
            raise ValueError("hidden() is for the data's own predecessors only; call eval() or set own_token_rate=0")
        draft = self.uncorrected(batch, grid, target_head)
        return self._corrected(draft, _gold_predecessors(batch, grid), target_head)

    def uncorrected(self, batch: Batch, grid: Grid, target_head: Head) -> Tensor:
        """(batch, anchor, step, hidden): the backbone's states, before any head part."""
        states = self._checked(batch.states)
        blocks = Blocks(
            start=document_starts(batch.document_ids).gather(1, grid.anchor_index),
            anchor=grid.anchor_index,
            exists=grid.valid[..., 0],
            size=self.config.block_size,
            window=self.config.sliding_window,
        )
        # Context beyond the largest anchor is never seen. On CUDA shapes stay static and the host does not wait.
        end = batch.input_ids.shape[1] if batch.input_ids.is_cuda else int(grid.anchor_index.max())
        # What no block sees becomes 0: a NaN there would pass into the weights' gradients as 0 times NaN.
        layers = states.layers[:, :end].masked_fill(~context_in_use(blocks, end)[..., None, None], 0)
        contexts = self.backbone.project_context(layers, batch.position_ids[:, :end])
        anchor_ids = batch.input_ids.gather(1, grid.anchor_index).masked_fill(~blocks.exists, self.mask_token_id)
        x = self._embed_blocks(anchor_ids, target_head)
        return self.backbone(x, batch.position_ids.gather(1, grid.anchor_index), contexts, blocks)

    def _embed_blocks(self, anchor_ids: Tensor, target_head: Head) -> Tensor:
        """[anchor ; mask ; ... ; mask] embedded. anchor_ids: (batch, anchor) -> (batch, anchor, slot, hidden)."""
        ids = anchor_ids.new_full((*anchor_ids.shape, self.config.block_size), self.mask_token_id)
        ids[..., 0] = anchor_ids
        return target_head.embed(ids)

    def _checked(self, states: TargetStates | None) -> TargetStates:
        if states is None:
            raise ValueError("the batch has no target states; load it with states: cached or online")
        expected, given = (len(self.target_layer_ids), self.spec.hidden_size), tuple(states.layers.shape[2:])
        if given != expected:
            raise ValueError(
                f"the target's states have (layers, hidden) = {given}, this drafter reads {expected}: give it states "
                f"of the target it was built for, captured at layers {list(self.target_layer_ids)}"
            )
        return states

    def new_cache(self, batch_size: int) -> ContextCache:
        """An empty cache for batch_size requests."""
        return ContextCache(batch_size, self.config.num_layers)

    @torch.no_grad()
    def observe(self, cache: ContextCache, states: TargetStates, next_ids: Tensor, lengths: Tensor) -> None:
        """Projects the context of newly verified positions; see `Drafter.observe`."""
        states = self._checked(states)
        counts = lengths.tolist()
        begin = torch.tensor(cache.lengths, device=states.layers.device)
        position_ids = begin[:, None] + torch.arange(states.layers.shape[1], device=begin.device)
        for layer, context in enumerate(self.backbone.project_context(states.layers, position_ids)):
            cache.append(layer, context, counts)
        cache.advance(counts)

    @torch.no_grad()
    def propose(
        self,
        cache: ContextCache,
        anchor_ids: Tensor,
        target_head: Head,
        *,
        temperature: float = 0.0,
        top_p: float = 1.0,
        generator: torch.Generator | None = None,
    ) -> Proposal:
        """One pass of the draft layers, then the head part step by step; see `Drafter.propose`.

        With a confidence head, `Proposal.confidence` is its estimate of each draft's acceptance.
        """
        anchor = torch.tensor(cache.lengths, device=anchor_ids.device)[:, None]
        blocks = Blocks(
            start=torch.zeros_like(anchor),
            anchor=anchor,
            exists=torch.ones_like(anchor, dtype=torch.bool),
            size=self.config.block_size,
            window=self.config.sliding_window,
        )
        x = self._embed_blocks(anchor_ids[:, None], target_head)
        draft = self.backbone(x, anchor, cache.contexts(), blocks)[:, 0]
        # Where no state depends on the token before it, one vocabulary product serves all steps.
        together = target_head.logits(draft) if self.correction is None else None
        tokens, probs, confidence, previous = [], [], [], anchor_ids
        for step in range(self.num_draft_tokens):
            state = self._corrected(draft[:, step], previous, target_head)
            logits = target_head.logits(state) if together is None else together[:, step]
            if self.markov is not None:
                rows, basis = self.markov(previous)
                logits = logits + rows @ basis.T
            if self.confidence is None:
                confidence.append(logits.float().softmax(-1).amax(-1))
            else:
                confidence.append(self.confidence(state).squeeze(-1).float().sigmoid())
            if temperature == 0:
                previous = logits.argmax(-1)
            else:
                probs.append(distribution(logits, temperature, top_p))
                previous = sample(probs[-1], generator)
            tokens.append(previous)
        return Proposal(
            tokens=torch.stack(tokens, dim=1),
            probs=torch.stack(probs, dim=1) if probs else None,
            confidence=torch.stack(confidence, dim=1),
        )


def _gold_predecessors(batch: Batch, grid: Grid) -> Tensor:
    """The data's token before each label: x_a, x_{a+1}, ...; (batch, anchor, step), anything where invalid."""
    position = (grid.label_index - 1).clamp(min=0)
    return batch.input_ids.gather(1, position.flatten(1)).view_as(position)


def _add_gradient(value: Tensor, other: Tensor, weight: float) -> Tensor:
    """The first value with both gradients; unchanged where the statistic has none (tokens, probabilities)."""
    return value + weight * (other - other.detach()) if value.requires_grad else value
