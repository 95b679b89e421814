"""The grid (anchor, step): which anchors are legal, how they are drawn, which steps are valid."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from draftsmith.data.batch import Batch
from draftsmith.models.drafter import DrafterConfig
from draftsmith.models.grid import build_grid, choose_anchors, draw_uniform, legal_anchors


def new_batch(rows: list[list[tuple[int, str]]], seq: int) -> Batch:
    """Rows of (document id, supervision such as '..xxx'); padded to seq."""
    shape = (len(rows), seq)
    documents, positions = torch.full(shape, -1), torch.zeros(shape, dtype=torch.int64)
    supervised = torch.zeros(shape, dtype=torch.bool)
    for row, packed in enumerate(rows):
        begin = 0
        for document_id, marks in packed:
            span = slice(begin, begin + len(marks))
            documents[row, span], positions[row, span] = document_id, torch.arange(len(marks))
            supervised[row, span] = torch.tensor([mark == "x" for mark in marks])
            begin += len(marks)
    return Batch(
        input_ids=torch.arange(shape[0] * seq).view(shape),
        supervised=supervised,
        document_ids=documents,
        position_ids=positions,
    )


def draw(batch: Batch, *, per_document=None, per_row=None, seed=0, epoch=0, early_decay=None) -> list[Tensor]:
    return choose_anchors(
        batch,
        anchors_per_document=per_document,
        anchors_per_row=per_row,
        seed=seed,
        epoch=epoch,
        early_decay=early_decay,
    )


def test_an_anchor_is_supervised_has_a_supervised_successor_and_a_predecessor():
    # An answer at 4..6 of 8 tokens: the anchor's row p = anchor - 1 is 3 or 4.
    assert legal_anchors(new_batch([[(1, "....xxx.")]], 8)).nonzero()[:, 1].tolist() == [4, 5]
    # The first token of a document has no predecessor; the last of one has no successor in it.
    batch = new_batch([[(1, "xxx"), (2, "xxxx")]], 9)
    assert legal_anchors(batch).nonzero()[:, 1].tolist() == [1, 4, 5]
    assert not legal_anchors(new_batch([[(1, ".....x")]], 6)).any()


def test_valid_steps_of_packed_documents():
    batch = new_batch([[(1, "xxxxx"), (2, "xxxx")]], 10)
    grid = build_grid(batch, draw(batch), num_steps=3)
    assert grid.valid.sum(dim=(0, 1)).tolist() == [5, 3, 1]
    assert (int(grid.num_slots), int(grid.num_chains)) == (9, 5)
    inside = batch.document_ids.gather(1, grid.label_index.flatten(1)).view_as(grid.label_index)
    own = batch.document_ids.gather(1, grid.anchor_index)[..., None]
    assert (inside == own)[grid.valid].all()
    assert grid.label_index[~grid.valid].eq(0).all()


def test_a_late_answer_trains_chains_that_are_cut_short():
    batch = new_batch([[(1, "." * 15 + "xxxxx")]], 20)
    grid = build_grid(batch, draw(batch), num_steps=15)
    assert grid.anchor_index.tolist() == [[15, 16, 17, 18]]
    assert grid.valid.sum(-1).tolist() == [[4, 3, 2, 1]]


def test_the_first_unsupervised_token_ends_a_chain():
    batch = new_batch([[(1, ".xx.xxx")]], 7)
    grid = build_grid(batch, [torch.tensor([1, 4])], num_steps=4)
    assert grid.valid[0].tolist() == [[True, False, False, False], [True, True, False, False]]


def test_a_documents_draw_does_not_depend_on_its_row():
    marks = {11: "..xxxxxxxxxx", 12: "xxxxxxxx", 13: "." * 4 + "x" * 16}
    packed = new_batch([[(i, marks[i]) for i in (11, 12, 13)]], 44)
    begins = {11: 0, 12: 12, 13: 20}
    drawn = draw(packed, per_document=3, seed=5, epoch=2)[0].tolist()
    for document_id, text in marks.items():
        alone = draw(new_batch([[(document_id, text)]], len(text)), per_document=3, seed=5, epoch=2)[0]
        begin = begins[document_id]
        assert [a - begin for a in drawn if begin <= a < begin + len(text)] == alone.tolist()
        assert len(alone) == 3


def test_draws_change_with_seed_and_epoch_and_reach_every_legal_anchor():
    batch = new_batch([[(7, "." + "x" * 20)]], 21)
    seen = [tuple(draw(batch, per_document=4, seed=s, epoch=e)[0].tolist()) for s in range(5) for e in range(8)]
    assert len(set(seen)) > 30
    assert {anchor for anchors in seen for anchor in anchors} == set(range(1, 20))
    assert draw(batch, per_document=4)[0].tolist() == draw(batch, per_document=4)[0].tolist()


def test_a_row_keeps_the_first_draws_of_its_documents_in_turn():
    batch = new_batch([[(1, "x" * 12), (2, "x" * 12), (3, "xxx")]], 27)
    every = draw(batch, per_document=4)[0]
    kept = draw(batch, per_document=4, per_row=5)[0]
    assert set(kept.tolist()) <= set(every.tolist())
    owners = batch.document_ids[0, kept]
    assert owners.bincount(minlength=4).tolist() == [0, 2, 2, 1]
    assert kept.tolist() == sorted(kept.tolist())


def test_a_fixed_width_is_filled_with_invalid_anchors():
    batch = new_batch([[(1, "xxxx")], [(2, "..")]], 4)
    grid = build_grid(batch, draw(batch), num_steps=2, num_anchors=5)
    assert grid.anchor_index.shape == (2, 5)
    assert grid.valid.any(-1).sum(-1).tolist() == [2, 0]
    assert grid.anchor_index[~grid.valid[..., 0]].eq(0).all()


def test_without_any_anchor_the_grid_still_has_a_shape():
    batch = new_batch([[(1, "....x")]], 5)
    grid = build_grid(batch, draw(batch), num_steps=3)
    assert grid.valid.shape == (1, 1, 3)
    assert not grid.valid.any()


def test_early_anchors_are_drawn_by_their_weight():
    """One draw of an answer with four anchors: probabilities are the normalised weights, at each answer's start."""
    batch = new_batch([[(1, ".xxxxx")]], 6)
    count = torch.zeros(6)
    for epoch in range(4000):
        count[draw(batch, per_document=1, epoch=epoch, early_decay=2.0)[0]] += 1
    weights = torch.exp(-torch.arange(4) / 2.0)
    torch.testing.assert_close(count[1:5] / 4000, weights / weights.sum(), rtol=0, atol=0.03)
    # Two answers: both beginnings are preferred.
    two = new_batch([[(1, ".xxxxxxxxxx..xxxxxxxxxx")]], 23)
    firsts = [int(draw(two, per_document=1, epoch=e, early_decay=0.5)[0]) for e in range(300)]
    assert sum(a in (1, 13) for a in firsts) > 230
    assert 60 < sum(a == 1 for a in firsts) < 200
    # Every legal anchor can be drawn, without replacement.
    assert draw(batch, per_document=4, early_decay=0.01)[0].tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"anchors_per_document": 0}, "anchors_per_document=0: it must be at least 1"),
        ({"anchors_per_row": -1}, "anchors_per_row=-1"),
        ({"early_anchor_decay": 0.0, "anchors_per_row": 1}, "above 0"),
        ({"early_anchor_decay": 3.0}, "has no effect"),
    ],
)
def test_bad_anchor_settings_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        DrafterConfig(**settings)


