"""Block attention against loops over elements: values, gradients, and what is visible."""

from __future__ import annotations

import random

import pytest
import torch
from references import block_attention, block_sees
from torch import Tensor

from draftsmith.models import block_attention as module
from draftsmith.models.block_attention import (
    Blocks,
    context_in_use,
    document_starts,
    flex_block_attention,
    flex_block_mask,
    group_blocks,
    grouped_attention,
    sees_context,
)

HEADS, KV_HEADS, HEAD_DIM = 4, 2, 8


def make_blocks(documents: list[list[int]], anchors: list[list[int]], exists, size: int, window=None) -> Blocks:
    anchor = torch.tensor(anchors)
    start = document_starts(torch.tensor(documents)).gather(1, anchor)
    return Blocks(start=start, anchor=anchor, exists=torch.tensor(exists), size=size, window=window)


def make_inputs(blocks: Blocks, seq: int, dtype=torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    batch, anchors = blocks.anchor.shape
    shapes = [(batch, anchors, blocks.size, HEADS, HEAD_DIM)]
    shapes += [(batch, anchors, blocks.size, KV_HEADS, HEAD_DIM)] * 2
    shapes += [(batch, seq, KV_HEADS, HEAD_DIM)] * 2
    return [torch.randn(shape, generator=generator, dtype=dtype).requires_grad_() for shape in shapes]


CASES = {
    "single block": ([[0] * 12], [[5]], [[True]], 4, None),
    "many blocks": ([[0] * 24], [[4, 6, 7, 15]], [[True] * 4], 8, None),
    "anchor 1": ([[0] * 6], [[1]], [[True]], 3, None),
    "last legal anchor": ([[0] * 6], [[4]], [[True]], 5, None),
    "consecutive anchors": ([[0] * 10], [[3, 4, 5, 6]], [[True] * 4], 3, None),
    "invalid blocks": ([[0] * 10, [1] * 10], [[3, 0, 5], [0, 0, 0]], [[True, False, True], [False] * 3], 3, None),
    "packed documents": ([[3] * 5 + [9] * 4 + [1] * 6 + [-1] * 2], [[2, 6, 7, 10, 13]], [[True] * 5], 4, None),
    "windowed": ([[0] * 5 + [1] * 9], [[3, 8, 11, 12]], [[True] * 4], 4, 4),
    "no order": ([[0] * 8 + [1] * 8], [[12, 3, 9, 6]], [[True] * 4], 3, None),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("tile_bytes", [1, 8 << 20])
def test_values_and_gradients_equal_element_loops(case, tile_bytes, monkeypatch):
    monkeypatch.setattr(module, "TILE_BYTES", tile_bytes)
    documents, anchors, exists, size, window = CASES[case]
    inputs = make_inputs(make_blocks(documents, anchors, exists, size, window), len(documents[0]))
    out = grouped_attention(make_blocks(documents, anchors, exists, size, window), HEADS)(*inputs)
    expected = block_attention(*inputs, anchors=anchors, exists=exists, documents=documents, window=window)
    torch.testing.assert_close(out, expected, rtol=1e-6, atol=1e-6)
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=out.dtype)
    gradients = torch.autograd.grad((out * weight).sum(), inputs)
    for own, reference in zip(gradients, torch.autograd.grad((expected * weight).sum(), inputs), strict=True):
        torch.testing.assert_close(own, reference, rtol=1e-6, atol=1e-6)


def test_random_rows_equal_element_loops():
    draw = random.Random(0)
    for _ in range(6):
        documents = []
        for row in range(2):
            row_documents = [i for i in range(4) for _ in range(draw.randint(2, 6))]
            documents.append([100 * row + d for d in row_documents] + [-1] * (24 - len(row_documents)))
        anchors = [sorted(draw.sample(range(1, 24), 4)) for _ in range(2)]
        exists = [[documents[b][a] >= 0 for a in anchors[b]] for b in range(2)]
        size, window = draw.randint(2, 5), draw.choice([None, 1, 3])
        blocks = make_blocks(documents, anchors, exists, size, window)
        inputs = make_inputs(blocks, 24)
        expected = block_attention(*inputs, anchors=anchors, exists=exists, documents=documents, window=window)
        torch.testing.assert_close(grouped_attention(blocks, HEADS)(*inputs), expected, rtol=1e-6, atol=1e-6)


def test_the_window_slides_with_the_slot():
    key, slot = torch.arange(12), torch.arange(4)[:, None]
    visible = sees_context(key, slot, torch.tensor(0), torch.tensor(6), 4)
    assert [row.nonzero().flatten().tolist() for row in visible] == [[3, 4, 5], [4, 5], [5], []]
    for s in range(4):
        expected = [block_sees(s, None, k, anchor=6, window=4, documents=[0] * 12) for k in range(12)]
        assert visible[s].tolist() == expected


@pytest.mark.parametrize("case", CASES)
def test_the_context_in_use_is_what_any_block_sees(case):
    documents, anchors, exists, size, window = CASES[case]
    used = context_in_use(make_blocks(documents, anchors, exists, size, window), len(documents[0]))
    for row, row_documents in enumerate(documents):
        for key in range(len(row_documents)):
            seen = any(
                block_sees(slot, None, key, anchor=a, window=window, documents=row_documents)
                for a, there in zip(anchors[row], exists[row], strict=True)
                for slot in range(size)
                if there
            )
            assert bool(used[row, key]) == seen


def test_a_group_forms_only_its_own_documents_context():
    documents = [[0] * 100 + [1] * 50]
    blocks = make_blocks(documents, [[10, 20, 130, 140]], [[True, True, True, False]], 4)
    groups = group_blocks(blocks, HEADS)
    assert [(g.anchors, g.keys) for g in groups] == [(slice(0, 2), slice(0, 20)), (slice(2, 3), slice(100, 130))]


def test_scores_of_a_group_stay_within_the_tile(monkeypatch):
    monkeypatch.setattr(module, "TILE_BYTES", 1 << 16)
    blocks = make_blocks([[0] * 400], [list(range(1, 399))], [[True] * 398], 8)
    groups = group_blocks(blocks, HEADS)
    assert [a for g in groups for a in range(g.anchors.start, g.anchors.stop)] == list(range(398))
    sizes = [4 * (g.anchors.stop - g.anchors.start) * 8 * HEADS * (g.keys.stop - g.keys.start + 8) for g in groups]
    assert max(sizes) <= 1 << 16


def test_no_block_at_all_gives_zeros_and_zero_gradients():
    blocks = make_blocks([[0] * 6], [[0, 0]], [[False, False]], 3)
    inputs = make_inputs(blocks, 0)
    out = grouped_attention(blocks, HEADS)(*inputs)
    assert out.eq(0).all()
    assert all(g.eq(0).all() for g in torch.autograd.grad(out.sum(), inputs))


def test_bfloat16_is_close_to_float64():
    blocks = make_blocks([[0] * 24], [[4, 6, 7, 15]], [[True] * 4], 8)
    exact = make_inputs(blocks, 24)
    rough = [x.detach().bfloat16().requires_grad_() for x in exact]
    attend = grouped_attention(blocks, HEADS)
    out, expected = attend(*rough), attend(*exact)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.double(), expected, rtol=0.03, atol=0.03)
    for own, reference in zip(
        torch.autograd.grad(out.sum(), rough), torch.autograd.grad(expected.sum(), exact), strict=True
    ):
        torch.testing.assert_close(own.double(), reference, rtol=0.05, atol=0.05 * float(reference.abs().max()))


