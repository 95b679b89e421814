"""Layers that every drafter shares."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from draftsmith.models.layers import GatedLinear, RMSNorm, RotaryEmbedding
from draftsmith.models.target import Target, TargetConfig


def test_casting_a_drafter_leaves_its_rotary_frequencies_exact(target_path: Path) -> None:
    spec = Target.load(TargetConfig(path=str(target_path)), device="cpu").spec
    module = nn.ModuleList([RotaryEmbedding(spec), nn.Linear(2, 2)]).bfloat16()
    assert module[1].weight.dtype == torch.bfloat16
    assert module[0].inv_freq.dtype == torch.float32
    assert module[0].inv_freq.tolist() == list(spec.rope_inv_freq)
    cos, _ = module[0](torch.tensor([301]))
    assert torch.allclose(cos[0, :4], torch.cos(301 * torch.tensor(spec.rope_inv_freq)))


@pytest.mark.parametrize("plus_one", [False, True])
def test_the_norm_is_its_formula_in_values_and_gradients(plus_one: bool) -> None:
    norm = RMSNorm(6, 1e-3, plus_one).double()
    nn.init.normal_(norm.weight)
    x = torch.randn(2, 3, 6, dtype=torch.float64, requires_grad=True)
    scale = 1 + norm.weight if plus_one else norm.weight
    expected = x / (x.square().mean(-1, keepdim=True) + 1e-3).sqrt() * scale
    torch.testing.assert_close(norm(x), expected)
    weight = torch.randn_like(x)
    ours = torch.autograd.grad((norm(x) * weight).sum(), (x, norm.weight))
    theirs = torch.autograd.grad((expected * weight).sum(), (x, norm.weight))
    for own, reference in zip(ours, theirs, strict=True):
        torch.testing.assert_close(own, reference)
    assert torch.autograd.gradcheck(lambda rows: norm(rows), (x,))
    assert norm(torch.empty(0, 6, dtype=torch.float64)).shape == (0, 6)


def test_the_norm_is_taken_in_float32_whatever_the_input_type() -> None:
    norm = RMSNorm(64, 1e-6).bfloat16()
    x = (torch.randn(5, 64) * 3e4).bfloat16().requires_grad_()
    out = norm(x)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), nn.functional.rms_norm(x.float(), (64,), eps=1e-6), rtol=1e-2, atol=1e-2)
    out.sum().backward()
    assert x.grad is not None
    assert x.grad.dtype == torch.bfloat16
    assert x.grad.isfinite().all()


def test_the_gated_map_is_its_formula_in_values_and_gradients() -> None:
    down = GatedLinear(5, 3).double()
    inputs = [torch.randn(2, 4, 5, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    gate, up = inputs
    expected = (gate * torch.sigmoid(gate) * up) @ down.weight.T
    torch.testing.assert_close(down(gate, up), expected)
    weight = torch.randn_like(expected)
    ours = torch.autograd.grad((down(gate, up) * weight).sum(), (gate, up, down.weight))
    theirs = torch.autograd.grad((expected * weight).sum(), (gate, up, down.weight))
    for own, reference in zip(ours, theirs, strict=True):
        torch.testing.assert_close(own, reference)
