"""Layers that every drafter shares: RMSNorm, rotary embedding taken from the target, SwiGLU."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
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
        return _ScaledNorm.apply(x, 1 + _wide(self.weight) if self.plus_one else self.weight, self.eps)


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


class _ScaledNorm(torch.autograd.Function):
    """scale * x / rms(x), keeping x and one number for each row; the normed rows are formed again in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor, eps: float) -> Tensor:
        wide = _wide(x)
        inverse = wide.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
        ctx.save_for_backward(x, scale, inverse)
        return ((wide * inverse).to(scale.dtype) * scale).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, scale, inverse = ctx.saved_tensors
        grad = _wide(grads[0])
        normed = _wide(x) * inverse
        along = grad * normed
        grad_scale = along.sum(dim=tuple(range(x.dim() - 1))).to(scale.dtype)
        along = along.mul_(scale).mean(-1, keepdim=True)
        grad_x = (grad * scale).sub_(normed.mul_(along)).mul_(inverse)
        return grad_x.to(x.dtype), grad_scale, None


class SwiGLU(nn.Module):
    """down(SiLU(gate(x)) * up(x))."""

    def __init__(self, hidden: int, intermediate: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, intermediate, bias=False)
        self.up_proj = nn.Linear(hidden, intermediate, bias=False)
        self.down_proj = GatedLinear(intermediate, hidden)

    def forward(self, x: Tensor) -> Tensor:
        """x: (..., hidden) -> (..., hidden)."""
        return self.down_proj(self.gate_proj(x), self.up_proj(x))


class GatedLinear(nn.Linear):
    """A linear map of SiLU(gate) * up that keeps gate and up only: their product is formed again in backward."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__(width, out, bias=False)

    def forward(self, gate: Tensor, up: Tensor) -> Tensor:  # type: ignore[override]
        """gate, up: (..., width) -> (..., out)."""
        return _GatedLinear.apply(gate, up, self.weight)


class _GatedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up, weight)
        return F.silu(gate).mul_(up) @ weight.T

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        gate, up, weight = ctx.saved_tensors
        activated = F.silu(gate)
        grad_weight = grads[0].flatten(0, -2).T @ (activated * up).flatten(0, -2)
        grad_product = grads[0] @ weight
        grad_up = activated.mul_(grad_product)
        return torch.ops.aten.silu_backward(grad_product.mul_(up), gate), grad_up, grad_weight


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
