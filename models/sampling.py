"""From logits to a token: the one place where temperature and top-p are applied, to target and drafter alike."""

from __future__ import annotations

import torch
from torch import Tensor


def distribution(logits: Tensor, temperature: float, top_p: float = 1.0) -> Tensor:
    """The distribution that tokens are drawn from, float32 whatever the input type.

    Top-p (nucleus sampling, arXiv 1904.09751) keeps the smallest set of most probable tokens whose mass reaches top_p,
    ties in the order of token ids, and renormalises.

    Args:
        logits: (..., vocab).
        temperature: above 0.
        top_p: in (0, 1]; 1: every token.

    Returns:
        (..., vocab) float32.

    Raises:
        ValueError: temperature or top_p outside its range.
    """
    if not temperature > 0:
        raise ValueError(f"temperature is {temperature}; a distribution needs one above 0 (greedy: take the argmax)")
    if not 0 < top_p <= 1:
        raise ValueError(f"top_p is {top_p}; it must be in (0, 1], and 1 keeps every token")
    probs = torch.softmax(logits.float() / temperature, dim=-1)
    if top_p == 1:
        return probs
    ranked, order = probs.sort(dim=-1, descending=True, stable=True)
    mass_before = ranked.cumsum(-1) - ranked
    kept = ranked.masked_fill(mass_before >= top_p, 0.0)
    probs = torch.zeros_like(probs).scatter(-1, order, kept)
    return probs / probs.sum(-1, keepdim=True)


def sample(probs: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Draws one token from each distribution.

    Args:
        probs: (..., vocab).

    Returns:
        (...) int64.
    """
    flat = probs.reshape(-1, probs.shape[-1])
    return torch.multinomial(flat, 1, generator=generator).view(probs.shape[:-1])
