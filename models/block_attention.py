"""Attention of drafted blocks over their documents' context, without a dense (query, key) grid.

A block of B slots stands at an anchor a. Its queries see the context (the target's states) at positions < a of the
anchor's document, and all slots of their own block; nothing of other blocks. An invalid block gets zeros.
`sees_context` is that rule; `grouped_attention` (any device, positions known on the host) and `flex_block_attention`
(CUDA, static shapes, no host synchronisation) both use it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask, flex_attention

# Queries and keys of one tile of the block mask, as FlexAttention's kernels are tuned for.
FLEX_TILE = 128

# Scores of one group of anchors: small enough to stay in cache and to waste few keys on the group's earlier anchors,
# large enough for efficient products. 1 MiB was fastest of 0.5 to 8 at 16, 64 and 256 anchors in 1,024 positions.
TILE_BYTES = 1 << 20

# attend(q, k, v, context_k, context_v) -> (batch, anchor, slot, head, head_dim), with
# q: (batch, anchor, slot, head, head_dim); k, v: (batch, anchor, slot, kv_head, head_dim);
# context_k, context_v: (batch, seq, kv_head, head_dim).
Attend = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocks:
    """Where blocks stand in their rows.

    Attributes:
        start: (batch, anchor) int64, the first position of the anchor's document.
        anchor: (batch, anchor) int64, the anchor's position; the context ends before it.
        exists: (batch, anchor) bool.
        size: slots of a block.
        window: a query at position t sees context positions > t - window only; its own block stays visible whole.
            None: no such limit.
    """

    start: Tensor
    anchor: Tensor
    exists: Tensor
    size: int
    window: int | None = None


def document_starts(document_ids: Tensor) -> Tensor:
    """The first position of each position's document. document_ids: (batch, seq) -> (batch, seq) int64."""
    positions = torch.arange(document_ids.shape[1], device=document_ids.device).expand_as(document_ids)
    opens = torch.ones_like(document_ids, dtype=torch.bool)
    opens[:, 1:] = document_ids[:, 1:] != document_ids[:, :-1]
    return torch.where(opens, positions, 0).cummax(dim=1).values


def sees_context(key: Tensor, slot: Tensor, start: Tensor, anchor: Tensor, window: int | None) -> Tensor:
    """Whether slot `slot` of the block at `anchor` sees the context at position `key`; arguments broadcast."""
    visible = (key >= start) & (key < anchor)
    return visible if window is None else visible & (key > anchor + slot - window)


