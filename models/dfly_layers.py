"""The parts of a block-diffusion drafter: what it sees of the target, its draft layers, what corrects its drafts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from draftsmith.models.block_attention import Attend, Blocks, flex_block_attention, grouped_attention
from draftsmith.models.dfly_shape import Shape
from draftsmith.models.layers import GatedLinear, RMSNorm, RotaryEmbedding, SwiGLU, apply_rotary
from draftsmith.models.target import TargetSpec

Rotary = tuple[Tensor, Tensor]


class ContextEncoder(nn.Module):
    """What each draft layer sees of the target's captured states h_1 .. h_T.

    shared (DFlash): c = RMS(W [h_1 ; ... ; h_T]), the same for all layers. fused (DFlare): c_i = RMS(sum_t
    softmax(F_i)_t h_t). hybrid (DFly): c_i = RMS(W [h_1 ; ... ; h_T] + sum_t softmax(F_i)_t h_t).
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.num_layers, num_captured = shape.num_layers, len(shape.target_layer_ids)
        self.projection, self.fusion = None, None
        if shape.context != "fused":
            self.projection = nn.Linear(num_captured * shape.hidden, shape.hidden, bias=False)
        if shape.context != "shared":
            self.fusion = nn.Parameter(fusion_logits(shape.num_layers, num_captured))
        self.norm = RMSNorm(shape.hidden, shape.norm_eps)

    def forward(self, layers: Tensor) -> Sequence[Tensor]:
        """layers: (batch, seq, layer, hidden) -> for each draft layer (batch, seq, hidden)."""
        layers = layers.to(self.norm.weight.dtype)
        shared = None if self.projection is None else self.projection(layers.flatten(2))
        if self.fusion is None:
            return [self.norm(shared)] * self.num_layers
        return [self.norm(_fuse(weights, layers, shared)) for weights in self.fusion.softmax(dim=-1)]


def _fuse(weights: Tensor, layers: Tensor, shared: Tensor | None) -> Tensor:
    """sum_t weights_t layers_t, and the shared view; weights: (layer,), layers: (batch, seq, layer, hidden)."""
    # A batched product: as one `@` it would be folded into a plain product over a transposed copy of the states.
    rows = weights.expand(layers.shape[0] * layers.shape[1], 1, -1)
    fused = torch.bmm(rows, layers.flatten(0, 1)).view_as(layers[:, :, 0])
    return fused if shared is None else fused.add_(shared)


def fusion_logits(num_layers: int, num_captured: int) -> Tensor:
    """F at the start: layer i prefers t* = round(i / (L - 1) (T - 1)) (L = 1: T - 1), F_it = -2 |t - t*|."""
    preferred = [
        num_captured - 1 if num_layers == 1 else round(i / (num_layers - 1) * (num_captured - 1))
        for i in range(num_layers)
    ]
    return -2.0 * (torch.arange(num_captured) - torch.tensor(preferred)[:, None]).abs().float()


