"""Attention of a drafted chain: the committed prefix that all chains share, then each chain's own entries.

A chain's query at depth k sees a run of context positions and the chain's own k entries under one softmax (method:
training-time test, as a server's KV cache holds them). The context part of every chain is computed against one shared,
un-repeated set of keys; the own part is a few dot products. Nothing of size (row, position) outlives a tile.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

# A tile of scores stays in cache and is large enough for full-rate products.
TILE_ROWS = 128
TILE_BYTES = 4 << 20

# The score of an invisible position: its weight is exactly 0 beside any visible one, and a tile without a visible one
# gives no NaN.
DEAD = -1e30

# Compiled, so that neither scores nor the mask are ever laid out; shapes vary from row to row.
compiled_flex_attention = torch.compile(flex_attention, dynamic=True)
compiled_block_mask = torch.compile(create_block_mask, dynamic=True)


def chain_attention(
    query: Tensor,
    context_key: Tensor,
    context_value: Tensor,
    own_key: Tensor,
    own_value: Tensor,
    first: Tensor,
    last: Tensor,
) -> Tensor:
    """softmax(q K^T / sqrt(head_dim)) V over context positions first..last and the row's own entries.

    Args:
        query: (row, head, head_dim).
        context_key: (position, kv_head, head_dim), shared by all rows; head is a multiple of kv_head.
        context_value: like context_key.
        own_key: (row, entry, kv_head, head_dim); entry may be 0.
        own_value: like own_key.
        first: (row,) int64, the first context position that the row sees.
        last: (row,) int64, the last one; rows in ascending order cost least.

    Returns:
        (row, head, head_dim).
    """
    if query.is_cuda:
        return flex_chain_attention(query, context_key, context_value, own_key, own_value, first, last)
    attended: Tensor = _TiledAttention.apply(query, context_key, context_value, own_key, own_value, first, last)
    return attended


class _TiledAttention(torch.autograd.Function):
    """Tiles of rows against tiles of context, merged through their log-sum-exp; backward recomputes the scores.

    Parts with log-sum-exp l_i and outputs o_i merge to lse = logsumexp(l_i), out = sum o_i exp(l_i - lse). With
    P = exp(score - lse) and d = sum(grad * out): dV = P^T grad, dscore = P (grad V^T - d), for context and own entries
    alike, since all stand under the one lse (FlashAttention-2, arXiv 2307.08691, Algorithms 1 and 2).
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, own_key: Tensor, own_value: Tensor,
                first: Tensor, last: Tensor) -> Tensor:  # fmt: skip
        scaled = query * query.shape[-1] ** -0.5
        out, lse = torch.empty_like(query), query.new_empty(query.shape[:2], dtype=_wide(query))
        for rows, tiles in _tiles(query, first, last):
            grouped = _grouped(scaled[rows], key)
            own = torch.einsum("hgrd,rehd->hgre", grouped, own_key[rows]).to(lse.dtype)
            total = own.logsumexp(-1, keepdim=True).clamp(min=DEAD)
            mixed = torch.einsum("hgre,rehd->hgrd", (own - total).exp(), own_value[rows].to(lse.dtype))
            for tile in tiles:
                scores = _scores(grouped, key[tile], first[rows] - tile.start, last[rows] - tile.start)
                top = scores.amax(-1, keepdim=True)
                probs = scores.sub_(top).exp_()
                before, total = total, torch.logaddexp(total, top + probs.sum(-1, keepdim=True).log())
                part = probs.to(value.dtype).flatten(1, 2) @ value[tile].transpose(0, 1)
                mixed = mixed.mul_((before - total).exp()).add_(part.view_as(mixed) * (top - total).exp())
            out[rows], lse[rows] = _ungrouped(mixed).to(out.dtype), _ungrouped(total).squeeze(-1)
        ctx.save_for_backward(query, key, value, own_key, own_value, first, last, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, own_key, own_value, first, last, out, lse = ctx.saved_tensors
        (grad,) = grads
        scale = query.shape[-1] ** -0.5
        grad_query, grad_own_key, grad_own_value = map(torch.empty_like, (query, own_key, own_value))
        grad_key, grad_value = (x.new_zeros(x.shape, dtype=lse.dtype) for x in (key, value))
        inner = (grad * out).sum(-1, keepdim=True, dtype=lse.dtype)
        for rows, tiles in _tiles(query, first, last):
            grouped, grad_out = _grouped(query[rows] * scale, key), _grouped(grad[rows], key)
            flat_query, flat_grad = grouped.flatten(1, 2), grad_out.flatten(1, 2)
            total, dot = _grouped(lse[rows, :, None], key), _grouped(inner[rows], key)

            own_probs = (torch.einsum("hgrd,rehd->hgre", grouped, own_key[rows]).to(lse.dtype) - total).exp()
            grad_own_value[rows] = torch.einsum("hgre,hgrd->rehd", own_probs.to(grad.dtype), grad_out)
            grad_own = torch.einsum("hgrd,rehd->hgre", grad_out, own_value[rows]).to(lse.dtype)
            grad_own = ((grad_own - dot) * own_probs).to(grad.dtype)
            grad_own_key[rows] = torch.einsum("hgre,hgrd->rehd", grad_own, grouped)
            grad_grouped = torch.einsum("hgre,rehd->hgrd", grad_own, own_key[rows]).to(lse.dtype)

            for tile in tiles:
                scores = _scores(grouped, key[tile], first[rows] - tile.start, last[rows] - tile.start)
                probs = scores.sub_(total).exp_()
                grad_value[tile] += (probs.to(grad.dtype).flatten(1, 2).mT @ flat_grad).transpose(0, 1)
                grad_probs = (flat_grad @ value[tile].permute(1, 2, 0)).view_as(probs).to(lse.dtype)
                grad_scores = grad_probs.sub_(dot).mul_(probs).to(grad.dtype).flatten(1, 2)
                grad_key[tile] += (grad_scores.mT @ flat_query).transpose(0, 1)
                grad_grouped += (grad_scores @ key[tile].transpose(0, 1)).view_as(grouped)
            grad_query[rows] = (_ungrouped(grad_grouped) * scale).to(grad.dtype)
        grad_key, grad_value = grad_key.to(key.dtype), grad_value.to(value.dtype)
        return grad_query, grad_key, grad_value, grad_own_key, grad_own_value, None, None


def _wide(x: Tensor) -> torch.dtype:
    """The type that softmax runs in: float32 at least."""
    return torch.promote_types(x.dtype, torch.float32)


def _tiles(query: Tensor, first: Tensor, last: Tensor) -> list[tuple[slice, list[slice]]]:
    """Pieces of rows, each with pieces of the run of context positions that any of its rows sees.

    Context is cut where the part that every row of a piece sees begins and ends, so that only the rest needs a mask.
    """
    width = max(1, TILE_BYTES // (TILE_ROWS * query.shape[1] * _wide(query).itemsize))
    pieces = []
    for start in range(0, len(query), TILE_ROWS):
        rows = slice(start, min(start + TILE_ROWS, len(query)))
        low, seen_from = first[rows].aminmax()
        seen_to, high = (last[rows] + 1).aminmax()
        edges = sorted({int(low), int(seen_from), max(int(seen_from), int(seen_to)), int(high)})
        tiles = [
            slice(at, min(at + width, stop)) for begin, stop in pairwise(edges) for at in range(begin, stop, width)
        ]
        pieces.append((rows, tiles))
    return pieces


def _grouped(x: Tensor, key: Tensor) -> Tensor:
    """(row, head, any) -> (kv_head, group, row, any): the query heads that share a key head side by side."""
    return x.unflatten(1, (key.shape[1], -1)).permute(1, 2, 0, 3).contiguous()


def _ungrouped(x: Tensor) -> Tensor:
    """The inverse of `_grouped`."""
    return x.permute(2, 0, 1, 3).flatten(1, 2)


def _scores(grouped: Tensor, key: Tensor, first: Tensor, last: Tensor) -> Tensor:
    """Scores of scaled queries against a tile, (kv_head, group, row, position), DEAD outside first..last."""
    scores = (grouped.flatten(1, 2) @ key.permute(1, 2, 0)).to(_wide(grouped)).unflatten(1, grouped.shape[1:3])
    if int(first.max()) <= 0 and int(last.min()) >= len(key) - 1:
        return scores
    position = torch.arange(len(key), device=key.device)
    return scores.masked_fill_((position < first[:, None]) | (position > last[:, None]), DEAD)


def flex_chain_attention(
    query: Tensor,
    context_key: Tensor,
    context_value: Tensor,
    own_key: Tensor,
    own_value: Tensor,
    first: Tensor,
    last: Tensor,
) -> Tensor:
    """`chain_attention` with FlexAttention for the context part, merged exactly through its log-sum-exp."""
    mask = run_mask(first, last, context_key.shape[0])
    context, context_lse = compiled_flex_attention(
        query.transpose(0, 1)[None],
        context_key.transpose(0, 1)[None],
        context_value.transpose(0, 1)[None],
        block_mask=mask,
        enable_gqa=True,
        return_lse=True,  # type: ignore[arg-type]
    )
    context, context_lse = context[0].transpose(0, 1), context_lse[0].T
    grouped = query.unflatten(1, (own_key.shape[2], -1))
    own = torch.einsum("rhgd,rehd->rhge", grouped.float(), own_key.float()).flatten(1, 2) * query.shape[-1] ** -0.5
    lse = torch.logaddexp(context_lse, own.logsumexp(-1))
    own_probs = (own - lse[..., None]).exp().unflatten(1, grouped.shape[1:3])
    merged = context * (context_lse - lse).exp()[..., None]
    return (merged + torch.einsum("rhge,rehd->rhgd", own_probs, own_value.float()).flatten(1, 2)).to(query.dtype)


def run_mask(first: Tensor, last: Tensor, num_positions: int) -> BlockMask:
    """FlexAttention's mask for rows that each see one run of positions."""

    def visible(batch: Tensor, head: Tensor, row: Tensor, position: Tensor) -> Tensor:
        return (position >= first[row]) & (position <= last[row])

    return compiled_block_mask(visible, None, None, len(first), num_positions, device=first.device)
