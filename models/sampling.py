"""From logits to a token: the one place where temperature and top-p are applied, to target and drafter alike."""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 512


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


def sample_at(probs: Tensor, uniform: Tensor) -> Tensor:
    """Draws each row's token by a number that is given: the first token whose cumulative probability exceeds it.

    One number for a row, and one pass over it: the sums of its blocks, then the inside of the block that is hit.

    Args:
        probs: (row, vocab), not negative.
        uniform: (row,) float64 in [0, 1).

    Returns:
        (row,) int64, distributed as probs where uniform is.
    """
    vocab = probs.shape[-1]
    whole = vocab // BLOCK
    sums = probs[:, : whole * BLOCK].unflatten(-1, (whole, BLOCK)).sum(-1)
    sums = torch.cat((sums, probs[:, whole * BLOCK :].sum(-1, keepdim=True)), -1).double()
    block, rest = _first_above(sums, uniform * sums.sum(-1))
    inside = block[:, None] * BLOCK + torch.arange(BLOCK, device=probs.device)
    weights = probs.gather(-1, inside.clamp(max=vocab - 1)).double().masked_fill(inside >= vocab, 0)
    return (block * BLOCK + _first_above(weights, rest)[0]).clamp(max=vocab - 1)


def _first_above(weights: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """The first place where the cumulative weight exceeds what is wanted, and how far into that weight it lies.

    Rounding never leads to a weight of zero: wanted is brought below the sum, what is left of it to zero or more.

    Args:
        weights: (row, place) float64.
        wanted: (row,) float64.
    """
    cumulative = weights.cumsum(-1)
    wanted = torch.minimum(wanted, cumulative[:, -1] * (1 - 2**-52))
    place = torch.searchsorted(cumulative, wanted[:, None], right=True).clamp(max=weights.shape[-1] - 1)
    before = (cumulative - weights).gather(-1, place)
    return place.squeeze(-1), (wanted - before.squeeze(-1)).clamp(min=0)
