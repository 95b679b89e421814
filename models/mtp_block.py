"""The block of the MTP drafter: fuse a token's embedding with a hidden state, then one pre-norm decoder layer.

Its parts can be switched to be weight-compatible with a decoder layer, and with the MTP layer, of the target's family.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from draftsmith.models.chain_attention import chain_attention
from draftsmith.models.drafter import DrafterConfig
from draftsmith.models.layers import RMSNorm, RotaryEmbedding, SwiGLU, apply_rotary
from draftsmith.models.moe import MoE, MoEConfig
from draftsmith.models.target import TargetSpec

if TYPE_CHECKING:
    from draftsmith.models.sequence_parallel import SequenceParallel

INIT_STD = 0.02  # transformers' usual initializer_range


@dataclass(frozen=True, slots=True, kw_only=True)
class MTPBlockConfig(DrafterConfig):
    """The part of `MTPConfig` that makes the block: its sizes (None: the target's) and its family's conventions.

    Attributes:
        num_heads: query heads.
        num_kv_heads: key and value heads; num_heads is a multiple.
        head_dim: width of a head.
        intermediate_size: width of the dense MLP.
        moe: with moe.num_experts above 0 a mixture of experts instead of the dense MLP.
        qk_norm: RMSNorm of each head of q and k before RoPE (Qwen3, Hy3, GLM-4.5).
        qkv_bias: q, k and v projections with bias (MiMo, GLM-4.5).
        attention_output_gate: the attention output times a sigmoid gate; q_proj gives query and gate of each head
            (Qwen3-Next, Qwen3.5).
        norm_plus_one: RMSNorm scales by 1 + weight (Qwen3-Next, Qwen3.5).
        zero_first_embedding: the token embedding read at position 0 is zero (Hy3, MiMo, DeepSeek, GLM-4.5 in vLLM).
        fuse_order: embedding_hidden: eh_proj reads [embedding ; hidden] (Hy3, Qwen, DeepSeek, GLM); hidden_embedding:
            the other way round (MiMo).
        feedback: what the next depth reads. post_norm: the state after the final norm (Hy3, Qwen, MiMo); pre_norm: the
            state before it (GLM-4.5, DeepSeek).
    """

    num_heads: int | None = None
    num_kv_heads: int | None = None
    head_dim: int | None = None
    intermediate_size: int | None = None
    moe: MoEConfig = field(default_factory=MoEConfig)
    qk_norm: bool = False
    qkv_bias: bool = False
    attention_output_gate: bool = False
    norm_plus_one: bool = False
    zero_first_embedding: bool = False
    fuse_order: str = "embedding_hidden"
    feedback: str = "post_norm"


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """Chains, flattened over the batch: where the prefix of each stands among the context entries.

    Attributes:
        first: (column,) the context entry of its document's first position.
        last: (column,) the context entry of its own position j.
        position_ids: (column,) the position of j in its document.
    """

    first: Tensor
    last: Tensor
    position_ids: Tensor

    def __getitem__(self, piece: slice) -> Columns:
        """Some of them."""
        return Columns(first=self.first[piece], last=self.last[piece], position_ids=self.position_ids[piece])

    def attend(self, query: Tensor, context: Entries, own_key: Tensor, own_value: Tensor) -> Tensor:
        """`chain_attention` of these columns' queries (column, head, head_dim)."""
        return chain_attention(query, *context, own_key, own_value, self.first, self.last)


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedColumns(Columns):
    """Columns of this rank, whose group attends to them together, each rank with its share of the heads.

    Attributes:
        sequence: the group.
        group_first: (group column,) `first` of the columns of all its ranks.
        group_last: likewise `last`.
    """

    sequence: SequenceParallel
    group_first: Tensor
    group_last: Tensor

    @classmethod
    def of(cls, columns: Columns, sequence: SequenceParallel) -> SharedColumns:
        """This rank's columns, which are as many on every rank of the group."""
        group_first, group_last = sequence.gathered(torch.stack((columns.first, columns.last), 1)).unbind(1)
        return cls(
            first=columns.first,
            last=columns.last,
            position_ids=columns.position_ids,
            sequence=sequence,
            group_first=group_first,
            group_last=group_last,
        )

    def attend(self, query: Tensor, context: Entries, own_key: Tensor, own_value: Tensor) -> Tensor:
        """As on one rank; the context holds all positions, for this rank's heads."""
        group_query = self.sequence.to_heads(query[:, None]).squeeze(1)
        own_key, own_value = self.sequence.to_heads(torch.cat((own_key, own_value), 1)).chunk(2, 1)
        attended = chain_attention(group_query, *context, own_key, own_value, self.group_first, self.group_last)
        return self.sequence.to_rows(attended[:, None]).squeeze(1)


Entries = tuple[Tensor, Tensor]
"""Keys and values, each (..., kv_head, head_dim)."""


def check_choice(key: str, value: str, choices: tuple[str, ...]) -> None:
    """Refuses a value that is none of the choices."""
    if value not in choices:
        raise ValueError(f"{key} is {value!r}; it must be one of: {', '.join(choices)}")


class MTPBlock(nn.Module):
    """Fusion, one decoder layer and a final norm, the same parameters at every depth.

    Attributes:
        sizes: the four sizes of the configuration with every None filled in.
    """

    def __init__(self, config: MTPBlockConfig, spec: TargetSpec) -> None:
        super().__init__()
        check_choice("fuse_order", config.fuse_order, ("embedding_hidden", "hidden_embedding"))
        check_choice("feedback", config.feedback, ("post_norm", "pre_norm"))
        self.config = config
        self.num_heads = config.num_heads or spec.num_heads
        self.num_kv_heads = config.num_kv_heads or spec.num_kv_heads
        self.head_dim = config.head_dim or spec.head_dim
        intermediate = config.intermediate_size or spec.intermediate_size
        self.sizes: dict[str, Any] = {
            "num_heads": self.num_heads,
            "num_kv_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "intermediate_size": intermediate,
        }
        self._check_heads(2 * len(spec.rope_inv_freq))

        hidden, heads, kv = spec.hidden_size, self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        gates = 2 if config.attention_output_gate else 1
        self.enorm, self.hnorm, self.input_layernorm, self.post_attention_layernorm, self.final_layernorm = (
            RMSNorm(hidden, spec.rms_norm_eps, config.norm_plus_one) for _ in range(5)
        )
        self.eh_proj = nn.Linear(2 * hidden, hidden, bias=False)
        self.q_proj = nn.Linear(hidden, gates * heads, bias=config.qkv_bias)
        self.k_proj = nn.Linear(hidden, kv, bias=config.qkv_bias)
        self.v_proj = nn.Linear(hidden, kv, bias=config.qkv_bias)
        self.o_proj = nn.Linear(heads, hidden, bias=False)
        self.q_norm, self.k_norm = (
            RMSNorm(self.head_dim, spec.rms_norm_eps, config.norm_plus_one) if config.qk_norm else nn.Identity()
            for _ in range(2)
        )
        self.mlp = MoE(hidden, config.moe) if config.moe.num_experts else SwiGLU(hidden, intermediate)
        self.rotary = RotaryEmbedding(spec)
        for name, weight in self.named_parameters():
            if "norm" not in name:
                nn.init.zeros_(weight) if name.endswith("bias") else nn.init.normal_(weight, std=INIT_STD)

    def _check_heads(self, rotary_dim: int) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads is {self.num_heads} and num_kv_heads {self.num_kv_heads}; "
                "the first must be a multiple of the second"
            )
        if rotary_dim > self.head_dim:
            raise ValueError(
                f"head_dim is {self.head_dim}, but the target's RoPE turns {rotary_dim} components of a head"
            )

    def fuse(self, embedding: Tensor, hidden: Tensor) -> Tensor:
        """W_eh [RMS_e(embedding) ; RMS_h(hidden)]: (..., hidden), (..., hidden) -> (..., hidden)."""
        return self.eh_proj(self.fusion_inputs(embedding, hidden))

    def fusion_inputs(self, embedding: Tensor, hidden: Tensor) -> Tensor:
        """What eh_proj reads: (..., hidden), (..., hidden) -> (..., 2 * hidden)."""
        parts = [self.enorm(embedding), self.hnorm(hidden)]
        if self.config.fuse_order == "hidden_embedding":
            parts.reverse()
        return torch.cat(parts, -1)

    def entries(self, embedding: Tensor, hidden: Tensor, position_ids: Tensor) -> Entries:
        """Keys and values of positions; embedding and hidden: (..., hidden)."""
        return self.layer_entries(self.fuse(embedding, hidden), position_ids)

    def layer_entries(self, residual: Tensor, position_ids: Tensor) -> Entries:
        """`entries` from the fused input (..., hidden) on."""
        return self._key_value(self.input_layernorm(residual), position_ids)

    def _key_value(self, x: Tensor, position_ids: Tensor) -> Entries:
        key = self.k_norm(self.k_proj(x).unflatten(-1, (self.num_kv_heads, self.head_dim)))
        value = self.v_proj(x).unflatten(-1, (self.num_kv_heads, self.head_dim))
        return apply_rotary(key, *self.rotary(position_ids)), value

    def forward(
        self,
        embedding: Tensor,
        hidden: Tensor,
        depth: int,
        columns: Columns,
        context: Entries,
        own: tuple[Entries, ...],
    ) -> tuple[Tensor, Tensor, tuple[Entries, ...]]:
        """One depth.

        Args:
            embedding: (column, hidden), of the tokens that this depth reads.
            hidden: (column, hidden), what the depth before handed on.
            context: depth-0 entries that `columns` points into, each (entry, kv_head, head_dim).
            own: the columns' own entries of depths 1 .. depth - 1, each (column, kv_head, head_dim).

        Returns:
            The states that meet lm_head (column, hidden), what the next depth reads (column, hidden), and `own` with
            this depth's entries (at depth 0 they are among the context already).
        """
        return self.layer(self.fuse(embedding, hidden), depth, columns, context, own)

    def layer(
        self, residual: Tensor, depth: int, columns: Columns, context: Entries, own: tuple[Entries, ...]
    ) -> tuple[Tensor, Tensor, tuple[Entries, ...]]:
        """`forward` from the fused input (column, hidden) on: the decoder layer and the final norm."""
        position_ids = columns.position_ids + depth
        x = self.input_layernorm(residual)
        if depth > 0:
            own = (*own, self._key_value(x, position_ids))
        residual = residual + self._attend(x, position_ids, columns, context, own)
        residual = residual + self.mlp(self.post_attention_layernorm(residual))
        state = self.final_layernorm(residual)
        return state, residual if self.config.feedback == "pre_norm" else state, own

    def _attend(
        self, x: Tensor, position_ids: Tensor, columns: Columns, context: Entries, own: tuple[Entries, ...]
    ) -> Tensor:
        query = self.q_proj(x).unflatten(-1, (self.num_heads, -1))
        query, gate = query.split([self.head_dim, query.shape[-1] - self.head_dim], -1)
        query = apply_rotary(self.q_norm(query), *self.rotary(position_ids))
        if own:
            own_key, own_value = (torch.stack(entries, 1) for entries in zip(*own, strict=True))
        else:
            own_key = own_value = query.new_empty(len(query), 0, self.num_kv_heads, self.head_dim)
        attended = columns.attend(query, context, own_key, own_value)
        if self.config.attention_output_gate:
            attended = attended * gate.sigmoid()
        return self.o_proj(attended.flatten(-2))
