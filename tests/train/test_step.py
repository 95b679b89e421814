from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
from tiny_run import (
    document,
    documents_of,
    largest_difference,
    load_by_hand,
    mixture,
    random_drafter,
    update_by_hand,
    update_by_trainer,
    with_random_weights,
)
from torch import nn

from draftsmith.data.batch import Document, TargetStates
from draftsmith.data.cache import OnlineStates
from draftsmith.models.mtp import MTPConfig
from draftsmith.models.target import Target
from draftsmith.train.optimizer import OptimizerConfig
from draftsmith.train.world import World

# Two supervised tokens give one prediction, ten give 9 + 8 + 7: the rows weigh very differently.
UNEQUAL = (document(5, 2), document(8, 10))


@pytest.mark.parametrize(("micro", "accumulation"), [(2, 1), (1, 2)])
@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_an_update_is_that_of_all_rows_at_once(
    world: World, target: Target, zero_stage: int, micro: int, accumulation: int
) -> None:
    drafter, documents = random_drafter(target), documents_of(*UNEQUAL)
    expected, loss, norm = update_by_hand(target, drafter, documents)
    weights, (result,) = update_by_trainer(
        world,
        target,
        drafter,
        documents,
        zero_stage=zero_stage,
        rows_per_micro_batch=micro,
        accumulation_steps=accumulation,
    )
    assert largest_difference(weights, expected) < 1e-6
    assert largest_difference(weights, drafter.state_dict()) > 1e-2
    assert result.loss == pytest.approx(loss, rel=1e-6)
    assert result.grad_norm == pytest.approx(norm, rel=1e-5)
    assert (result.counts.slots, result.counts.chains, result.counts.tokens) == (25, 10, 48)


@pytest.mark.parametrize("zero_stage", [1, 3])
@pytest.mark.parametrize("last", [document(5, 2), document(23, 1)], ids=["one prediction", "none"])
def test_so_it_is_for_mtp(world: World, target: Target, zero_stage: int, last: Document) -> None:
    drafter, documents = with_random_weights(MTPConfig().build(target.spec)), documents_of(UNEQUAL[1], last)
    expected, loss, norm = update_by_hand(target, drafter, documents)
    weights, (result,) = update_by_trainer(
        world, target, drafter, documents, zero_stage=zero_stage, accumulation_steps=2
    )
    assert largest_difference(weights, expected) < 1e-6
    assert result.loss == pytest.approx(loss, rel=1e-6)
    assert result.grad_norm == pytest.approx(norm, rel=1e-5)


@pytest.mark.parametrize(("micro", "accumulation"), [(2, 1), (1, 2)])
def test_so_it_is_for_a_mixture_on_sampled_tokens(world: World, target: Target, micro: int, accumulation: int) -> None:
    drafter, documents = mixture(target), documents_of(*UNEQUAL)
    expected, loss, _ = update_by_hand(target, drafter, documents)
    weights, results = update_by_trainer(
        world, target, drafter, documents, rows_per_micro_batch=micro, accumulation_steps=accumulation, steps=2
    )
    assert largest_difference(weights, drafter.state_dict()) > 1e-2
    assert results[0].loss == pytest.approx(loss, rel=1e-6)
    weights, results = update_by_trainer(
        world, target, drafter, documents, rows_per_micro_batch=micro, accumulation_steps=accumulation
    )
    assert largest_difference(weights, expected) < 1e-6
    load = load_by_hand(target, drafter, documents)
    assert sum(load) == 2 * 3 * 10
    assert results[0].drafter == {"expert_max_load": pytest.approx(max(load) / 10), "experts_unused": load.count(0)}


@pytest.mark.parametrize("zero_stage", [0, 2])
def test_clipped_adamw_is_that_of_a_hand_written_loop(world: World, target: Target, zero_stage: int) -> None:
    drafter, documents = random_drafter(target), documents_of(*UNEQUAL)

    def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        listed = list(parameters)
        norms = {"params": [p for p in listed if p.dim() < 2], "weight_decay": 0.0}
        groups = [{"params": [p for p in listed if p.dim() >= 2]}, norms]
        return torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)

    expected, _, norm = update_by_hand(target, drafter, documents, steps=4, optimizer=adamw, clip=0.5)
    weights, results = update_by_trainer(
        world,
        target,
        drafter,
        documents,
        zero_stage=zero_stage,
        accumulation_steps=2,
        steps=4,
        optimizer=OptimizerConfig(lr=1e-2, gradient_clipping=0.5),
    )
    assert largest_difference(weights, expected) < 1e-5
    # What is logged is the norm before clipping.
    assert norm > 0.5
    assert results[0].grad_norm == pytest.approx(norm, rel=1e-5)


