"""Attention of a drafted chain: the committed prefix that all chains share, then each chain's own entries.

A chain's query at depth k sees a run of context positions and the chain's own k entries under one softmax (method:
training-time test, as a server's KV cache holds them). The context part of every chain is computed against one shared,
un-repeated set of keys; the own part is a few dot products. Nothing of size (row, position) outlives a chunk of rows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

# Live scores of one chunk: small enough to stay in a cache level, large enough for full-rate products.
CHUNK_BYTES = 8 << 20
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
    attended: Tensor = _ChunkedAttention.apply(query, context_key, context_value, own_key, own_value, first, last)
    return attended


class _ChunkedAttention(torch.autograd.Function):
    """Rows in chunks, scores recomputed in backward from the saved log-sum-exp.

    With P = exp(score - lse) and d = sum(grad * out): dV = P^T grad, dscore = P (grad V^T - d), for context and own
    entries alike, since both stand under the same lse (FlashAttention-2, arXiv 2307.08691, Algorithm 2).
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, own_key: Tensor, own_value: Tensor,
                first: Tensor, last: Tensor) -> Tensor:  # fmt: skip
        out, lse = torch.empty_like(query), query.new_empty(query.shape[:2], dtype=_wide(query))
        for rows, seen in _chunks(query, key, first, last):
            grouped = _grouped(query[rows], key)
            scores = _scores(grouped, key[seen], first[rows] - seen.start, last[rows] - seen.start)
            own = _own_scores(grouped, own_key[rows])
            total = torch.logaddexp(scores.logsumexp(-1), own.logsumexp(-1))
            probs = scores.sub_(total[..., None]).exp_().to(value.dtype)
            own_probs = (own - total[..., None]).exp().to(value.dtype)
            mixed = probs.flatten(1, 2) @ value[seen].transpose(0, 1)
            mixed = mixed.view_as(grouped) + torch.einsum("hgre,rehd->hgrd", own_probs, own_value[rows])
            out[rows], lse[rows] = _ungrouped(mixed), total.flatten(0, 1).T
        ctx.save_for_backward(query, key, value, own_key, own_value, first, last, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, own_key, own_value, first, last, out, lse = ctx.saved_tensors
        (grad,) = grads
        grad_query, grad_own_key, grad_own_value = map(torch.empty_like, (query, own_key, own_value))
        grad_key, grad_value = (x.new_zeros(x.shape, dtype=_wide(x)) for x in (key, value))
        scale = query.shape[-1] ** -0.5
        for rows, seen in _chunks(query, key, first, last):
            grouped, grad_out = _grouped(query[rows], key), _grouped(grad[rows], key)
            total = _grouped(lse[rows, :, None], key)
            inner = (grad_out * _grouped(out[rows], key)).to(total.dtype).sum(-1, keepdim=True)

            scores = _scores(grouped, key[seen], first[rows] - seen.start, last[rows] - seen.start)
            probs = scores.sub_(total).exp_()
            flat_grad, flat_query = grad_out.flatten(1, 2), grouped.flatten(1, 2)
            grad_value[seen] += (probs.to(value.dtype).flatten(1, 2).mT @ flat_grad).transpose(0, 1)
            grad_probs = (flat_grad @ value[seen].permute(1, 2, 0)).view_as(probs)
            grad_scores = (grad_probs.to(probs.dtype).sub_(inner).mul_(probs) * scale).to(query.dtype).flatten(1, 2)
            grad_key[seen] += (grad_scores.mT @ flat_query).transpose(0, 1)
            grad_grouped = (grad_scores @ key[seen].transpose(0, 1)).view_as(grouped)

            own_probs = (_own_scores(grouped, own_key[rows]) - total).exp()
            grad_own_value[rows] = torch.einsum("hgre,hgrd->rehd", own_probs.to(value.dtype), grad_out)
            grad_own = torch.einsum("hgrd,rehd->hgre", grad_out, own_value[rows]).to(own_probs.dtype)
            grad_own = ((grad_own - inner) * own_probs * scale).to(query.dtype)
            grad_own_key[rows] = torch.einsum("hgre,hgrd->rehd", grad_own, grouped)
            grad_query[rows] = _ungrouped(grad_grouped + torch.einsum("hgre,rehd->hgrd", grad_own, own_key[rows]))
        grad_key, grad_value = grad_key.to(key.dtype), grad_value.to(value.dtype)
        return grad_query, grad_key, grad_value, grad_own_key, grad_own_value, None, None


def _wide(x: Tensor) -> torch.dtype:
    """The type that softmax runs in: float32 at least."""
    return torch.promote_types(x.dtype, torch.float32)


def _chunks(query: Tensor, key: Tensor, first: Tensor, last: Tensor) -> list[tuple[slice, slice]]:
    """Pieces of rows, each with the run of context positions that any of its rows sees."""
    num_rows, num_heads = query.shape[:2]
    size = CHUNK_BYTES // (num_heads * max(1, key.shape[0]) * _wide(query).itemsize)
    size = min(max(size, 16), 128)
    pieces = [slice(start, min(start + size, num_rows)) for start in range(0, num_rows, size)]
    return [(rows, slice(int(first[rows].min()), int(last[rows].max()) + 1)) for rows in pieces]


def _grouped(x: Tensor, key: Tensor) -> Tensor:
    """(row, head, any) -> (kv_head, group, row, any): the query heads that share a key head side by side."""
    return x.unflatten(1, (key.shape[1], -1)).permute(1, 2, 0, 3).contiguous()


def _ungrouped(x: Tensor) -> Tensor:
    """The inverse of `_grouped`."""
    return x.permute(2, 0, 1, 3).flatten(1, 2)


def _scores(grouped: Tensor, key: Tensor, first: Tensor, last: Tensor) -> Tensor:
    """Scaled scores against context, (kv_head, group, row, position), -inf outside first..last."""
    scores = grouped.flatten(1, 2) @ key.permute(1, 2, 0)
    scores = scores.to(_wide(grouped)).mul_(grouped.shape[-1] ** -0.5).unflatten(1, grouped.shape[1:3])
    position = torch.arange(key.shape[0], device=key.device)
    hidden = (position < first[:, None]) | (position > last[:, None])
    return scores.masked_fill_(hidden, float("-inf"))


def _own_scores(grouped: Tensor, own_key: Tensor) -> Tensor:
    """Scaled scores against the rows' own entries, (kv_head, group, row, entry)."""
    scores = torch.einsum("hgrd,rehd->hgre", grouped, own_key)
    return scores.to(_wide(grouped)) * grouped.shape[-1] ** -0.5


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
