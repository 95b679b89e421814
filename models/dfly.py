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
from typing import cast

import torch
from torch import Tensor, nn

from draftsmith.data.batch import Batch, Document, TargetStates
from draftsmith.models.block_attention import Attend, Blocks, document_starts, grouped_attention
from draftsmith.models.drafter import Drafter, DrafterConfig, Proposal, stats_on_grid
from draftsmith.models.grid import Grid
from draftsmith.models.head import Head, TokenStats
from draftsmith.models.layers import RMSNorm, RotaryEmbedding, SwiGLU, apply_rotary
from draftsmith.models.sampling import distribution, sample
from draftsmith.models.target import Target, TargetSpec

CONTEXTS = ("shared", "fused", "hybrid")
HEADS = ("none", "correction")
INITS = ("auto", "random", "target_layers")


@dataclass(frozen=True, slots=True, kw_only=True)
class DFlyConfig(DrafterConfig):
    """A drafter of the block-diffusion family. None means the target's own value, or the published rule.

    Attributes:
        block_size: slots of a block, the anchor's included: it drafts block_size - 1 tokens.
        num_layers: draft layers (L).
        num_target_layers: how many of the target's layers are captured (T); None: min(5, N - 3).
        target_layer_ids: those layers, 0-based and ascending; None: spread by the published rule.
        context: shared, fused or hybrid.
        head: none or correction.
        intermediate_size: width of the draft layers' MLP.
        num_heads: query heads.
        num_kv_heads: key/value heads.
        head_dim: width of a head.
        sliding_window: a slot at position t sees context positions > t - sliding_window only; None: all.
        init: target_layers, random, or auto: target_layers where the target allows it, else random, saying why.
    """

    anchors_per_document: int | None = 32
    block_size: int = 8
    num_layers: int = 2
    num_target_layers: int | None = None
    target_layer_ids: list[int] | None = None
    context: str = "hybrid"
    head: str = "correction"
    intermediate_size: int | None = None
    num_heads: int | None = None
    num_kv_heads: int | None = None
    head_dim: int | None = None
    sliding_window: int | None = None
    init: str = "auto"

    def build(self, target_spec: TargetSpec) -> DFly:
        """A drafter with random weights for a target of this shape.

        Raises:
            ValueError: a setting out of its range or that the target's shape does not allow, with a legal choice.
        """
        return DFly(self, target_spec)

    def shape(self, spec: TargetSpec) -> Shape:
        """This configuration with every default filled in from the target.

        Raises:
            ValueError: see `build`.
        """
        for name, value, choices in (
            ("context", self.context, CONTEXTS),
            ("head", self.head, HEADS),
            ("init", self.init, INITS),
        ):
            if value not in choices:
                raise ValueError(f"drafter.{name}={value}: choose one of {', '.join(choices)}")
        for name, number, least in (
            ("block_size", self.block_size, 2),
            ("num_layers", self.num_layers, 1),
            ("num_target_layers", self.num_target_layers, 1),
            ("sliding_window", self.sliding_window, 1),
            ("intermediate_size", self.intermediate_size, 1),
            ("num_heads", self.num_heads, 1),
            ("num_kv_heads", self.num_kv_heads, 1),
            ("head_dim", self.head_dim, 2 * len(spec.rope_inv_freq)),
        ):
            if number is not None and number < least:
                raise ValueError(f"drafter.{name}={number}: it must be at least {least}")
        heads, kv_heads = self.num_heads or spec.num_heads, self.num_kv_heads or spec.num_kv_heads
        if heads % kv_heads:
            raise ValueError(f"drafter.num_heads={heads} is no multiple of num_kv_heads={kv_heads}; set both")
        return Shape(
            hidden=spec.hidden_size,
            norm_eps=spec.rms_norm_eps,
            target_layer_ids=tuple(choose_target_layers(self, spec.num_layers)),
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=self.head_dim or spec.head_dim,
            intermediate_size=self.intermediate_size or spec.intermediate_size,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The sizes of a drafter, all known."""

    hidden: int
    norm_eps: float
    target_layer_ids: tuple[int, ...]
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int


def spread_layers(num_layers: int, count: int) -> list[int]:
    """Which `count` of a target's layers are captured: layer_k = round(1 + k (N - 4) / (T - 1)); N // 2 for one."""
    if count == 1:
        return [num_layers // 2]
    return [round(1 + k * (num_layers - 4) / (count - 1)) for k in range(count)]


def choose_target_layers(config: DFlyConfig, num_layers: int) -> list[int]:
    """The captured layers of a target with num_layers layers.

    Raises:
        ValueError: they are not distinct, ascending and inside the target.
    """
    ids, count = config.target_layer_ids, config.num_target_layers
    if ids is None:
        if num_layers < 4:
            raise ValueError(
                f"the target has {num_layers} layers; with fewer than 4 the captured ones must be given, such as "
                f"drafter.target_layer_ids={list(range(num_layers))}"
            )
        ids = spread_layers(num_layers, count or min(5, num_layers - 3))
    elif count not in (None, len(ids)):
        raise ValueError(f"drafter.num_target_layers={count}, but target_layer_ids has {len(ids)}; leave one out")
    if not ids or sorted(set(ids)) != ids or ids[0] < 0 or ids[-1] >= num_layers:
        legal = spread_layers(num_layers, min(len(ids) or 1, num_layers - 3)) if num_layers > 3 else [num_layers - 1]
        raise ValueError(
            f"captured layers {ids} must be distinct, ascending and inside 0..{num_layers - 1}; "
            f"a legal choice is drafter.target_layer_ids={legal}"
        )
    return ids


Rotary = tuple[Tensor, Tensor]


class ContextEncoder(nn.Module):
    """What each draft layer sees of the target.

    shared: c = RMS(W [h_1 ; ... ; h_T]) for all layers; fused: c_i = RMS(sum_t softmax(F_i)_t h_t);
    hybrid: c_i = RMS(W [h_1 ; ... ; h_T] + sum_t softmax(F_i)_t h_t).
    """

    def __init__(self, config: DFlyConfig, shape: Shape) -> None:
        super().__init__()
        self.num_layers = config.num_layers
        hidden, num_captured = shape.hidden, len(shape.target_layer_ids)
        self.projection = None if config.context == "fused" else nn.Linear(num_captured * hidden, hidden, bias=False)
        self.fusion = None
        if config.context != "shared":
            self.fusion = nn.Parameter(fusion_logits(config.num_layers, num_captured))
        self.norm = RMSNorm(hidden, shape.norm_eps)

    def forward(self, layers: Tensor) -> Sequence[Tensor]:
        """layers: (batch, seq, layer, hidden) -> for each draft layer (batch, seq, hidden)."""
        layers = layers.to(self.norm.weight.dtype)
        shared = None if self.projection is None else self.projection(layers.flatten(2))
        if self.fusion is None:
            return [self.norm(shared)] * self.num_layers
        fused = self.fusion.softmax(dim=-1) @ layers
        mixed: Tensor = self.norm(fused if shared is None else fused + shared[:, :, None])
        return mixed.unbind(dim=2)


def fusion_logits(num_layers: int, num_captured: int) -> Tensor:
    """F at the start: layer i prefers t* = round(i / (L - 1) (T - 1)) (L = 1: T - 1), F_it = -2 |t - t*|."""
    preferred = [
        num_captured - 1 if num_layers == 1 else round(i / (num_layers - 1) * (num_captured - 1))
        for i in range(num_layers)
    ]
    return -2.0 * (torch.arange(num_captured) - torch.tensor(preferred)[:, None]).abs().float()


class BlockAttention(nn.Module):
    """Attention from a block to [context ; block], with the target's rotary embedding."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.head_dim = shape.head_dim
        width, kv_width = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        self.q_proj = nn.Linear(shape.hidden, width, bias=False)
        self.k_proj = nn.Linear(shape.hidden, kv_width, bias=False)
        self.v_proj = nn.Linear(shape.hidden, kv_width, bias=False)
        self.o_proj = nn.Linear(width, shape.hidden, bias=False)

    def project_context(self, context: Tensor, rotary: Rotary) -> tuple[Tensor, Tensor]:
        """context: (batch, seq, hidden) -> keys and values, each (batch, seq, kv_head, head_dim)."""
        keys, values = self.k_proj(context), self.v_proj(context)
        return apply_rotary(self._split(keys), *rotary), self._split(values)

    def forward(self, x: Tensor, rotary: Rotary, context: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        """x: (batch, anchor, slot, hidden) -> the same shape."""
        q, k, v = self._split(self.q_proj(x)), self._split(self.k_proj(x)), self._split(self.v_proj(x))
        out = attend(apply_rotary(q, *rotary), apply_rotary(k, *rotary), v, *context)
        return self.o_proj(out.flatten(-2))

    def _split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim))


class DraftLayer(nn.Module):
    """A pre-norm decoder layer whose attention reads the context beside its own block."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(shape.hidden, shape.norm_eps)
        self.self_attn = BlockAttention(shape)
        self.post_attention_layernorm = RMSNorm(shape.hidden, shape.norm_eps)
        self.mlp = SwiGLU(shape.hidden, shape.intermediate_size)

    def forward(self, x: Tensor, rotary: Rotary, context: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        """x: (batch, anchor, slot, hidden) -> the same shape."""
        x = x + self.self_attn(self.input_layernorm(x), rotary, context, attend)
        return x + self.mlp(self.post_attention_layernorm(x))


class CorrectionHead(nn.Module):
    """DFly's hidden correction: d + W_down(SiLU(W_gate z) * W_up z), z = [RMS(d) ; RMS(E[previous])].

    W_down starts at zero, so at the start it is the identity.
    """

    def __init__(self, hidden: int, eps: float) -> None:
        super().__init__()
        self.hidden_norm = RMSNorm(hidden, eps)
        self.embedding_norm = RMSNorm(hidden, eps)
        self.gate_proj = nn.Linear(2 * hidden, hidden, bias=False)
        self.up_proj = nn.Linear(2 * hidden, hidden, bias=False)
        self.down_proj = nn.Linear(hidden, hidden, bias=False)

    def forward(self, draft: Tensor, previous: Tensor) -> Tensor:
        """draft: (..., hidden), states after the final norm; previous: (..., hidden), embedded -> (..., hidden)."""
        z = torch.cat((self.hidden_norm(draft), self.embedding_norm(previous.to(draft.dtype))), dim=-1)
        return draft + self.down_proj(nn.functional.silu(self.gate_proj(z)) * self.up_proj(z))


@dataclass(slots=True, kw_only=True)
class DFlyCache:
    """Context keys and values of verified positions, and how many there are.

    Attributes:
        keys: for each draft layer (batch, capacity, kv_head, head_dim).
        values: likewise.
        lengths: verified positions of each request; what stands beyond them in a buffer is never read.
    """

    keys: list[Tensor]
    values: list[Tensor]
    lengths: list[int]


class DFly(Drafter[DFlyCache]):
    """A block-diffusion drafter; see the module's docstring."""

    config: DFlyConfig

    def __init__(self, config: DFlyConfig, spec: TargetSpec) -> None:
        super().__init__()
        if spec.mask_token_id is None:
            raise ValueError(
                "the target has no embedding row to spare for the mask token; name one that its text never contains: "
                "target.mask_token_id=<row>"
            )
        shape = config.shape(spec)
        self.config = replace(
            config,
            target_layer_ids=list(shape.target_layer_ids),
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            intermediate_size=shape.intermediate_size,
        )
        self.spec, self.shape = spec, shape
        self.target_layer_ids = shape.target_layer_ids
        self.num_draft_tokens = config.block_size - 1
        self.mask_token_id = spec.mask_token_id
        self.context = ContextEncoder(config, shape)
        self.layers = nn.ModuleList(DraftLayer(shape) for _ in range(config.num_layers))
        self.norm = RMSNorm(shape.hidden, shape.norm_eps)
        self.correction = CorrectionHead(shape.hidden, shape.norm_eps) if config.head == "correction" else None
        self.rotary = RotaryEmbedding(spec)
        self.apply(_draw_weights)
        if self.correction is not None:
            nn.init.zeros_(self.correction.down_proj.weight)

    def initialise(self, target: Target) -> str:
        """Sets the starting weights as `init` says; returns one sentence that says what was done."""
        from draftsmith.models.dfly_init import initialise

        return initialise(self, target)

    def check_documents(self, documents: Iterable[Document]) -> None:
        """Refuses documents that contain the mask token: the drafter could not tell it from an empty slot."""
        found = sum(bool((document.tokens == self.mask_token_id).any()) for document in documents)
        if found:
            raise ValueError(
                f"{found} documents contain the mask token {self.mask_token_id}; name a token that the data never "
                "contains: target.mask_token_id=<row>"
            )

    def forward(self, batch: Batch, grid: Grid, target_head: Head, want: Sequence[str]) -> TokenStats:
        """Statistics scattered on the grid, each (batch, anchor, step)."""
        return stats_on_grid(self.hidden(batch, grid, target_head), batch, grid, target_head, want)

    def hidden(self, batch: Batch, grid: Grid, target_head: Head) -> Tensor:
        """(batch, anchor, step, hidden): the states that meet lm_head; predecessors are the data's own tokens."""
        draft = self.backbone(batch, grid, target_head)
        if self.correction is None:
            return draft
        previous = batch.input_ids.gather(1, (grid.label_index - 1).clamp(min=0).flatten(1)).view_as(grid.label_index)
        return self.correction(draft, target_head.embed(previous))

    def backbone(self, batch: Batch, grid: Grid, target_head: Head) -> Tensor:
        """(batch, anchor, step, hidden): the draft layers' states after the final norm, before any head part."""
        states = self._checked(batch.states)
        blocks = Blocks(
            start=document_starts(batch.document_ids).gather(1, grid.anchor_index),
            anchor=grid.anchor_index,
            exists=grid.valid[..., 0],
            size=self.config.block_size,
            window=self.config.sliding_window,
        )
        end = int(grid.anchor_index.max())
        rotary = self.rotary(batch.position_ids[:, :end])
        contexts = [
            layer.self_attn.project_context(context, rotary)
            for layer, context in zip(self._draft_layers(), self.context(states.layers[:, :end]), strict=True)
        ]
        anchor_ids = batch.input_ids.gather(1, grid.anchor_index)
        first_position = batch.position_ids.gather(1, grid.anchor_index)
        return self._draft(anchor_ids, first_position, contexts, blocks, target_head)

    def _draft(
        self,
        anchor_ids: Tensor,
        first_position: Tensor,
        contexts: Sequence[tuple[Tensor, Tensor]],
        blocks: Blocks,
        target_head: Head,
    ) -> Tensor:
        """Runs the draft layers on blocks [anchor ; mask ; ...]; anchor_ids, first_position: (batch, anchor)."""
        slots = torch.arange(blocks.size, device=anchor_ids.device)
        ids = torch.where(slots == 0, anchor_ids[..., None], self.mask_token_id)
        x = target_head.embed(ids).to(self.norm.weight.dtype)
        rotary = self.rotary(first_position[..., None] + slots)
        attend = grouped_attention(blocks, self.shape.num_heads)
        for layer, context in zip(self.layers, contexts, strict=True):
            x = layer(x, rotary, context, attend)
        return self.norm(x[:, :, 1:])

    def _draft_layers(self) -> list[DraftLayer]:
        return [cast(DraftLayer, layer) for layer in self.layers]

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

    def new_cache(self, batch_size: int) -> DFlyCache:
        """An empty cache for batch_size requests."""
        shape = (batch_size, 0, self.shape.num_kv_heads, self.shape.head_dim)
        return DFlyCache(
            keys=[self.norm.weight.new_zeros(shape) for _ in self.layers],
            values=[self.norm.weight.new_zeros(shape) for _ in self.layers],
            lengths=[0] * batch_size,
        )

    @torch.no_grad()
    def observe(self, cache: DFlyCache, states: TargetStates, next_ids: Tensor, lengths: Tensor) -> None:
        """Projects the context of newly verified positions; see `Drafter.observe`."""
        states = self._checked(states)
        counts = lengths.tolist()
        offsets = torch.tensor(cache.lengths, device=states.layers.device)
        rotary = self.rotary(offsets[:, None] + torch.arange(states.layers.shape[1], device=offsets.device))
        needed = max(length + count for length, count in zip(cache.lengths, counts, strict=True))
        for index, (layer, context) in enumerate(zip(self._draft_layers(), self.context(states.layers), strict=True)):
            new = layer.self_attn.project_context(context, rotary)
            for buffers, rows in zip((cache.keys, cache.values), new, strict=True):
                buffers[index] = _grown(buffers[index], needed)
                for request, count in enumerate(counts):
                    begin = cache.lengths[request]
                    buffers[index][request, begin : begin + count] = rows[request, :count]
        cache.lengths = [length + count for length, count in zip(cache.lengths, counts, strict=True)]

    @torch.no_grad()
    def propose(
        self,
        cache: DFlyCache,
        anchor_ids: Tensor,
        target_head: Head,
        *,
        temperature: float = 0.0,
        top_p: float = 1.0,
        generator: torch.Generator | None = None,
    ) -> Proposal:
        """One pass of the draft layers, then the head part step by step; see `Drafter.propose`."""
        anchor = torch.tensor(cache.lengths, device=anchor_ids.device)[:, None]
        blocks = Blocks(
            start=torch.zeros_like(anchor),
            anchor=anchor,
            exists=torch.ones_like(anchor, dtype=torch.bool),
            size=self.config.block_size,
            window=self.config.sliding_window,
        )
        contexts = list(zip(cache.keys, cache.values, strict=True))
        draft = self._draft(anchor_ids[:, None], anchor, contexts, blocks, target_head)[:, 0]
        tokens, probs, confidence, previous = [], [], [], anchor_ids
        for step in range(self.num_draft_tokens):
            state = draft[:, step]
            if self.correction is not None:
                state = self.correction(state, target_head.embed(previous))
            logits = target_head.logits(state)
            confidence.append(logits.float().softmax(-1).amax(-1))
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


def _draw_weights(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, std=0.02)


def _grown(buffer: Tensor, needed: int) -> Tensor:
    """A buffer (batch, capacity, ...) with room for `needed` positions; doubled, so that copies stay rare."""
    capacity = buffer.shape[1]
    if needed <= capacity:
        return buffer
    grown = buffer.new_zeros(buffer.shape[0], max(needed, 2 * capacity), *buffer.shape[2:])
    grown[:, :capacity] = buffer
    return grown
