"""Terms: sums over valid entries only, position weights outside the denominator, refusals of what would be ignored."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch

from draftsmith.models.head import TokenStats
from draftsmith.train.objectives import dpace_weights, e2e_tv
from draftsmith.train.terms import OBJECTIVES, TermConfig


def half_ce(stats, valid):
    return 0.5 * stats.ce


def chain_ce(stats, valid):
    return torch.where(valid, stats.ce, 0).sum(-1)


def wrong_signature(stats, mask):
    return stats.ce


def wrong_shape(stats, valid):
    return stats.ce.sum()


def grid(seed=0):
    """Statistics of 3 x 4 chains of 5 steps and their validity: prefixes, some empty."""
    torch.manual_seed(seed)
    shape = (3, 4, 5)
    valid = (torch.rand(shape) < 0.85).cumprod(-1).bool()
    values = {name: torch.rand(shape).requires_grad_() for name in ("ce", "target_ce", "kl", "reverse_kl", "tv", "lk")}
    stats = TokenStats(
        **values,
        log_acceptance=(-torch.rand(shape)).requires_grad_(),
        confidence_logit=torch.randn(shape).requires_grad_(),
        acceptance=torch.rand(shape),
        label_prob=torch.rand(shape),
    )
    return stats, valid


def gradients(term, stats, valid):
    inputs = (stats.ce, stats.target_ce, stats.kl, stats.reverse_kl, stats.tv, stats.lk)
    inputs += (stats.log_acceptance, stats.confidence_logit)
    total = term(stats, valid)
    return total, torch.autograd.grad(total, inputs, allow_unused=True)


CONFIGS = [TermConfig(objective=name) for name in OBJECTIVES] + [
    TermConfig(objective="lk", position="dpace"),
    TermConfig(objective="ce", position="exponential", decay=4.0),
    TermConfig(objective="kl", position="geometric", beta=0.8),
]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.name)
def test_invalid_entries_are_never_read(config):
    stats, valid = grid()
    term = config.build()
    poisoned = stats.map(lambda x, _: torch.where(valid, x.detach(), torch.nan).requires_grad_(x.requires_grad))
    total, clean = gradients(term, stats, valid)
    poisoned_total, poisoned_gradients = gradients(term, poisoned, valid)
    assert torch.equal(total, poisoned_total)
    for a, b in zip(clean, poisoned_gradients, strict=True):
        assert (a is None) == (b is None)
        assert a is None or torch.equal(a, b)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.name)
def test_nothing_valid_is_zero_with_zero_gradients(config):
    stats, valid = grid()
    total, found = gradients(config.build(), stats, torch.zeros_like(valid))
    assert total.item() == 0
    assert any(gradient is not None for gradient in found)
    assert all((gradient == 0).all() for gradient in found if gradient is not None)


def test_a_slot_term_sums_over_slots_and_a_chain_term_over_chains():
    stats, valid = grid()
    assert TermConfig(objective="ce").build()(stats, valid).item() == pytest.approx(stats.ce[valid].sum().item())
    loss, chain_valid = e2e_tv(stats.tv, valid)
    term = TermConfig(objective="e2e_tv").build()
    assert term.unit == "chain"
    assert term(stats, valid).item() == pytest.approx(loss[chain_valid].sum().item())


def test_position_weights_multiply_and_are_measured():
    stats, valid = grid()
    term = TermConfig(objective="lk", position="dpace", rho=0.3).build()
    weights = dpace_weights(stats.label_prob, valid, 0.3)
    assert term(stats, valid).item() == pytest.approx((weights * stats.lk)[valid].sum().item(), rel=1e-5)
    mean = term.mean_position_weight(stats, valid)
    assert mean.value == pytest.approx(weights[valid].mean().item(), rel=1e-5)
    assert TermConfig(objective="lk").build().mean_position_weight(stats, valid).value == 1


def test_per_step_sums_pool_with_their_own_counts():
    """Length 6, three depths, constant loss 1: counts 4, 3, 2; the pooled mean is 1 and depth weights pool by count."""
    valid = torch.tensor([[True, True, True], [True, True, True], [True, True, False], [True, False, False]])
    stats = TokenStats(ce=torch.ones(4, 3))
    assert valid.sum(0).tolist() == [4, 3, 2]
    assert TermConfig(objective="ce").build()(stats, valid) / valid.sum() == 1
    weighted = TermConfig(objective="ce", position="geometric", beta=0.5).build()
    assert (weighted(stats, valid) / valid.sum()).item() == pytest.approx((4 + 3 * 0.5 + 2 * 0.25) / 9)


def test_your_own_function_by_dotted_path():
    stats, valid = grid()
    own = TermConfig(objective=f"{__name__}.half_ce", want=["ce"], unit="slot")
    assert own.build().label == "half_ce"
    assert own.build()(stats, valid).item() == pytest.approx(0.5 * stats.ce[valid].sum().item())
    chain = TermConfig(objective=f"{__name__}.chain_ce", want=["ce"], unit="chain").build()
    assert chain(stats, valid).item() == pytest.approx(stats.ce[valid].sum().item(), rel=1e-5)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (TermConfig(objective="lkk"), "objective=lkk: choose one of ce, target_ce, kl"),
        (TermConfig(objective="nowhere.loss"), "No module named 'nowhere'; is its folder on PYTHONPATH?"),
        (TermConfig(objective=f"{__name__}.nothing"), "has no function nothing"),
        (
            TermConfig(objective=f"{__name__}.wrong_signature"),
            "(stats, mask): an objective takes exactly (stats, valid)",
        ),
        (TermConfig(objective=f"{__name__}.half_ce", unit="slot"), "want=None; list the statistics"),
        (TermConfig(objective=f"{__name__}.half_ce", want=["cee"], unit="slot"), "want=['cee']; list the statistics"),
        (TermConfig(objective=f"{__name__}.half_ce", want=["ce"]), "unit=None; say slot"),
        (TermConfig(objective="ce", want=["ce"]), "want and unit are for your own functions"),
        (TermConfig(objective="ce", position="linear"), "position=linear; choose one of uniform, exponential"),
        (TermConfig(objective="ce", position="exponential"), "needs decay above 0, not None"),
        (TermConfig(objective="ce", position="geometric", beta=1.5), "needs beta above 0 and at most 1, not 1.5"),
        (TermConfig(objective="ce", position="dpace", rho=0.0), "needs rho above 0 and at most 1, not 0.0"),
        (TermConfig(objective="ce", rho=0.5), "rho=0.5 would be ignored with position=uniform"),
        (TermConfig(objective="ce", position="dpace", decay=4.0), "decay=4.0 would be ignored with position=dpace"),
        (TermConfig(objective="e2e_tv", position="dpace"), "position=dpace would be ignored, e2e_tv has one value"),
    ],
)
def test_refusals(config, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        config.build()


def test_refusals_while_running():
    stats, valid = grid()
    with pytest.raises(ValueError, match=r"wrong_shape gave a loss of shape \(\); a slot objective gives \(3, 4, 5\)"):
        TermConfig(objective=f"{__name__}.wrong_shape", want=["ce"], unit="slot").build()(stats, valid)
    with pytest.raises(ValueError, match=r"confidence_logit was not computed.*a drafter with a confidence head"):
        TermConfig(objective="confidence").build()(replace(stats, confidence_logit=None), valid)