def context_in_use(blocks: Blocks, seq: int) -> Tensor:
    """Whether any block sees the context at each position: (batch, seq) bool."""
    first = blocks.start
    if blocks.window is not None:
        first = torch.maximum(first, blocks.anchor - blocks.window + 1)
    opens = blocks.exists.long()
    edges = opens.new_zeros(len(opens), seq + 1).scatter_add_(1, first, opens).scatter_add_(1, blocks.anchor, -opens)
    return edges.cumsum(dim=1)[:, :seq] > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Neighbouring anchors of one document, which share one stretch of context keys.

    Attributes:
        row: the row of the batch.
        anchors: the slice of the anchor axis.
        keys: the slice of context positions that covers what any of them sees.
        hidden_keys: (anchor, slot or 1, key) float32, 0 where visible and -inf where not.
    """

    row: int
    anchors: slice
    keys: slice
    hidden_keys: Tensor


def group_blocks(blocks: Blocks, num_heads: int) -> list[Group]:
    """Groups neighbouring anchors of a document as long as their scores fit TILE_BYTES.

    Reads positions on the host.
    """
    window = blocks.window
    groups = []
    rows = zip(blocks.start.tolist(), blocks.anchor.tolist(), blocks.exists.tolist(), strict=True)
    for row, (starts, anchors, exists) in enumerate(rows):
        first = 0
        while first < len(anchors):
            if not exists[first]:
                first += 1
                continue
            last, low, high = first, anchors[first], anchors[first]
            while last < len(anchors) and exists[last] and starts[last] == starts[first]:
                seen_from = starts[last] if window is None else max(starts[last], anchors[last] - window + 1)
                new_low, new_high = min(low, seen_from), max(high, anchors[last])
                score_bytes = 4 * (last + 1 - first) * blocks.size * num_heads * (new_high - new_low + blocks.size)
                if last > first and score_bytes > TILE_BYTES:
                    break
                last, low, high = last + 1, new_low, new_high
            groups.append(_group(blocks, row, slice(first, last), slice(low, high)))
            first = last
    return groups


def _group(blocks: Blocks, row: int, anchors: slice, keys: slice) -> Group:
    device = blocks.anchor.device
    key = torch.arange(keys.start, keys.stop, device=device)
    slot = torch.arange(1 if blocks.window is None else blocks.size, device=device)[:, None]
    start, anchor = blocks.start[row, anchors, None, None], blocks.anchor[row, anchors, None, None]
    visible = sees_context(key, slot, start, anchor, blocks.window)
    hidden_keys = torch.zeros(visible.shape, device=device).masked_fill_(~visible, -torch.inf)
    return Group(row=row, anchors=anchors, keys=keys, hidden_keys=hidden_keys)


def grouped_attention(blocks: Blocks, num_heads: int) -> Attend:
    """Attention by groups of anchors: other blocks' keys and other documents' context are never formed."""
    return partial(_attend_by_group, group_blocks(blocks, num_heads))


@torch.compiler.disable
def _attend_by_group(
    groups: list[Group], q: Tensor, k: Tensor, v: Tensor, context_k: Tensor, context_v: Tensor
) -> Tensor:
    by_kv_head = q.unflatten(3, (k.shape[3], -1))
    return _GroupedAttention.apply(by_kv_head, k[..., None, :], v[..., None, :], context_k, context_v, groups).flatten(
        3, 4
    )


class _GroupedAttention(torch.autograd.Function):
    """One softmax over [context ; own block] for each group; backward computes the group's softmax again.

    q: (batch, anchor, slot, kv_head, share, head_dim), where `share` query heads read a key head; k, v the same with a
    share of 1; context_k, context_v: (batch, seq, kv_head, head_dim). Memory beyond inputs and outputs is one group's.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, context_k: Tensor, context_v: Tensor, groups: list[Group]
    ) -> Tensor:
        out = torch.zeros_like(q)
        for group in groups:
            num_keys = group.keys.stop - group.keys.start
            probs = _probs(group, _queries(group, q), _rows(group, k), _context(group, context_k))
            attended = probs[..., num_keys:] @ _rows(group, v)
            attended.flatten(1, 2).baddbmm_(probs[..., :num_keys].flatten(1, 2), _context(group, context_v))
            _put(group, out, attended)
        ctx.save_for_backward(q, k, v, context_k, context_v, out)
        ctx.groups = groups
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        q, k, v, context_k, context_v, out = ctx.saved_tensors
        grad_q, grad_k, grad_v = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        grad_context_k, grad_context_v = torch.zeros_like(context_k), torch.zeros_like(context_v)
        for group in ctx.groups:
            num_keys = group.keys.stop - group.keys.start
            queries, own_keys, context_keys = _queries(group, q), _rows(group, k), _context(group, context_k)
            probs = _probs(group, queries, own_keys, context_keys)
            grad = _rows(group, grads[0])
            _put(group, grad_v, probs[..., num_keys:].mT @ grad)
            _context(group, grad_context_v).baddbmm_(probs[..., :num_keys].flatten(1, 2).mT, grad.flatten(1, 2))

            # d softmax: probs * (d probs - sum(probs * d probs)), and that sum is d out . out.
            along = (grad.float() * _rows(group, out).float()).sum(-1, keepdim=True)
            grad_scores = _products(grad, _context(group, context_v), _rows(group, v)).sub_(along).mul_(probs)
            grad_scores = grad_scores.to(q.dtype)

            seen, own = grad_scores[..., :num_keys].flatten(1, 2), grad_scores[..., num_keys:]
            grad_queries = own @ own_keys
            grad_queries.flatten(1, 2).baddbmm_(seen, context_keys)
            _put(group, grad_q, grad_queries.mul_(q.shape[-1] ** -0.5))
            _put(group, grad_k, own.mT @ queries)
            _context(group, grad_context_k).baddbmm_(seen.mT, queries.flatten(1, 2))
        return grad_q, grad_k, grad_v, grad_context_k, grad_context_v, None


def _part(group: Group, x: Tensor) -> Tensor:
    """A group's part of (batch, anchor, slot, kv_head, share, head_dim): (kv_head, anchor, slot, share, head_dim)."""
    return x[group.row, group.anchors].permute(2, 0, 1, 3, 4)


def _rows(group: Group, x: Tensor) -> Tensor:
    """The same with the query heads of a key head as rows of its products: (kv_head, anchor, row, head_dim)."""
    return _part(group, x).flatten(2, 3)


def _queries(group: Group, q: Tensor) -> Tensor:
    return _rows(group, q) * q.shape[-1] ** -0.5


def _put(group: Group, x: Tensor, rows: Tensor) -> None:
    part = _part(group, x)
    part.copy_(rows.view(part.shape))


