"""The mixture of experts against a loop over tokens and experts, and its routing by hand."""

from __future__ import annotations

import pytest
import torch
from references import moe_loop

from draftsmith.models.moe import MoE, MoEConfig, Router, load_balance


def build(hidden=16, **settings):
    torch.manual_seed(0)
    sizes = {"num_experts": 6, "experts_per_token": 2, "expert_intermediate_size": 8, "shared_intermediate_size": 8}
    moe = MoE(hidden, MoEConfig(**{**sizes, **settings}))
    with torch.no_grad():
        for tensor in [*moe.parameters(), *moe.buffers()]:
            tensor.normal_(std=0.5)
    return moe


@pytest.mark.parametrize(
    "settings",
    [
        {"scaling": 2.826},
        {"scores": "softmax", "shared_expert_gate": True},
        {"experts_per_token": 6},
        {"shared_intermediate_size": 0},
    ],
)
@pytest.mark.parametrize("num_tokens", [0, 1, 37])
def test_equals_the_expert_loop(settings, num_tokens):
    moe, x = build(**settings), torch.randn(num_tokens, 16, requires_grad=True)
    ours = moe(x)
    assert ours.shape == x.shape
    if num_tokens == 0:
        ours.sum().backward()
        assert all(weight.grad is not None and not weight.grad.any() for weight in moe.parameters())
        return
    oracle = moe_loop(moe, x)
    torch.testing.assert_close(ours, oracle, rtol=1e-4, atol=1e-5)
    upstream, inputs = torch.randn_like(ours), [x, *moe.parameters()]
    mine = torch.autograd.grad(ours, inputs, upstream)
    theirs = torch.autograd.grad(oracle, inputs, upstream)
    torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-4)


def test_an_expert_that_nobody_chose_gets_no_gradient():
    moe = build(experts_per_token=1)
    moe.router.expert_bias[3] = -100
    moe(torch.randn(9, 16)).square().sum().backward()
    assert not moe.experts.gate_up_proj.grad[3].any()
    assert not moe.experts.down_proj.grad[3].any()


def test_bias_chooses_but_does_not_weigh():
    """Scores .5, .6, .7 with biases .3, 0, 0 and k = 2: experts 0 and 2, weights .5 / 1.2 and .7 / 1.2, times 2."""
    router = Router(1, MoEConfig(num_experts=3, experts_per_token=2, scaling=2.0))
    scores = torch.tensor([0.5, 0.6, 0.7])
    router.weight.data = torch.logit(scores)[:, None]
    router.expert_bias[:] = torch.tensor([0.3, 0.0, 0.0])
    weights, experts = router(torch.ones(1, 1))
    assert experts.tolist() == [[0, 2]]
    torch.testing.assert_close(weights, torch.tensor([[0.5, 0.7]]) / 1.2 * 2)


def test_scaling_touches_the_routed_part_only():
    x = torch.randn(5, 16)
    plain, scaled = build(), build(scaling=3.0)
    shared = plain.shared_expert(x)
    torch.testing.assert_close(scaled(x) - shared, 3 * (plain(x) - shared), rtol=1e-4, atol=1e-5)


def test_routing_runs_in_float32_whatever_the_training_type():
    moe = build().to(torch.bfloat16)
    x = torch.randn(7, 16, dtype=torch.bfloat16)
    weights, _ = moe.router(x)
    assert weights.dtype == torch.float32
    torch.testing.assert_close(weights.sum(-1), torch.ones(7), rtol=1e-5, atol=1e-6)
    out = moe(x)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), moe_loop(moe.float(), x.float()), rtol=0.05, atol=0.05)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"scores": "relu"}, "sigmoid, softmax"),
        ({"experts_per_token": 7}, "experts_per_token is 7; it must be in 1..6"),
        ({"shared_intermediate_size": 0, "shared_expert_gate": True}, "needs a shared expert"),
    ],
)
def test_bad_settings_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        build(**settings)


@pytest.mark.parametrize(
    ("load", "largest", "unused"),
    [([6, 2, 0, 0], 3.0, 2), ([5, 5, 5, 5], 1.0, 0), ([0, 0, 0, 9], 4.0, 3), ([0, 0], 0.0, 2)],
)
def test_load_balance_by_hand(load, largest, unused):
    assert load_balance(torch.tensor(load)) == {"expert_max_load": pytest.approx(largest), "experts_unused": unused}


def test_load_counts_the_choices_of_the_last_call():
    moe = build()
    moe(torch.randn(50, 16))
    x = torch.randn(9, 16)
    moe(x)
    _, experts = moe.router(x)
    assert moe.experts.load.tolist() == [int((experts == e).sum()) for e in range(6)]
