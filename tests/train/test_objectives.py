"""Objectives against known answers and loops; nothing invalid is ever read."""

from __future__ import annotations

import pytest
import torch
from references import dpace_loop, e2e_tv_loop

from draftsmith.models.head import TokenStats
from draftsmith.train.objectives import (
    Ratio,
    by_domain,
    calibration,
    decay_weights,
    dpace_weights,
    e2e_tv,
    e2e_tv_weights,
    expected_calibration_error,
    geometric_weights,
    lk_alpha,
    lk_hybrid,
    proxies,
)

CHAINS = [
    # alpha, expected accepted, loss, -dL/dalpha
    ([0.9, 0.5, 0.2], 1.44, 0.52, [0.533333, 0.36, 0.15]),
    ([0.8] * 4, 2.3616, 0.4096, [0.738, 0.488, 0.288, 0.128]),
    ([0.9, 0.0, 0.9], 0.9, 0.7, [0.333333, 0.57, 0.0]),
]


def all_valid(values):
    return torch.ones(values.shape, dtype=torch.bool)


def random_grid(seed=0):
    """tv, label probabilities and validity of 40 chains of 5 steps, some with holes, some empty."""
    torch.manual_seed(seed)
    return torch.rand(40, 5).double(), torch.rand(40, 5).double(), torch.rand(40, 5) < 0.8


@pytest.mark.parametrize(("alpha", "expected", "loss", "slope"), CHAINS)
def test_e2e_tv_known_answers(alpha, expected, loss, slope):
    tv = 1 - torch.tensor(alpha, requires_grad=True)
    tv.retain_grad()
    value, chain_valid = e2e_tv(tv, all_valid(tv))
    assert value.item() == pytest.approx(loss, abs=1e-6)
    assert bool(chain_valid)
    value.backward()
    assert tv.grad.tolist() == pytest.approx(slope, abs=1e-6)
    assert e2e_tv_weights(tv, all_valid(tv)).tolist() == pytest.approx(slope, abs=1e-6)


def test_e2e_tv_is_cut_at_the_first_hole():
    tv = 1 - torch.tensor([0.9, 0.5, 0.2])
    value, _ = e2e_tv(tv, torch.tensor([True, False, True]))
    assert value.item() == pytest.approx(0.10)


def test_e2e_tv_equals_the_loop():
    tv, _, valid = random_grid()
    tv[3, 1] = 1.0  # an alpha of 0 in the middle
    tv.requires_grad_()
    loss, chain_valid = e2e_tv(tv, valid)
    slow = e2e_tv_loop(tv, valid)
    assert chain_valid.tolist() == [value is not None for value in slow]
    for fast, value in zip(loss, slow, strict=True):
        assert fast.item() == pytest.approx(0.0 if value is None else value.item())
    (fast_gradient,) = torch.autograd.grad(loss.sum(), tv)
    (slow_gradient,) = torch.autograd.grad(sum(value for value in slow if value is not None), tv)
    torch.testing.assert_close(fast_gradient, slow_gradient)
    torch.testing.assert_close(e2e_tv_weights(tv, valid), slow_gradient)


def test_e2e_tv_gradcheck():
    tv, _, valid = random_grid()
    tv = tv[:6].requires_grad_()
    assert torch.autograd.gradcheck(lambda x: e2e_tv(x, valid[:6])[0], (tv,))


def test_dpace_known_answers():
    two, four = torch.tensor([0.8, 0.5]), torch.tensor([0.9, 0.6, 0.3, 0.8])
    assert dpace_weights(two, all_valid(two), 0.5).tolist() == pytest.approx([1.575, 0.675])
    expected = [2.6486, 1.6986, 0.9386, 0.4446]
    assert dpace_weights(four, all_valid(four), 0.5).tolist() == pytest.approx(expected, abs=1e-4)
    perfect = torch.ones(7)
    assert dpace_weights(perfect, all_valid(perfect), 0.5).mean().item() == 4


def test_dpace_equals_the_loop_and_reads_nothing_after_a_hole():
    _, prob, valid = random_grid()
    weights = dpace_weights(prob.requires_grad_(), valid, 0.3)
    assert not weights.requires_grad
    torch.testing.assert_close(weights, dpace_loop(prob.detach(), valid, 0.3))
    torch.testing.assert_close(dpace_weights(torch.where(valid, prob, torch.nan), valid, 0.3), weights)


def test_step_weights():
    assert decay_weights(3, 7).tolist() == pytest.approx([1.0, 0.8668779, 0.7514773])
    assert geometric_weights(3, 0.8).tolist() == pytest.approx([1.0, 0.8, 0.64])