def numbers_of(batch: Batch, *, per_document=None, seed=0, epoch=0) -> dict[tuple[int, int, int], float]:
    """The number of each valid (document, position, step)."""
    grid = build_grid(batch, draw(batch, per_document=per_document), num_steps=3)
    uniform = draw_uniform(batch, grid, seed=seed, epoch=epoch)
    assert uniform.shape == grid.valid.shape
    assert uniform.dtype == torch.float64
    found = {}
    for row, anchor, step in grid.valid.nonzero().tolist():
        place = row, int(grid.anchor_index[row, anchor])
        found[int(batch.document_ids[place]), int(batch.position_ids[place]), step] = float(uniform[row, anchor, step])
    return found


def test_numbers_to_draw_with_depend_on_document_position_and_step_alone():
    packed = new_batch([[(7, "xxxxxx"), (8, "..xxxx")], [(9, "xxxxxxxx")]], 14)
    apart = new_batch([[(9, "xxxxxxxx")], [(8, "..xxxx")], [(7, "xxxxxx")]], 8)
    numbers = numbers_of(packed)
    assert numbers_of(apart) == numbers
    assert len(set(numbers.values())) == len(numbers)
    assert all(0 <= number < 1 for number in numbers.values())
    some = numbers_of(packed, per_document=2)
    assert 0 < len(some) < len(numbers)
    assert some.items() <= numbers.items()
    for other in (numbers_of(packed, seed=1), numbers_of(packed, epoch=1)):
        assert other.keys() == numbers.keys()
        assert not set(other.values()) & set(numbers.values())
