from __future__ import annotations

import io
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console
from tiny_run import ROW_TOKENS, document, documents_of, tiny_config
from torch import Tensor

from draftsmith.data.packing import Loader
from draftsmith.models.head import TokenStats
from draftsmith.models.mtp import MTP, MTPConfig
from draftsmith.train.checkpoint import TrainState
from draftsmith.train.config import TrainConfig, TrainerConfig
from draftsmith.train.plan import BatchShape, prepare
from draftsmith.train.stages import StageConfig
from draftsmith.train.terms import TermConfig
from draftsmith.train.world import World


def shape(rows: int | None, micro: int | None, accumulation: int | None, world_size: int) -> tuple[int, int, int]:
    config = TrainerConfig(rows_per_step=rows, rows_per_micro_batch=micro, accumulation_steps=accumulation)
    derived = BatchShape.derive(config, world_size)
    return derived.rows_per_step, derived.rows_per_micro_batch, derived.accumulation_steps


def test_the_third_number_follows_from_two_and_the_ranks() -> None:
    assert shape(16, 1, None, 1) == (16, 1, 16)
    assert shape(16, 1, None, 2) == (16, 1, 8)
    assert shape(16, None, 4, 2) == (16, 2, 4)
    assert shape(None, 3, 4, 2) == (24, 3, 4)
    assert shape(16, 1, 8, 2) == (16, 1, 8)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ((16, 1, 8, 1), "rows_per_step=16 is not rows_per_micro_batch=1 x accumulation_steps=8 x 1 rank = 8"),
        ((6, 4, None, 1), "rows_per_step=6 is no multiple of rows_per_micro_batch=4 x 1 rank = 4; choose "),
        ((6, 4, None, 2), "no multiple of rows_per_micro_batch=4 x 2 ranks = 8; choose trainer.rows_per_step=8,"),
        ((6, None, None, 1), "give two of the three"),
    ],
)
def test_impossible_batches_are_refused_with_what_would_work(given: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        shape(*given)


def test_ranks_share_the_rows_of_a_step_without_overlap() -> None:
    batch = BatchShape.derive(TrainerConfig(rows_per_step=12, rows_per_micro_batch=2), 3)
    rows: list[int | None] = [*range(10), None, None]
    own = [batch.own_rows(rows, rank) for rank in range(3)]
    assert own == [[[0, 1], [2, 3]], [[4, 5], [6, 7]], [[8, 9], [None, None]]]


def test_ranks_of_a_group_share_their_rows() -> None:
    batch = BatchShape.derive(TrainerConfig(rows_per_step=4, sequence_parallel=2), 4)
    assert batch.accumulation_steps == 2
    assert [batch.own_rows([0, 1, 2, None], rank) for rank in range(4)] == 2 * [[[0], [1]]] + 2 * [[[2], [None]]]
    assert batch.sharers == "2 group(s) of 2 ranks that share rows"
    message = "sequence_parallel=2 does not divide the number of ranks (3); start a multiple of 2 ranks, or set"
    with pytest.raises(ValueError, match=re.escape(message)):
        BatchShape.derive(TrainerConfig(sequence_parallel=2), 3)
    message = (
        "rows_per_step=3 is no multiple of rows_per_micro_batch=1 x 2 groups = 2; choose trainer.rows_per_step=2 or"
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        BatchShape.derive(TrainerConfig(rows_per_step=3, sequence_parallel=2), 4)


@pytest.mark.parametrize(("num_rows", "world_size", "micro"), [(10, 3, 2), (3, 2, 1), (6, 3, 2)])
def test_every_rank_has_as_many_batches_and_every_row_comes_once(num_rows: int, world_size: int, micro: int) -> None:
    documents = documents_of(*(document(5 + i, 4) for i in range(num_rows)))
    loader = Loader(documents, row_tokens=ROW_TOKENS, seed=0, states=None)
    batch = BatchShape.derive(
        TrainerConfig(rows_per_step=None, rows_per_micro_batch=micro, accumulation_steps=1), world_size
    )
    state, seen = TrainState.start(torch.device("cpu")), []
    while state.epoch == 0:
        rows = loader.rows(0, state.next_row, batch.rows_per_step)
        own = [batch.own_rows(rows, rank) for rank in range(world_size)]
        assert {len(batches) for batches in own} == {1}
        seen += [row for batches in own for batch_rows in batches for row in batch_rows]
        state.advance(batch.rows_per_step, num_rows, 0)
    assert sorted(row for row in seen if row is not None) == list(range(num_rows))
    assert state.step == -(-num_rows // (world_size * micro))


def test_steps_or_epochs_but_not_both() -> None:
    with pytest.raises(ValueError, match=r"give exactly one of the two; add trainer\.epochs=null"):
        TrainerConfig(steps=5)
    with pytest.raises(ValueError, match=r"give exactly one of the two; add trainer\.epochs=1"):
        TrainerConfig(epochs=None)


def test_the_plan_tells_what_will_happen(world: World, target_path: Path, conversations: Path, tmp_path: Path) -> None:
    config = tiny_config(target_path, conversations, tmp_path)
    prepared = prepare(config, world, Console(quiet=True))
    plan = prepared.plan
    tokens = sum(len(document) for document in prepared.documents.documents)
    assert (plan.num_documents, plan.num_rows, plan.steps_per_epoch, plan.total_steps) == (10, 10, 5, 10)
    assert plan.warmup_steps == 4
    assert plan.num_tokens == tokens
    # Two captured layers and the final state, hidden 32, float32; a token id and its supervision.
    assert plan.cache_bytes == tokens * (3 * 32 * 4 + 8 + 1)
    assert plan.trainable_parameters == sum(p.numel() for p in prepared.drafter.parameters())
    # 8 anchors drawn in each row, at most 3 steps after each.
    assert 8 * 2 < plan.predictions_per_row <= 8 * 3
    console = Console(record=True, width=120, quiet=False, file=(tmp_path / "out").open("w"))
    plan.print(console, prepared.initialisation)
    text = console.export_text()
    for expected in ("10 with", "2 = 1 per micro-batch x 2 accumulated x 1 rank(s)", "10 (5 per epoch), 4 of warm-up"):
        assert expected in text
    assert re.search(r"lk_dpace\s+│\s+1", text)


def test_a_start_can_be_fitted_to_the_documents(
    world: World, target_path: Path, conversations: Path, tmp_path: Path
) -> None:
    config = tiny_config(target_path, conversations, tmp_path, drafter=MTPConfig(init="last_layer"))
    prepared = prepare(config, world, Console(quiet=True))
    pairs = sum(len(document) - 1 for document in prepared.documents.documents[::2])
    assert prepared.initialisation.endswith(f"fusion fitted on {pairs} tokens of the data")


def test_a_loss_that_cannot_be_is_refused_before_a_start_is_fitted(
    world: World, target_path: Path, conversations: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny_config(target_path, conversations, tmp_path, drafter=MTPConfig(init="last_layer"))
    monkeypatch.setattr(MTP, "initialise", lambda *_: pytest.fail("fitted"))
    idle = StageConfig(name="idle", steps=0, terms=[TermConfig(objective="lk")])
    with pytest.raises(ValueError, match="idle"):
        prepare(
            replace(config, loss=replace(config.loss, stages=[idle, *config.loss.stages])), world, Console(quiet=True)
        )
    confidence = StageConfig(name="all", terms=[TermConfig(objective="confidence")])
    with pytest.raises(ValueError, match="no confidence head"):
        prepare(replace(config, loss=replace(config.loss, stages=[confidence])), world, Console(quiet=True))


def test_warm_up_longer_than_the_run_is_refused(
    world: World, target_path: Path, conversations: Path, tmp_path: Path
) -> None:
    config = tiny_config(target_path, conversations, tmp_path)
    with pytest.raises(ValueError, match=r"optimizer\.warmup=10(\.0)? gives 10 warm-up steps of 10 in all"):
        prepare(replace(config, optimizer=replace(config.optimizer, warmup=10)), world, Console(quiet=True))


def test_a_confidence_term_needs_a_drafter_with_a_confidence_head(
    world: World, target_path: Path, conversations: Path, tmp_path: Path
) -> None:
    config = tiny_config(target_path, conversations, tmp_path)
    stage = StageConfig(name="all", terms=[TermConfig(objective="confidence"), TermConfig(objective="kl")])
    with pytest.raises(ValueError, match=r"no confidence head; choose drafter=dspark"):
        prepare(replace(config, loss=replace(config.loss, stages=[stage])), world, Console(quiet=True))


def test_a_confidence_head_that_no_term_trains_is_warned_of(
    world: World, target_path: Path, conversations: Path, tmp_path: Path
) -> None:
    config = tiny_config(target_path, conversations, tmp_path)
    with_head = replace(config, drafter=replace(config.drafter, confidence_head=True))
    warning = "no term of the loss trains this drafter's confidence head"

    def said(config: TrainConfig) -> str:
        console = Console(file=io.StringIO(), width=200)
        assert prepare(config, world, console).drafter.has_confidence_head == config.drafter.confidence_head
        return console.file.getvalue()  # type: ignore[attr-defined]

    assert warning in said(with_head)
    assert warning not in said(config)
    terms = [TermConfig(objective="kl"), TermConfig(objective="confidence")]
    loss = replace(config.loss, stages=[StageConfig(name="all", terms=terms)])
    assert warning not in said(replace(with_head, loss=loss))
    own = TermConfig(objective=f"{__name__}.squared_logit", want=["confidence_logit"], unit="slot")
    loss = replace(config.loss, stages=[StageConfig(name="all", terms=[TermConfig(objective="ce"), own])])
    assert prepare(replace(with_head, loss=loss), world, Console(quiet=True)).plan.schedule.want(0) == ("ce",)


def squared_logit(stats: TokenStats, valid: Tensor) -> Tensor:
    assert stats.confidence_logit is not None
    return stats.confidence_logit.square()