def _context(group: Group, x: Tensor) -> Tensor:
    """A group's stretch of (batch, seq, kv_head, head_dim): (kv_head, key, head_dim)."""
    return x[group.row, group.keys].transpose(0, 1)


def _products(rows: Tensor, context: Tensor, own: Tensor) -> Tensor:
    """Rows times [context ; own block]: (kv_head, anchor, row, key) float32."""
    num_keys = context.shape[1]
    out = rows.new_empty(*rows.shape[:3], num_keys + own.shape[2])
    torch.bmm(rows.flatten(1, 2), context.mT, out=out.flatten(1, 2)[..., :num_keys])
    out[..., num_keys:] = rows @ own.mT
    return out.float()


def _probs(group: Group, queries: Tensor, own_keys: Tensor, context_keys: Tensor) -> Tensor:
    """Softmax over [context ; own block]: (kv_head, anchor, row, key), in the queries' dtype."""
    scores = _products(queries, context_keys, own_keys)
    slots = group.hidden_keys.shape[1]  # 1 where all slots see the same
    scores[..., : context_keys.shape[1]].unflatten(2, (slots, -1)).add_(group.hidden_keys[:, :, None])
    return scores.softmax(dim=-1).to(queries.dtype)


def flex_block_attention(blocks: Blocks, seq: int) -> Attend:
    """The same attention as one FlexAttention call over keys [context ; all blocks], compiled on CUDA.

    Args:
        seq: length of the context.
    """
    return partial(_attend_by_flex, blocks, flex_block_mask(blocks, seq))


@cache
def _compiled_flex() -> Any:
    return torch.compile(flex_attention, dynamic=False)


def _attend_by_flex(
    blocks: Blocks, mask: BlockMask, q: Tensor, k: Tensor, v: Tensor, context_k: Tensor, context_v: Tensor
) -> Tensor:
    kernel = _compiled_flex() if q.is_cuda else flex_attention
    keys = torch.cat((context_k, k.flatten(1, 2)), dim=1)
    values = torch.cat((context_v, v.flatten(1, 2)), dim=1)
    out = kernel(
        q.flatten(1, 2).transpose(1, 2),
        keys.transpose(1, 2),
        values.transpose(1, 2),
        block_mask=mask,
        enable_gqa=q.shape[3] != k.shape[3],
    )
    out = out.transpose(1, 2).reshape(q.shape)
    return out.masked_fill(~blocks.exists[..., None, None, None], 0)


def flex_block_mask(blocks: Blocks, seq: int) -> BlockMask:
    """Which tiles of (query, key) FlexAttention visits, from two ranges of keys for each query; no dense grid.

    Queries are the blocks' slots in order; keys are the context, then the blocks' slots.
    """
    batch, num_anchors = blocks.anchor.shape
    num_queries, size = num_anchors * blocks.size, blocks.size
    slots = torch.arange(num_queries, device=blocks.anchor.device)
    owner = slots // size

    def sees(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        block, own = query // size, key - seq
        in_context = sees_context(key, query % size, blocks.start[row, block], blocks.anchor[row, block], blocks.window)
        return torch.where(own < 0, in_context & blocks.exists[row, block], own // size == block)

    # The context that a query may see, [low, high), empty where its block is invalid; then its own block's slots.
    low = torch.where(blocks.exists, blocks.start, seq)[:, owner]
    high = torch.where(blocks.exists, blocks.anchor, 0)[:, owner]
    own_low = (seq + owner * size).expand(batch, -1)
    needed = _tiles(low, high, seq + num_queries) | _tiles(own_low, own_low + size, seq + num_queries)
    return BlockMask.from_kv_blocks(
        needed.sum(-1, dtype=torch.int32)[:, None],
        needed.int().argsort(dim=-1, descending=True, stable=True).int()[:, None],
        BLOCK_SIZE=FLEX_TILE,
        mask_mod=sees,
        seq_lengths=(num_queries, seq + num_queries),
    )


def _tiles(low: Tensor, high: Tensor, num_keys: int) -> Tensor:
    """Tiles that any query of a tile reaches. low, high: (batch, query) -> (batch, query tile, key tile) bool."""
    padding = -low.shape[1] % FLEX_TILE
    low = F.pad(low, (0, padding), value=num_keys).unflatten(1, (-1, FLEX_TILE)).amin(-1, keepdim=True)
    high = F.pad(high, (0, padding), value=0).unflatten(1, (-1, FLEX_TILE)).amax(-1, keepdim=True)
    first = torch.arange(0, num_keys, FLEX_TILE, device=low.device)
    return (first < high) & (first + FLEX_TILE > low)
