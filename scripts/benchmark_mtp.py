"""Benchmark of an MTP step: forward on own tokens, loss and backward, beside the bare products that it cannot avoid."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from draftsmith.data.batch import Batch, TargetStates
from draftsmith.models.grid import Grid
from draftsmith.models.head import Head, TokenStats
from draftsmith.models.mtp import MTPConfig
from draftsmith.models.target import TargetSpec
from draftsmith.scripts.measure import Case, Product, Work, matrix_product
from draftsmith.train.objectives import e2e_tv, given

# SmolLM2-135M's shape.
HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INTERMEDIATE, VOCAB = 576, 9, 3, 64, 1536, 49_152
SPEC = TargetSpec(
    hidden_size=HIDDEN,
    num_layers=30,
    num_heads=HEADS,
    num_kv_heads=KV_HEADS,
    head_dim=HEAD_DIM,
    intermediate_size=INTERMEDIATE,
    rms_norm_eps=1e-5,
    vocab_size=VOCAB,
    max_position_embeddings=8192,
    rope_inv_freq=tuple(1e5 ** (-2 * i / HEAD_DIM) for i in range(HEAD_DIM // 2)),
)
# (inner, outer) of the block's matrices.
MATRICES = (
    (2 * HIDDEN, HIDDEN),
    (HIDDEN, HEADS * HEAD_DIM),
    (HIDDEN, KV_HEADS * HEAD_DIM),
    (HIDDEN, KV_HEADS * HEAD_DIM),
    (HEADS * HEAD_DIM, HIDDEN),
    (HIDDEN, INTERMEDIATE),
    (HIDDEN, INTERMEDIATE),
    (INTERMEDIATE, HIDDEN),
)
# Bare products are timed on so many rows and counted as often as they occur.
UNIT_ROWS = 512


def lk(stats: TokenStats, grid: Grid) -> Tensor:
    """LK-hybrid, the mean over valid predictions."""
    return given(stats.lk, "lk").sum() / grid.num_slots


def chains(stats: TokenStats, grid: Grid) -> Tensor:
    """End-to-end TV, the mean over chains."""
    return e2e_tv(given(stats.tv, "tv"), grid.valid)[0].sum() / grid.num_chains


def random_batch(seq: int, document: int) -> Batch:
    """One row of documents of equal length, all supervised."""
    position_ids = (torch.arange(seq) % document)[None]
    return Batch(
        input_ids=torch.randint(VOCAB, (1, seq)),
        supervised=torch.ones(1, seq, dtype=torch.bool),
        document_ids=(torch.arange(seq) // document)[None],
        position_ids=position_ids,
        states=TargetStates(layers=torch.empty(1, seq, 0, HIDDEN), final=3 * torch.randn(1, seq, HIDDEN)),
    )


def vocabulary_products(weight: Tensor, predictions: int, positions: int) -> list[Product]:
    """Drafter's logits and their gradient at each prediction, the teacher's logits at each position."""
    inputs, logits, gradient = (torch.randn(UNIT_ROWS, width) for width in (HIDDEN, VOCAB, HIDDEN))
    flops = 2.0 * UNIT_ROWS * HIDDEN * VOCAB
    return [
        Product(
            run=lambda: torch.mm(inputs, weight.T, out=logits),
            flops=flops,
            times=round((predictions + positions) / UNIT_ROWS),
        ),
        Product(run=lambda: torch.mm(logits, weight, out=gradient), flops=flops, times=round(predictions / UNIT_ROWS)),
    ]


def block_products(rows: int, document: int) -> list[Product]:
    """Each matrix forward, for its input's and for its own gradient; attention on the visible half of its scores."""
    times = round(rows / UNIT_ROWS)
    products = []
    for inner, outer in MATRICES:
        products += [
            matrix_product(UNIT_ROWS, inner, outer, times=times),
            matrix_product(UNIT_ROWS, outer, inner, times=times),
            matrix_product(outer, UNIT_ROWS, inner, times=times),
        ]
    group_rows, seen = HEADS // KV_HEADS * UNIT_ROWS, document // 2
    for left, right in (
        ((group_rows, HEAD_DIM), (HEAD_DIM, seen)),  # scores, and the gradient of their softmax
        ((group_rows, seen), (seen, HEAD_DIM)),  # output, and the gradient of the query
        ((seen, group_rows), (group_rows, HEAD_DIM)),  # gradients of key and value
    ):
        pair = torch.randn(KV_HEADS, *left), torch.randn(KV_HEADS, *right)
        flops = 2.0 * KV_HEADS * left[0] * left[1] * right[1]
        products.append(Product(run=partial(torch.bmm, *pair), flops=flops, times=2 * times))
    return products


def case(
    name: str,
    want: str,
    loss: Callable[[TokenStats, Grid], Tensor],
    *,
    depths: int = 3,
    seq: int = 1024,
    document: int = 1024,
    recompute: bool = False,
    tokens: str = "own",
    runs: int = 7,
) -> Case:
    """A step at one row of `seq` tokens."""

    def build() -> Work:
        torch.manual_seed(0)
        weight = torch.empty(VOCAB, HIDDEN).normal_(std=HIDDEN**-0.5)
        head, batch = Head(weight, weight), random_batch(seq, document)
        mtp = MTPConfig(num_draft_tokens=depths, tokens=tokens, checkpoint_depths=recompute).build(SPEC)
        grid = mtp.grid(batch, seed=0, epoch=0)

        def step() -> None:
            mtp.zero_grad()
            loss(mtp.forward(batch, grid, head, (want,)), grid).backward()

        columns = seq + (depths - 1) * int(grid.num_chains)
        products = vocabulary_products(weight, int(grid.num_slots), seq) + block_products(columns, document)
        return Work(run=step, products=products)

    return Case(name=name, build=build, runs=runs)


CASES = [
    case("lk", "lk", lk),
    case("e2e_tv", "tv", chains),
    case("lk_sampled", "lk", lk, tokens="sampled"),
    case("lk_1_depth", "lk", lk, depths=1),
    case("lk_4_depths", "lk", lk, depths=4),
    case("lk_16384_tokens", "lk", lk, seq=16_384, document=2048, recompute=True, runs=5),
]
