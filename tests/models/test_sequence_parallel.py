"""What a rank that shares rows has to itself, and which degrees are refused; whole updates: tests/train."""

from __future__ import annotations

import pytest
import torch

from draftsmith.models.dfly import DFlyConfig
from draftsmith.models.grid import Grid
from draftsmith.models.mtp import MTPConfig
from draftsmith.models.sequence_parallel import SequenceParallel
from draftsmith.models.target import TargetSpec


@pytest.fixture
def spec():
    return TargetSpec(
        hidden_size=16,
        num_layers=4,
        num_heads=4,
        num_kv_heads=2,
        head_dim=4,
        intermediate_size=24,
        rms_norm_eps=1e-5,
        vocab_size=40,
        mask_token_id=39,
        max_position_embeddings=512,
        rope_inv_freq=(1.0, 0.1),
        rope_attention_scaling=1.0,
    )


def members(degree):
    return [SequenceParallel(group=None, rank=rank, degree=degree) for rank in range(degree)]


def grid_of(chains):
    """Chains given by their number of valid steps, of 3. chains: (batch, anchor)."""
    valid = torch.arange(3) < torch.tensor(chains)[..., None]
    anchor_index = torch.arange(1, 1 + len(chains[0])).expand(len(chains), -1) * valid[..., 0]
    return Grid(
        anchor_index=anchor_index, label_index=(anchor_index[..., None] + torch.arange(1, 4)) * valid, valid=valid
    )


@pytest.mark.parametrize(
    ("chains", "degree", "shares"),
    [
        ([[0, 0, 0, 0, 3, 2, 1]], 3, [1, 1, 1]),  # equal shares, wherever in the row the chains stand
        ([[3, 3, 0, 2], [1, 0, 0, 0]], 2, [2, 2]),  # a run may go on in the next row
        ([[1, 1, 1, 1, 1]], 4, [2, 1, 1, 1]),
        ([[0, 3, 2]], 4, [1, 0, 1, 0]),  # fewer chains than ranks
        ([[0, 0]], 2, [0, 0]),
    ],
)
def test_each_chain_is_one_rank_s_and_shares_are_equal(chains, degree, shares):
    grid = grid_of(chains)
    parts = [member.own_chains(grid) for member in members(degree)]
    assert [int(part.num_chains) for part in parts] == shares
    assert torch.equal(sum(part.valid.int() for part in parts), grid.valid.int())
    assert torch.equal(sum(part.anchor_index for part in parts), grid.anchor_index)
    assert torch.equal(sum(part.label_index for part in parts), grid.label_index)
    order = torch.cat([part.valid[..., 0].flatten().nonzero() for part in parts])
    assert torch.equal(order, grid.valid[..., 0].flatten().nonzero())


def test_runs_of_positions_are_equally_long_and_end_in_zeros():
    x = torch.arange(1, 11)[:, None]
    runs = [member.own_run(x).flatten().tolist() for member in members(4)]
    assert runs == [[1, 2, 3], [4, 5, 6], [7, 8, 9], [10, 0, 0]]
    assert [len(member.own_run(x[:2])) for member in members(4)] == [1, 1, 1, 1]


def test_the_degree_divides_the_query_heads(spec):
    mtp = MTPConfig(num_heads=12, num_kv_heads=3).build(spec)
    for degree in (1, 2, 3, 4, 6, 12):
        mtp.check_sequence_parallel(degree)
    with pytest.raises(
        ValueError,
        match=r"sequence_parallel=8 does not divide the drafter's 12 query heads; choose .* 1, 2, 3, 4, 6, 12",
    ):
        mtp.check_sequence_parallel(8)


def test_a_drafter_that_cannot_share_rows_says_so(spec):
    dfly = DFlyConfig(num_layers=1, target_layer_ids=[0]).build(spec)
    dfly.check_sequence_parallel(1)
    with pytest.raises(ValueError, match=r"sequence_parallel=2: DFly does not share rows .*; set .*=1, or choose"):
        dfly.check_sequence_parallel(2)
