"""Every part of the block-diffusion family under ZeRO-3: a weight is used inside its own module's forward only."""

from __future__ import annotations

from typing import Any

import pytest
from tiny_run import document, documents_of, largest_difference, random_drafter, update_by_hand, update_by_trainer

from draftsmith.models.target import Target
from draftsmith.train.world import World


@pytest.mark.parametrize(
    "settings",
    [
        {"context": "shared", "head": "none", "qk_norm": True, "qkv_bias": True},
        {"context": "fused", "head": "none"},
        {"context": "hybrid", "head": "correction", "activation_checkpointing": True, "base_loss_weight": 0.5},
        {"context": "shared", "head": "markov", "markov_rank": 4, "confidence_head": True},
    ],
    ids=["dflash", "dflare", "dfly", "dspark"],
)
def test_a_sharded_update_is_the_unsharded_one(world: World, target: Target, settings: dict[str, Any]) -> None:
    drafter, documents = random_drafter(target, **settings), documents_of(document(5, 2), document(8, 10))
    expected, loss, _ = update_by_hand(target, drafter, documents)
    weights, (result,) = update_by_trainer(world, target, drafter, documents, zero_stage=3, accumulation_steps=2)
    assert largest_difference(weights, expected) < 1e-6
    assert largest_difference(weights, drafter.state_dict()) > 1e-2
    assert result.loss == pytest.approx(loss, rel=1e-6)
