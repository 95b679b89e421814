"""Benchmark of a DFly step: forward, loss and backward, beside the bare products that it cannot avoid."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from draftsmith.data.batch import Batch, TargetStates
from draftsmith.models.dfly import DFly, DFlyConfig
from draftsmith.models.grid import Grid, build_grid
from draftsmith.models.head import Head, TokenStats
from draftsmith.models.target import TargetSpec
from draftsmith.scripts.measure import Case, Product, Work
from draftsmith.train.objectives import e2e_tv, given

SEQ, VOCAB, NUM_CAPTURED = 1024, 49_152, 5
# SmolLM2-135M's shape.
SPEC = TargetSpec(
    hidden_size=576,
    num_layers=30,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    intermediate_size=1536,
    rms_norm_eps=1e-5,
    vocab_size=VOCAB,
    max_position_embeddings=8192,
    rope_inv_freq=tuple(1e5 ** (-2 * i / 64) for i in range(32)),
    mask_token_id=16,
)
DRAFTER = DFlyConfig(num_layers=5, num_target_layers=NUM_CAPTURED, block_size=8)
# Rows of the vocabulary's bare products: whole tiles, so that these fit in memory at any size.
TILE_ROWS = 448


def lk(stats: TokenStats, grid: Grid) -> Tensor:
    """LK-hybrid, the mean over valid predictions."""
    return given(stats.lk, "lk").sum() / grid.num_slots


def chains(stats: TokenStats, grid: Grid) -> Tensor:
    """End-to-end TV, the mean over chains."""
    return e2e_tv(given(stats.tv, "tv"), grid.valid)[0].sum() / grid.num_chains


def random_batch(vocab: int) -> Batch:
    """One row that is one document, all supervised."""
    hidden = SPEC.hidden_size
    return Batch(
        input_ids=torch.randint(vocab, (1, SEQ)),
        supervised=torch.ones(1, SEQ, dtype=torch.bool),
        document_ids=torch.zeros(1, SEQ, dtype=torch.int64),
        position_ids=torch.arange(SEQ)[None],
        states=TargetStates(
            layers=torch.randn(1, SEQ, NUM_CAPTURED, hidden),
            final=3 * torch.randn(1, SEQ, hidden),
        ),
    )


def projection(
    rows: int, inner: int, outer: int, *, times: int = 1, trains: bool = True, deep: bool = True
) -> list[Product]:
    """A linear map of so many rows: its output, its weight's gradient if it trains, its input's if it stands deep."""
    x, weight, out, grad = (torch.randn(s) for s in ((rows, inner), (outer, inner), (rows, outer), (outer, inner)))
    back = torch.empty(rows, inner)
    runs: list[Callable[[], Tensor]] = [lambda: torch.mm(x, weight.T, out=out)]
    if trains:
        runs.append(lambda: torch.mm(out.T, x, out=grad))
    if deep:
        runs.append(lambda: torch.mm(out, weight, out=back))
    return [Product(run=run, flops=2.0 * rows * inner * outer, times=times) for run in runs]


def attention(rows: int, keys: int, times: int) -> list[Product]:
    """Scores and output of so many query rows over so many keys each, and their four gradients."""
    heads, width, shared = SPEC.num_kv_heads, SPEC.head_dim, SPEC.num_heads // SPEC.num_kv_heads * rows
    q, k, scores = torch.randn(heads, shared, width), torch.randn(heads, keys, width), torch.randn(heads, shared, keys)
    flops = 2.0 * heads * shared * width * keys
    return [
        Product(run=lambda: torch.bmm(q, k.mT), flops=flops, times=2 * times),  # scores, gradient of their softmax
        Product(run=lambda: torch.bmm(scores, k), flops=flops, times=2 * times),  # output, gradient of the queries
        Product(run=lambda: torch.bmm(scores.mT, q), flops=flops, times=2 * times),  # gradients of keys and values
    ]


def products_of_step(drafter: DFly, grid: Grid, vocab: int) -> list[Product]:
    """Every matrix product of a step, shape by shape."""
    shape, layers = drafter.shape, drafter.config.num_layers
    slots, context = grid.anchor_index.numel() * drafter.config.block_size, int(grid.anchor_index.max())
    rows, hidden = int(grid.num_slots), shape.hidden
    width, kv_width, mlp = (
        shape.num_heads * shape.head_dim,
        shape.num_kv_heads * shape.head_dim,
        shape.intermediate_size,
    )
    tile = min(rows, TILE_ROWS)
    mean_keys = int(grid.anchor_index.float().mean()) + drafter.config.block_size
    draft, teacher = projection(tile, hidden, vocab, trains=False), projection(tile, hidden, vocab, trains=False)[:1]
    return [
        *projection(context, NUM_CAPTURED * hidden, hidden, deep=False),
        *projection(context, hidden, kv_width, times=2 * layers),
        *projection(slots, hidden, width, times=layers),
        *projection(slots, hidden, kv_width, times=2 * layers),
        *projection(slots, width, hidden, times=layers),
        *projection(slots, hidden, mlp, times=2 * layers),
        *projection(slots, mlp, hidden, times=layers),
        *attention(slots, mean_keys, layers),
        *projection(rows, 2 * hidden, hidden, times=2),
        *projection(rows, hidden, hidden),
        *(replace(product, times=rows // tile) for product in (*draft, *teacher)),
    ]


def case(
    name: str,
    want: str,
    loss: Callable[[TokenStats, Grid], Tensor],
    *,
    anchors: int = 64,
    vocab: int = VOCAB,
    runs: int = 7,
) -> Case:
    """A step at one row of SEQ tokens with so many anchors."""

    def build() -> Work:
        torch.manual_seed(0)
        weight = torch.empty(vocab, SPEC.hidden_size).normal_(std=SPEC.hidden_size**-0.5)
        head, batch = Head(weight, weight), random_batch(vocab)
        drafter = DRAFTER.build(replace(SPEC, vocab_size=vocab))
        chosen = 1 + torch.randperm(SEQ - DRAFTER.block_size)[:anchors].sort().values
        grid = build_grid(batch, [chosen], num_steps=drafter.num_draft_tokens)

        def step() -> None:
            drafter.zero_grad()
            loss(drafter(batch, grid, head, (want,)), grid).backward()

        return Work(run=step, products=products_of_step(drafter, grid, vocab))

    return Case(name=name, build=build, runs=runs)


CASES = [
    case("lk_64_anchors", "lk", lk),
    case("e2e_tv_64_anchors", "tv", chains),
    case("lk_256_anchors", "lk", lk, anchors=256, runs=5),
    case("e2e_tv_256_anchors", "tv", chains, anchors=256, runs=5),
    case("lk_16_anchors", "lk", lk, anchors=16),
    case("lk_64_anchors_152k", "lk", lk, vocab=151_936, runs=5),
]
