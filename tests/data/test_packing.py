"""Packing: known answers for rows, ids and positions; equal counts on all ranks; the order of an epoch."""

from __future__ import annotations

import hashlib

import pytest
import torch

from draftsmith.data.batch import Document, TargetStates
from draftsmith.data.conversations import Documents, Report
from draftsmith.data.packing import Loader, collate, content_number, pack


def document(length: int, number: int = 0, domain: str = "chat") -> Document:
    tokens = torch.arange(length) + 100 * number
    content = hashlib.blake2b(f"{number}".encode(), digest_size=16).hexdigest()
    return Document(tokens=tokens, supervised=tokens % 3 == 0, domain=domain, id=f"{'0' * 32}-{content}")


def states(given: Document) -> TargetStates:
    """States from which the token can be read off: layer l of token t is t + l / 10 in all 3 dimensions."""
    tokens = given.tokens.float()[None, :, None]
    layers = torch.stack([tokens.expand(-1, -1, 3), tokens.expand(-1, -1, 3) + 0.1], dim=2)
    return TargetStates(layers=layers, final=tokens.expand(-1, -1, 3) + 0.5)


def documents(lengths: list[int], domains: tuple[str, ...] = ("chat",)) -> Documents:
    made = [document(length, i, domains[i % len(domains)]) for i, length in enumerate(lengths)]
    return Documents(documents=made, domains=domains, report=Report())


def loader(lengths: list[int], *, row_tokens: int = 8, seed: int = 0, with_states: bool = False) -> Loader:
    return Loader(documents(lengths), row_tokens=row_tokens, seed=seed, states=states if with_states else None)


def test_rows_hold_whole_documents_longest_first_in_the_fullest_row_that_fits() -> None:
    assert pack([3, 8, 5, 2, 4, 2], 8) == [[1], [0, 2], [3, 4, 5]]
    assert pack([], 8) == []


def test_every_document_is_packed_once_and_no_row_overflows() -> None:
    lengths = torch.randint(1, 65, (500,), generator=torch.Generator().manual_seed(0)).tolist()
    rows = pack(lengths, 64)
    assert sorted(index for row in rows for index in row) == list(range(500))
    assert max(sum(lengths[index] for index in row) for row in rows) <= 64
    assert sum(lengths) / (64 * len(rows)) > 0.97


def test_a_document_longer_than_a_row_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"document 1 has 9 tokens, more than row_tokens=8; raise data.row_tokens"):
        pack([3, 9], 8)


def test_ids_and_positions_of_packed_rows() -> None:
    five, four = document(5, 1), document(4, 2)
    batch = collate([[five, four], [four], []], row_tokens=10)
    a, b = content_number(five), content_number(four)
    assert 0 <= a < 2**63
    assert batch.document_ids.tolist() == [[a] * 5 + [b] * 4 + [-1], [b] * 4 + [-1] * 6, [-1] * 10]
    assert batch.position_ids.tolist() == [
        [0, 1, 2, 3, 4, 0, 1, 2, 3, 0],
        [0, 1, 2, 3, 0, 0, 0, 0, 0, 0],
        [0] * 10,
    ]
    assert batch.input_ids[0].tolist() == [100, 101, 102, 103, 104, 200, 201, 202, 203, 0]
    assert batch.supervised[0].nonzero().squeeze(1).tolist() == [2, 6]
    assert not batch.supervised[2].any()
    assert batch.domain_ids is None


def test_domains_are_numbered_where_there_are_several() -> None:
    batch = collate([[document(2, 0, "math"), document(3, 1, "chat")]], row_tokens=6, domains=("chat", "math"))
    assert batch.domain_ids is not None
    assert batch.domain_ids[0, :5].tolist() == [1, 1, 0, 0, 0]


def test_states_follow_their_tokens_and_are_zero_at_padding() -> None:
    batches = loader([5, 2, 3], with_states=True)
    batch = batches.batch([0, 1, None])
    assert batch.states is not None
    assert batch.states.layers.shape == (3, 8, 2, 3)
    real = batch.document_ids >= 0
    assert real.sum() == 10
    tokens = batch.input_ids[real].float()
    torch.testing.assert_close(batch.states.layers[real][:, 0, 0], tokens)
    torch.testing.assert_close(batch.states.layers[real][:, 1, 2], tokens + 0.1)
    torch.testing.assert_close(batch.states.final[real][:, 1], tokens + 0.5)
    assert batch.states.layers[~real].count_nonzero() == 0
    assert batch.states.final[~real].count_nonzero() == 0


def test_a_batch_of_fillers_has_the_same_shape_and_nothing_in_it() -> None:
    batch = loader([5, 2, 3], with_states=True).batch([None, None])
    assert batch.states is not None
    assert batch.states.layers.shape == (2, 8, 2, 3)
    assert batch.states.final.shape == (2, 8, 3)
    assert (batch.document_ids == -1).all()
    assert not batch.supervised.any()


def test_states_with_another_number_of_rows_are_refused() -> None:
    def short(given: Document) -> TargetStates:
        whole = states(given)
        return TargetStates(layers=whole.layers, final=whole.final[:, :-1])

    batches = Loader(documents([5]), row_tokens=8, seed=0, states=short)
    with pytest.raises(ValueError, match="has 5 tokens but 4 rows of final states"):
        batches.batch([0])


@pytest.mark.parametrize(("num_rows", "micro", "world"), [(10, 2, 3), (3, 1, 2), (7, 1, 1), (1, 2, 4)])
def test_all_ranks_get_equally_many_batches_and_every_row_once(num_rows: int, micro: int, world: int) -> None:
    batches = loader([8] * num_rows)
    assert batches.num_rows == num_rows
    per_rank: list[list[list[int | None]]] = [[] for _ in range(world)]
    for first in range(0, num_rows, micro * world):
        window = batches.rows(0, first, micro * world)
        for rank in range(world):
            per_rank[rank].append(window[rank::world])
    counts = {len(seen) for seen in per_rank}
    assert counts == {-(-num_rows // (micro * world))}
    assert all(len(one) == micro for seen in per_rank for one in seen)
    real = [row for seen in per_rank for one in seen for row in one if row is not None]
    assert sorted(real) == list(range(num_rows))


def test_the_order_depends_on_seed_and_epoch_alone() -> None:
    lengths = [8] * 40
    first = loader(lengths).rows(0, 0, 40)
    assert first == loader(lengths).rows(0, 0, 40)
    assert loader(lengths).rows(0, 13, 5) == first[13:18]
    assert first != loader(lengths).rows(1, 0, 40)
    assert first != loader(lengths, seed=1).rows(0, 0, 40)
    assert loader(lengths).rows(0, 38, 4)[2:] == [None, None]


def test_the_packing_is_the_same_in_every_epoch() -> None:
    batches = loader([3, 5, 2, 8, 4, 1])
    contents = {
        epoch: sorted(tuple(batches.batch([row]).input_ids[0].tolist()) for row in batches.rows(epoch, 0, 3))
        for epoch in range(3)
    }
    assert contents[0] == contents[1] == contents[2]
