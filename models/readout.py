"""The products with the vocabulary: hidden states to logits, and gradients of logits back to hidden states."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from draftsmith.models.comparison import DEAD

# CPUs have no product of two bfloat16 matrices into float32: this many rows of the head are widened at a time.
UPCAST_ROWS = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class Readout:
    """How a hidden state becomes logits: softcap(scale (weight h + bias)).

    Attributes:
        weight: (vocab, hidden).
        bias: (vocab,) or None; a token's -inf takes it out.
        scale: multiplies the logits.
        softcap: c tanh(logits / c), or None.
    """

    weight: Tensor
    bias: Tensor | None
    scale: float
    softcap: float | None

    def write(self, hidden: Tensor, logits: Tensor) -> None:
        """hidden: (row, hidden) -> logits: (row, vocab), in place."""
        project(hidden, self.weight, logits)
        if self.bias is not None:
            logits.add_(self.bias.to(logits.dtype).clamp(min=DEAD))
        if self.scale != 1:
            logits.mul_(self.scale)
        if self.softcap is not None:
            logits.div_(self.softcap).tanh_().mul_(self.softcap)


def project(hidden: Tensor, weight: Tensor, out: Tensor) -> None:
    """out = hidden weight^T, with the precision of `out`.

    Logits rounded to bfloat16 would flip the sign of p - q at many tokens, which is what the gradient of TV is made of.
    """
    if hidden.dtype == out.dtype:
        torch.mm(hidden, weight.T, out=out)
    elif out.is_cuda:
        torch.mm(hidden, weight.T, out_dtype=out.dtype, out=out)
    else:
        hidden = hidden.to(out.dtype)
        for first in range(0, len(weight), UPCAST_ROWS):
            part = slice(first, first + UPCAST_ROWS)
            torch.mm(hidden, weight[part].to(out.dtype).T, out=out[:, part])


def pull_back(gradient: Tensor, weight: Tensor) -> Tensor:
    """gradient (row, vocab) times weight (vocab, hidden) -> (row, hidden)."""
    if gradient.dtype == weight.dtype or gradient.is_cuda:
        return torch.mm(gradient.to(weight.dtype), weight)
    out = gradient.new_zeros(len(gradient), weight.shape[1])
    for first in range(0, len(weight), UPCAST_ROWS):
        part = slice(first, first + UPCAST_ROWS)
        out.addmm_(gradient[:, part], weight[part].to(gradient.dtype))
    return out


def precision_of(hidden: Tensor) -> torch.dtype:
    """Of logits and reductions: float32, or float64 where the hidden states are (for gradient checks)."""
    return torch.float64 if hidden.dtype == torch.float64 else torch.float32
