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
from draftsmith.scripts.benchmark_dfly import QWEN3_SPEC, SPEC
from draftsmith.scripts.measure import CPU, CUDA, REFERENCE_SIZE, Case, Place, Product, Work, matrix_product
from draftsmith.train.objectives import e2e_tv, given

# Bare products are timed on so many rows and counted as often as they occur.
UNIT_ROWS = 512


def lk(stats: TokenStats, grid: Grid) -> Tensor:
    """LK-hybrid, the mean over valid predictions."""
    return given(stats.lk, "lk").sum() / grid.num_slots


def chains(stats: TokenStats, grid: Grid) -> Tensor:
    """End-to-end TV, the mean over chains."""
    return e2e_tv(given(stats.tv, "tv"), grid.valid)[0].sum() / grid.num_chains


def random_batch(spec: TargetSpec, seq: int, document: int, place: Place) -> Batch:
    """One row of documents of equal length, all supervised; on the CPU but for its states."""
    position_ids = (torch.arange(seq) % document)[None]
    return Batch(
        input_ids=torch.randint(spec.vocab_size, (1, seq)),
        supervised=torch.ones(1, seq, dtype=torch.bool),
        document_ids=(torch.arange(seq) // document)[None],
        position_ids=position_ids,
        states=TargetStates(
            layers=place.empty(1, seq, 0, spec.hidden_size), final=3 * place.randn(1, seq, spec.hidden_size)
        ),
    )


def matrices(spec: TargetSpec) -> list[tuple[int, int]]:
    """(inner, outer) of the block's matrices."""
    hidden, mlp = spec.hidden_size, spec.intermediate_size
    width, kv_width = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    attention = [(hidden, width), (hidden, kv_width), (hidden, kv_width), (width, hidden)]
    return [(2 * hidden, hidden), *attention, (hidden, mlp), (hidden, mlp), (mlp, hidden)]


def vocabulary_products(weight: Tensor, predictions: int, positions: int, place: Place) -> list[Product]:
    """Drafter's logits and their gradient at each prediction, the teacher's logits at each position."""
    vocab, hidden = weight.shape
    inputs, logits, gradient = (place.randn(UNIT_ROWS, width) for width in (hidden, vocab, hidden))
    flops = 2.0 * UNIT_ROWS * hidden * vocab
    return [
        Product(
            run=lambda: torch.mm(inputs, weight.T, out=logits),
            flops=flops,
            times=round((predictions + positions) / UNIT_ROWS),
        ),
        Product(run=lambda: torch.mm(logits, weight, out=gradient), flops=flops, times=round(predictions / UNIT_ROWS)),
    ]


def block_products(spec: TargetSpec, rows: int, document: int, place: Place) -> list[Product]:
    """Each matrix forward, for its input's and for its own gradient; attention on the visible half of its scores."""
    times = round(rows / UNIT_ROWS)
    products = []
    for inner, outer in matrices(spec):
        products += [
            matrix_product(UNIT_ROWS, inner, outer, times=times, place=place),
            matrix_product(UNIT_ROWS, outer, inner, times=times, place=place),
            matrix_product(outer, UNIT_ROWS, inner, times=times, place=place),
        ]
    kv_heads, head_dim = spec.num_kv_heads, spec.head_dim
    group_rows, seen = spec.num_heads // kv_heads * UNIT_ROWS, document // 2
    for left, right in (
        ((group_rows, head_dim), (head_dim, seen)),  # scores, and the gradient of their softmax
        ((group_rows, seen), (seen, head_dim)),  # output, and the gradient of the query
        ((seen, group_rows), (group_rows, head_dim)),  # gradients of key and value
    ):
        pair = place.randn(kv_heads, *left), place.randn(kv_heads, *right)
        flops = 2.0 * kv_heads * left[0] * left[1] * right[1]
        products.append(Product(run=partial(torch.bmm, *pair), flops=flops, times=2 * times))
    return products


def case(
    name: str,
    want: str,
    loss: Callable[[TokenStats, Grid], Tensor],
    *,
    spec: TargetSpec = SPEC,
    place: Place = CPU,
    reference_size: int | None = None,
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
        weight = place.randn(spec.vocab_size, spec.hidden_size).mul_(spec.hidden_size**-0.5)
        head, batch = Head(weight, weight), random_batch(spec, seq, document, place)
        mtp = MTPConfig(num_draft_tokens=depths, tokens=tokens, checkpoint_depths=recompute).build(spec)
        mtp.to(place.device, place.dtype)
        grid = mtp.grid(batch, seed=0, epoch=0)
        columns = seq + (depths - 1) * int(grid.num_chains)
        products = [
            *vocabulary_products(weight, int(grid.num_slots), seq, place),
            *block_products(spec, columns, document, place),
        ]
        batch, grid = batch.to(place.device), grid.to(place.device)

        def step() -> None:
            mtp.zero_grad()
            loss(mtp.forward(batch, grid, head, (want,)), grid).backward()

        reference = None
        if reference_size is not None:
            reference = matrix_product(reference_size, reference_size, reference_size, place=place)
        return Work(run=step, products=products, reference=reference)

    return Case(name=name, build=build, runs=runs)


CASES = [
    case("lk", "lk", lk),
    case("e2e_tv", "tv", chains),
    case("lk_sampled", "lk", lk, tokens="sampled"),
    case("lk_1_depth", "lk", lk, depths=1),
    case("lk_4_depths", "lk", lk, depths=4),
    case("lk_16384_tokens", "lk", lk, seq=16_384, document=2048, recompute=True, runs=5),
]

CUDA_CASES = [
    case(
        f"lk_{seq}_tokens",
        "lk",
        lk,
        spec=QWEN3_SPEC,
        place=CUDA,
        reference_size=REFERENCE_SIZE,
        seq=seq,
        document=min(seq, 2048),
        recompute=seq > 4096,
    )
    for seq in (1024, 2048, 4096, 8192, 16_384)
]
