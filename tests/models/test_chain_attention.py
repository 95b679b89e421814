"""Merged attention of chains equals one explicit softmax, values and gradients."""

from __future__ import annotations

import pytest
import torch
from references import chain_attention_loop
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from draftsmith.models import chain_attention as module
from draftsmith.models.chain_attention import chain_attention, flex_chain_attention


def inputs(rows, positions, entries, *, heads=4, kv_heads=2, head_dim=8, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=dtype).requires_grad_()

    last = torch.randint(0, positions, (rows,), generator=generator).sort().values
    first = (last.float() * torch.rand(rows, generator=generator)).long()
    tensors = [draw(rows, heads, head_dim), draw(positions, kv_heads, head_dim), draw(positions, kv_heads, head_dim)]
    tensors += [draw(rows, entries, kv_heads, head_dim), draw(rows, entries, kv_heads, head_dim)]
    return tensors, first, last


@pytest.mark.parametrize("entries", [0, 1, 3])
@pytest.mark.parametrize(("tile_rows", "tile_bytes"), [(128, 4 << 20), (16, 16 * 4 * 8 * 7), (3, 1)])
def test_equals_one_softmax(tile_rows, tile_bytes, entries, monkeypatch):
    """Whatever the tiles: all in one, several in both directions, single positions."""
    monkeypatch.setattr(module, "TILE_ROWS", tile_rows)
    monkeypatch.setattr(module, "TILE_BYTES", tile_bytes)
    tensors, first, last = inputs(40, 30, entries)
    ours = chain_attention(*tensors, first, last)
    oracle = chain_attention_loop(*tensors, first, last)
    torch.testing.assert_close(ours, oracle, rtol=0, atol=1e-12)

    upstream = torch.randn_like(ours)
    mine = torch.autograd.grad(ours, tensors, upstream)
    theirs = torch.autograd.grad(oracle, tensors, upstream)
    torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12)


def test_gradcheck():
    tensors, first, last = inputs(3, 5, 2, heads=2, kv_heads=1, head_dim=3)
    assert torch.autograd.gradcheck(lambda *t: chain_attention(*t, first, last), tensors)


def test_row_order_changes_nothing():
    tensors, first, last = inputs(50, 30, 2)
    order = torch.randperm(50)
    query, key, value, own_key, own_value = tensors
    shuffled = chain_attention(query[order], key, value, own_key[order], own_value[order], first[order], last[order])
    torch.testing.assert_close(shuffled, chain_attention(*tensors, first, last)[order], rtol=0, atol=1e-12)


def test_unseen_positions_change_nothing():
    """What no row sees may be anything, and gets no gradient."""
    tensors, first, last = inputs(8, 30, 1)
    first, last = first.clamp(min=10), last.clamp(min=10, max=20)
    before = chain_attention(*tensors, first, last)
    for tensor in tensors[1:3]:
        tensor.data[:10] = 1e6
        tensor.data[21:] = -1e6
    after = chain_attention(*tensors, first, last)
    assert torch.equal(before, after)
    after.sum().backward()
    assert not tensors[2].grad[:10].any()
    assert not tensors[2].grad[21:].any()


def test_large_logits_stay_finite():
    tensors, first, last = inputs(6, 12, 2, dtype=torch.float32)
    loud = [tensors[0].detach() * 100, *tensors[1:]]
    out = chain_attention(*loud, first, last)
    assert out.isfinite().all()
    torch.testing.assert_close(out, chain_attention_loop(*loud, first, last), rtol=1e-4, atol=1e-5)


def test_bfloat16_is_close_to_float64():
    tensors, first, last = inputs(20, 30, 2, dtype=torch.bfloat16)
    out = chain_attention(*tensors, first, last)
    assert out.dtype == torch.bfloat16
    oracle = chain_attention_loop(*(t.double() for t in tensors), first, last)
    torch.testing.assert_close(out.double(), oracle, rtol=0.03, atol=0.03)


@pytest.mark.parametrize("entries", [0, 2])
def test_flex_attention_gives_the_same(entries, monkeypatch):
    """The CUDA path, uncompiled: its mask and its merge through the log-sum-exp."""
    monkeypatch.setattr(module, "compiled_flex_attention", flex_attention)
    monkeypatch.setattr(module, "compiled_block_mask", create_block_mask)
    tensors, first, last = inputs(20, 30, entries, dtype=torch.float32)
    frozen = [t.detach() for t in tensors]
    flex = flex_chain_attention(*frozen, first, last)
    torch.testing.assert_close(flex, chain_attention(*frozen, first, last), rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("entries", [0, 2])
def test_flex_attention_gradients_on_cuda(entries):
    tensors, first, last = inputs(300, 400, entries, head_dim=16, dtype=torch.float32)
    on_gpu = [t.detach().cuda().requires_grad_() for t in tensors]
    ours = chain_attention(*on_gpu, first.cuda(), last.cuda())
    chunked = chain_attention(*tensors, first, last)
    torch.testing.assert_close(ours.cpu(), chunked, rtol=2e-3, atol=2e-3)
    ours.square().sum().backward()
    chunked.square().sum().backward()
    for mine, theirs in zip(on_gpu, tensors, strict=True):
        torch.testing.assert_close(mine.grad.cpu(), theirs.grad, rtol=5e-3, atol=5e-3)