class BlockAttention(nn.Module):
    """Attention from a block to [context ; block], with the target's rotary embedding.

    One pair of key and value projections serves both sources; with the fused context each has its own.
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.head_dim = shape.head_dim
        width, kv_width = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        self.q_proj = nn.Linear(shape.hidden, width, bias=shape.qkv_bias)
        self.k_proj = nn.Linear(shape.hidden, kv_width, bias=shape.qkv_bias)
        self.v_proj = nn.Linear(shape.hidden, kv_width, bias=shape.qkv_bias)
        self.o_proj = nn.Linear(width, shape.hidden, bias=False)
        self.context_k_proj, self.context_v_proj = None, None
        if shape.context == "fused":
            self.context_k_proj = nn.Linear(shape.hidden, kv_width, bias=shape.qkv_bias)
            self.context_v_proj = nn.Linear(shape.hidden, kv_width, bias=shape.qkv_bias)
        self.q_norm = RMSNorm(shape.head_dim, shape.norm_eps) if shape.qk_norm else None
        self.k_norm = RMSNorm(shape.head_dim, shape.norm_eps) if shape.qk_norm else None

    def project_context(self, context: Tensor, rotary: Rotary) -> tuple[Tensor, Tensor]:
        """context: (batch, seq, hidden) -> keys and values, each (batch, seq, kv_head, head_dim)."""
        keys = (self.context_k_proj or self.k_proj)(context)
        values = (self.context_v_proj or self.v_proj)(context)
        return self._heads(keys, self.k_norm, rotary), values.unflatten(-1, (-1, self.head_dim))

    def forward(self, x: Tensor, rotary: Rotary, context: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        """x: (batch, anchor, slot, hidden) -> the same shape."""
        q = self._heads(self.q_proj(x), self.q_norm, rotary)
        k = self._heads(self.k_proj(x), self.k_norm, rotary)
        v = self.v_proj(x).unflatten(-1, (-1, self.head_dim))
        return self.o_proj(attend(q, k, v, *context).flatten(-2))

    def _heads(self, x: Tensor, norm: RMSNorm | None, rotary: Rotary) -> Tensor:
        x = x.unflatten(-1, (-1, self.head_dim))
        return apply_rotary(x if norm is None else norm(x), *rotary)


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


class Backbone(nn.Module):
    """Context encoder, draft layers and final norm: from a block's embeddings to one state for each draft.

    Args:
        checkpointing: compute draft layers again in backward instead of keeping what they need.
    """

    def __init__(self, shape: Shape, spec: TargetSpec, *, checkpointing: bool = False) -> None:
        super().__init__()
        self.num_heads, self.checkpointing = shape.num_heads, checkpointing
        self.context = ContextEncoder(shape)
        self.layers = nn.ModuleList(DraftLayer(shape) for _ in range(shape.num_layers))
        self.norm = RMSNorm(shape.hidden, shape.norm_eps)
        self.rotary = RotaryEmbedding(spec)

    def project_context(self, layers: Tensor, position_ids: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Context keys and values of each draft layer.

        Args:
            layers: (batch, seq, layer, hidden), the target's captured states.
            position_ids: (batch, seq).

        Returns:
            For each draft layer keys and values, each (batch, seq, kv_head, head_dim).
        """
        rotary = self.rotary(position_ids)
        return [
            cast(DraftLayer, layer).self_attn.project_context(context, rotary)
            for layer, context in zip(self.layers, self.context(layers), strict=True)
        ]

    def forward(
        self, x: Tensor, first_position: Tensor, contexts: Sequence[tuple[Tensor, Tensor]], blocks: Blocks
    ) -> Tensor:
        """Runs blocks through the draft layers.

        Args:
            x: (batch, anchor, slot, hidden), embeddings of [anchor ; mask ; ...].
            first_position: (batch, anchor), the anchor's position in its document.
            contexts: see `project_context`.

        Returns:
            (batch, anchor, slot - 1, hidden) after the final norm: slot s + 1 is step s.
        """
        trains = torch.is_grad_enabled()
        x = x.to(self.norm.weight.dtype)
        rotary = self.rotary(first_position[..., None] + torch.arange(blocks.size, device=x.device))
        if x.is_cuda and trains:
            attend = flex_block_attention(blocks, contexts[0][0].shape[1])
        else:
            attend = grouped_attention(blocks, self.num_heads)
        for layer, context in zip(self.layers, contexts, strict=True):
            if self.checkpointing and trains:
                x = checkpoint(layer, x, rotary, context, attend, use_reentrant=False)
            else:
                x = layer(x, rotary, context, attend)
        return self.norm(x[:, :, 1:])


class CorrectionHead(nn.Module):
    """DFly's hidden correction: d + W_down(SiLU(W_gate z) * W_up z), z = [RMS(d) ; RMS(E[previous])].

    W_down starts at zero, so at the start it is the identity.
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.hidden_norm = RMSNorm(shape.hidden, shape.norm_eps)
        self.embedding_norm = RMSNorm(shape.hidden, shape.norm_eps)
        self.gate_proj = nn.Linear(2 * shape.hidden, shape.hidden, bias=False)
        self.up_proj = nn.Linear(2 * shape.hidden, shape.hidden, bias=False)
        self.down_proj = GatedLinear(shape.hidden, shape.hidden)

    def forward(self, draft: Tensor, previous: Tensor) -> Tensor:
        """draft: (..., hidden), states after the final norm; previous: (..., hidden), embedded -> (..., hidden)."""
        z = torch.cat((self.hidden_norm(draft), self.embedding_norm(previous.to(draft.dtype))), dim=-1)
        return draft + self.down_proj(self.gate_proj(z), self.up_proj(z))


class MarkovHead(nn.Module):
    """DSpark's first-order head: logits += W_2 W_1[previous]. W_2 starts at zero, so at the start it adds nothing."""

    def __init__(self, vocab: int, rank: int) -> None:
        super().__init__()
        self.previous = nn.Embedding(vocab, rank)
        self.basis = nn.Parameter(torch.zeros(vocab, rank))

    def forward(self, previous: Tensor) -> tuple[Tensor, Tensor]:
        """previous: (row,) -> W_1[previous] (row, rank), and W_2 (vocab, rank)."""
        # A copy of W_2: under ZeRO-3 the weight itself is whole only while its own module's forward runs.
        return self.previous(previous), self.basis.clone()


def draw_weights(module: nn.Module) -> None:
    """Random weights at the start: N(0, 0.02), as language models are initialised; the zero-initialised maps stay 0."""
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
    if isinstance(module, CorrectionHead):  # after its children
        nn.init.zeros_(module.down_proj.weight)