@pytest.mark.parametrize("case", ["many blocks", "invalid blocks", "packed documents", "windowed"])
def test_flex_attention_equals_grouped_attention(case):
    """FlexAttention uncompiled, which the CPU has forward only: the same predicate, the same values."""
    documents, anchors, exists, size, window = CASES[case]
    blocks = make_blocks(documents, anchors, exists, size, window)
    inputs = [x.detach() for x in make_inputs(blocks, len(documents[0]))]
    out = flex_block_attention(blocks, len(documents[0]))(*inputs)
    torch.testing.assert_close(out, grouped_attention(blocks, HEADS)(*inputs), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("size", [7, 8, 16])
@pytest.mark.parametrize("window", [None, 50])
def test_the_block_mask_visits_the_tiles_that_hold_something_visible_and_few_others(size, window):
    lengths, seq = [300, 200, 100], 700
    documents = [[i for i, n in enumerate(lengths) for _ in range(n)] + [-1] * 100] * 2
    draw = random.Random(0)
    anchors = [sorted(draw.sample(range(1, 600), 40)) for _ in range(2)]
    exists = [[True] * 40, [True] * 30 + [False] * 10]
    blocks = make_blocks(documents, anchors, exists, size, window)
    mask = flex_block_mask(blocks, seq)
    num_queries = 40 * size
    visited = mask.to_dense()[:, 0].bool()
    q, k = torch.arange(num_queries), torch.arange(seq + num_queries)
    for row in range(2):
        visible = mask.mask_mod(torch.tensor(row), torch.tensor(0), q[:, None], k[None])
        padded = torch.zeros(128 * visited.shape[1], 128 * visited.shape[2], dtype=torch.bool)
        padded[:num_queries, : seq + num_queries] = visible
        needed = padded.unflatten(1, (-1, 128)).any(-1).unflatten(0, (-1, 128)).any(1)
        assert (visited[row] | ~needed).all()
        assert int(visited[row].sum()) <= 1.7 * int(needed.sum()) + visited.shape[1]


@pytest.mark.slow
@pytest.mark.parametrize("window", [None, 50])
def test_flex_attention_compiled_for_the_cpu_visits_what_the_block_mask_says(window, monkeypatch):
    """The compiled kernel skips the tiles that the mask leaves out; the CPU has it forward only."""
    monkeypatch.setattr(module, "flex_attention", torch.compile(module.flex_attention, dynamic=False))
    documents = [[i for i, n in enumerate([300, 200, 100]) for _ in range(n)] + [-1] * 40] * 2
    draw = random.Random(0)
    anchors = [sorted(draw.sample(range(1, 600), 37)) for _ in range(2)]
    blocks = make_blocks(documents, anchors, [[True] * 37, [True] * 30 + [False] * 7], 8, window)
    shapes = [(2, 37, 8, 4, 64), (2, 37, 8, 2, 64), (2, 37, 8, 2, 64), (2, 640, 2, 64), (2, 640, 2, 64)]
    inputs = [torch.randn(shape) for shape in shapes]
    out, expected = flex_block_attention(blocks, 640)(*inputs), grouped_attention(blocks, 4)(*inputs)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 50])