def test_lk_definitions():
    kl, tv = torch.tensor([0.274887, 0.021601]), torch.tensor([0.3, 0.1], requires_grad=True)
    loss = lk_hybrid(kl, tv, 3.0)
    assert loss.tolist() == pytest.approx([0.296925, 0.094731], abs=1e-6)
    (gradient,) = torch.autograd.grad(loss.sum(), tv)
    assert gradient.tolist() == pytest.approx([1 - 0.122456, 1 - 0.067206], abs=1e-6)
    assert lk_alpha(torch.tensor(-0.356675)).item() == pytest.approx(0.356675)


def test_a_ratio_is_two_sums():
    one = Ratio(numerator=torch.tensor(10.0), denominator=torch.tensor(1))
    nine = Ratio(numerator=torch.tensor(9.0), denominator=torch.tensor(9))
    assert (one + nine).value == pytest.approx(1.9)
    assert Ratio(numerator=torch.tensor(0.0), denominator=torch.tensor(0)).value is None


def grid_stats(alpha, draft=None, target=None, confidence=None):
    zeros = torch.zeros_like(alpha, dtype=torch.int64)
    return TokenStats(
        acceptance=alpha,
        draft_token=zeros if draft is None else draft,
        target_token=zeros if target is None else target,
        confidence=alpha if confidence is None else confidence,
    )


def test_proxies_known_answers():
    alpha = torch.tensor([[0.9, 0.8, 0.5]])
    found = proxies(grid_stats(alpha), all_valid(alpha))
    assert found["teacher_forced/expected_accepted"].value == pytest.approx(1.98)
    assert found["teacher_forced/cumulative_2"].value == pytest.approx(0.72)
    assert found["teacher_forced/conditional_3"].value == pytest.approx(0.5)
    assert all(name.startswith("teacher_forced/") for name in found)


def test_proxies_over_chains_are_means_of_products():
    alpha = torch.tensor([[1.0, 1.0], [0.0, 0.5], [0.5, torch.nan], [torch.nan, torch.nan]])
    draft = torch.tensor([[1, 2], [3, 4], [5, 0], [0, 0]])
    target = torch.tensor([[1, 2], [9, 4], [5, 0], [0, 0]])
    valid = torch.tensor([[True, True], [True, True], [True, False], [False, False]])
    found = {name: ratio.value for name, ratio in proxies(grid_stats(alpha, draft, target), valid).items()}
    assert found["teacher_forced/expected_accepted"] == pytest.approx((2 + 0 + 0.5) / 3)
    assert found["teacher_forced/greedy_match"] == pytest.approx((2 + 0 + 1) / 3)
    assert found["teacher_forced/acceptance"] == pytest.approx((1 + 1 + 0 + 0.5 + 0.5) / 5)
    assert found["teacher_forced/cumulative_1"] == pytest.approx(0.5)
    assert found["teacher_forced/cumulative_2"] == pytest.approx(0.5)
    assert found["teacher_forced/conditional_2"] == pytest.approx(1.0)


def test_proxies_name_their_support():
    alpha = torch.tensor([[0.9]])
    found = proxies(grid_stats(alpha), all_valid(alpha), top_k=100)
    assert "teacher_forced_top_k_100/expected_accepted" in found
    assert "teacher_forced/greedy_match" in found
    assert not any("/expected_accepted" in name and "top_k" not in name for name in found)


def test_proxies_by_domain():
    alpha = torch.tensor([[0.9, 0.8], [0.5, 0.5]])
    found = by_domain(grid_stats(alpha), all_valid(alpha), torch.tensor([1, 0]), ("chat", "code"))
    assert found["teacher_forced/expected_accepted/chat"].value == pytest.approx(0.75)
    assert found["teacher_forced/expected_accepted/code"].value == pytest.approx(1.62)
    assert found["teacher_forced/expected_accepted/code"].denominator.item() == 1


def test_nothing_valid_is_not_a_division_by_zero():
    alpha = torch.full((2, 3), torch.nan)
    found = proxies(grid_stats(alpha), torch.zeros(2, 3, dtype=torch.bool))
    assert found["teacher_forced/expected_accepted"].value is None
    assert expected_calibration_error(calibration(grid_stats(alpha), torch.zeros(2, 3, dtype=torch.bool))) is None


def test_calibration():
    confidence = torch.tensor([[0.95, 0.92, 0.15, 1.0]])
    alpha = torch.tensor([[0.85, 0.82, 0.15, 0.9]])
    gaps = calibration(grid_stats(alpha, confidence=confidence), all_valid(alpha))
    top = gaps["teacher_forced/calibration_gap_9"]
    assert (top.denominator.item(), top.value) == (3, pytest.approx(-0.1))
    assert gaps["teacher_forced/calibration_gap_1"].value == pytest.approx(0)
    assert gaps["teacher_forced/calibration_gap_5"].value is None
    assert expected_calibration_error(gaps) == pytest.approx(0.075)
    assert gaps.keys() <= proxies(grid_stats(alpha, confidence=confidence), all_valid(alpha)).keys()