def test_predictions_count_once_whatever_their_row(world: World, target: Target) -> None:
    # One prediction in a row and nine in another: their mean over ten, not the mean of two means.
    drafter, rows = random_drafter(target, block_size=2), UNEQUAL
    _, (both,) = update_by_trainer(world, target, drafter, documents_of(*rows), accumulation_steps=2)
    alone = [update_by_trainer(world, target, drafter, documents_of(row))[1][0] for row in rows]
    (one, nine), counts = [result.measured["terms/ce"].value for result in alone], [r.counts.slots for r in alone]
    assert counts == [1, 9]
    assert one is not None
    assert nine is not None
    assert both.measured["terms/ce"].value == pytest.approx((1 * one + 9 * nine) / 10, rel=1e-6)
    assert abs(one - nine) > 0.1


@pytest.mark.parametrize("zero_stage", [0, 2])
def test_a_micro_batch_without_an_anchor_adds_nothing(world: World, target: Target, zero_stage: int) -> None:
    # Only the last token is supervised: no label can follow it.
    nothing = document(23, 1)
    drafter = random_drafter(target)
    expected, loss, _ = update_by_hand(target, drafter, documents_of(UNEQUAL[1]))
    weights, (result,) = update_by_trainer(
        world, target, drafter, documents_of(UNEQUAL[1], nothing), zero_stage=zero_stage, accumulation_steps=2
    )
    assert largest_difference(weights, expected) < 1e-6
    assert result.loss == pytest.approx(loss, rel=1e-6)


def test_a_step_without_any_prediction_changes_nothing(world: World, target: Target) -> None:
    drafter = random_drafter(target)
    weights, results = update_by_trainer(world, target, drafter, documents_of(document(23, 1)), steps=2)
    assert [result.loss for result in results] == [None, None]
    assert largest_difference(weights, drafter.state_dict()) == 0.0


def test_a_filler_row_weighs_nothing(world: World, target: Target) -> None:
    drafter = random_drafter(target)
    expected, _, _ = update_by_hand(target, drafter, documents_of(*UNEQUAL))
    weights, _ = update_by_trainer(world, target, drafter, documents_of(*UNEQUAL), accumulation_steps=4)
    assert largest_difference(weights, expected) < 1e-6


@pytest.mark.parametrize("zero_stage", [1, 2, 3])
def test_bfloat16_keeps_float32_masters_and_sums(world: World, target: Target, zero_stage: int) -> None:
    drafter, documents = random_drafter(target), documents_of(*UNEQUAL)
    expected, _, _ = update_by_hand(target, drafter, documents)
    weights, _ = update_by_trainer(
        world, target, drafter, documents, zero_stage=zero_stage, accumulation_steps=2, dtype="bfloat16"
    )
    start = {name: value.bfloat16().float() for name, value in drafter.state_dict().items()}
    ours = torch.cat([(weights[name] - start[name]).flatten() for name in expected])
    theirs = torch.cat([(expected[name] - drafter.state_dict()[name]).flatten() for name in expected])
    assert float((ours - theirs).norm() / theirs.norm()) < 0.03
    assert any(not torch.equal(weights[name], weights[name].bfloat16().float()) for name in weights)


@pytest.mark.parametrize("zero_stage", [0, 1])
@pytest.mark.parametrize(
    ("break_it", "named"),
    [
        ("states", "the target's states of the captured layers"),
        ("weight", "the statistic ce"),
    ],
)
def test_what_is_not_finite_is_named_before_any_weight_changes(
    world: World, target: Target, zero_stage: int, break_it: str, named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter = random_drafter(target)
    if break_it == "weight":
        with torch.no_grad():
            list(drafter.parameters())[-1].fill_(float("inf"))
    else:
        honest = OnlineStates.__call__

        def broken(self: OnlineStates, document: Document) -> TargetStates:
            states = honest(self, document)
            states.layers[0, 2, 1, 0] = float("nan")
            return states

        monkeypatch.setattr(OnlineStates, "__call__", broken)
    with pytest.raises(ValueError, match=f"step 0: {named} is not finite; this step changed no weight"):
        update_by_trainer(world, target, drafter, documents_of(*UNEQUAL), zero_stage=zero_stage, accumulation_steps=2)
