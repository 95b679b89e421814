"""Layers that every drafter shares: RMSNorm, rotary embedding taken from the target, SwiGLU."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

if TYPE_CHECKING:
    from draftsmith.models.target import TargetSpec


class RMSNorm(nn.Module):
    """Root-mean-square norm: float32 inside, weight applied in the input's dtype, weight initialised to 1.

    With plus_one the scale is 1 + weight, applied in float32, and the weight starts at 0 (Gemma, Qwen3-Next, Qwen3.5).
    """

    def __init__(self, hidden: int, eps: float, plus_one: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(hidden) if plus_one else torch.ones(hidden))
        self.eps = eps
        self.plus_one = plus_one

    def forward(self, x: Tensor) -> Tensor:
        """x: (..., hidden) -> (..., hidden)."""
        wide = x if x.dtype == torch.float64 else x.float()
        normed = F.rms_norm(wide, self.weight.shape, eps=self.eps)
        if self.plus_one:
            return (normed * (1 + self.weight.to(wide.dtype))).to(x.dtype)
        return normed.to(x.dtype) * self.weight


class SwiGLU(nn.Module):
    """down(SiLU(gate(x)) * up(x))."""

    def __init__(self, hidden: int, intermediate: int, bias: bool = False) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, intermediate, bias=bias)
        self.up_proj = nn.Linear(hidden, intermediate, bias=bias)
        self.down_proj = nn.Linear(intermediate, hidden, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """x: (..., hidden) -> (..., hidden)."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class RotaryEmbedding(nn.Module):
    """Rotary position embedding with the target's own frequencies, partial factor and attention scaling.

    Inverse frequencies come from transformers' initialisers (see `draftsmith.models.rope.rope_frequencies`).
    """

    inv_freq: Tensor

    def __init__(self, spec: TargetSpec) -> None:
        super().__init__()
        self.frequencies = torch.tensor(spec.rope_inv_freq, dtype=torch.float32, device="cpu")
        self.register_buffer("inv_freq", self.frequencies.clone(), persistent=False)
        self.scaling = spec.rope_attention_scaling

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> RotaryEmbedding:
        """Moves with the module, but stays float32 when that is cast: rounded frequencies are other frequencies."""
        super()._apply(fn, recurse)
        self.inv_freq = self.frequencies.to(self.inv_freq.device)
        return self

    def forward(self, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """position_ids: (...) -> cos and sin, each (..., rotary_dim), float32."""
        angles = position_ids[..., None].float() * self.inv_freq
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos() * self.scaling, angles.sin() * self.scaling


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates the first rotary_dim components of each head; the rest passes unchanged.

    Args:
        x: (..., head, head_dim).
        cos: (..., rotary_dim), without the head axis.
        sin: (..., rotary_dim), without the head axis.
    """
    cos, sin = cos[..., None, :].to(x.dtype), sin[..., None, :].to(x.dtype)
    rotary_dim = cos.shape[-1]
    rotated, passed = x[..., :rotary_dim], x[..., rotary_dim:]
    first, second = rotated.chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    return torch.cat((rotated * cos + turned * sin, passed), dim=-1)