def test_compiled_flex_attention_equals_grouped_attention_on_cuda(window):
    documents = [[i for i, n in enumerate([300, 200, 100]) for _ in range(n)] + [-1] * 40] * 2
    draw = random.Random(0)
    anchors = [sorted(draw.sample(range(1, 600), 40)) for _ in range(2)]
    blocks = make_blocks(documents, anchors, [[True] * 40, [True] * 30 + [False] * 10], 8, window)
    shapes = [(2, 40, 8, 8, 64), (2, 40, 8, 2, 64), (2, 40, 8, 2, 64), (2, 640, 2, 64), (2, 640, 2, 64)]
    generator = torch.Generator().manual_seed(0)
    exact = [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]
    on_device = [x.detach().cuda().requires_grad_() for x in exact]
    moved = Blocks(
        start=blocks.start.cuda(), anchor=blocks.anchor.cuda(), exists=blocks.exists.cuda(), size=8, window=window
    )
    out, expected = flex_block_attention(moved, 640)(*on_device), grouped_attention(blocks, 8)(*exact)
    torch.testing.assert_close(out.cpu(), expected, rtol=1e-2, atol=1e-2)  # TF32 products
    for own, reference in zip(
        torch.autograd.grad(out.square().sum(), on_device),
        torch.autograd.grad(expected.square().sum(), exact),
        strict=True,
    ):
        torch.testing.assert_close(own.cpu(), reference, rtol=2e-2, atol=2e-2 * float(reference.abs().max()))
