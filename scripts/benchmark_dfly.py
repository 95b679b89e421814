"""Benchmark of a DFly step: forward, loss and backward, beside the bare products that it cannot avoid."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from draftsmith.data.batch import Batch, TargetStates
from draftsmith.models.dfly import DFly, DFlyConfig
from draftsmith.models.dfly_shape import Shape
from draftsmith.models.grid import Grid, build_grid
from draftsmith.models.head import Head, TokenStats
from draftsmith.models.target import TargetSpec
from draftsmith.scripts.measure import CPU, CUDA, REFERENCE_SIZE, Case, Place, Product, Work, matrix_product
from draftsmith.train.objectives import e2e_tv, given

SEQ, NUM_CAPTURED = 1024, 5
# SmolLM2-135M's shape.
SPEC = TargetSpec(
    hidden_size=576,
    num_layers=30,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    intermediate_size=1536,
    rms_norm_eps=1e-5,
    vocab_size=49_152,
    max_position_embeddings=8192,
    rope_inv_freq=tuple(1e5 ** (-2 * i / 64) for i in range(32)),
    mask_token_id=16,
)
# Qwen3-4B's shape, for devices on which SmolLM2's products are too small to be worth measuring.
QWEN3_SPEC = TargetSpec(
    hidden_size=2560,
    num_layers=36,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    intermediate_size=9728,
    rms_norm_eps=1e-6,
    vocab_size=151_936,
    max_position_embeddings=40_960,
    rope_inv_freq=tuple(1e6 ** (-2 * i / 128) for i in range(64)),
    qk_norm=True,
    mask_token_id=151_669,
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


def random_batch(spec: TargetSpec, seq: int, place: Place) -> Batch:
    """One row that is one document, all supervised; on the CPU but for its states."""
    return Batch(
        input_ids=torch.randint(spec.vocab_size, (1, seq)),
        supervised=torch.ones(1, seq, dtype=torch.bool),
        document_ids=torch.zeros(1, seq, dtype=torch.int64),
        position_ids=torch.arange(seq)[None],
        states=TargetStates(
            layers=place.randn(1, seq, NUM_CAPTURED, spec.hidden_size),
            final=3 * place.randn(1, seq, spec.hidden_size),
        ),
    )


def _projection(
    rows: int,
    inner: int,
    outer: int,
    *,
    times: int = 1,
    trains: bool = True,
    deep: bool = True,
    place: Place,
) -> list[Product]:
    """A linear map of so many rows: its output, its weight's gradient if it trains, its input's if it stands deep."""
    x, weight, out, grad = (place.randn(*s) for s in ((rows, inner), (outer, inner), (rows, outer), (outer, inner)))
    back = place.empty(rows, inner)
    runs: list[Callable[[], Tensor]] = [lambda: torch.mm(x, weight.T, out=out)]
    if trains:
        runs.append(lambda: torch.mm(out.T, x, out=grad))
    if deep:
        runs.append(lambda: torch.mm(out, weight, out=back))
    return [Product(run=run, flops=2.0 * rows * inner * outer, times=times) for run in runs]


def attention(shape: Shape, rows: int, keys: int, *, times: int, place: Place) -> list[Product]:
    """Scores and output of so many query rows over so many keys each, and their four gradients."""
    heads, width, shared = shape.num_kv_heads, shape.head_dim, shape.num_heads // shape.num_kv_heads * rows
    q, k, scores = place.randn(heads, shared, width), place.randn(heads, keys, width), place.randn(heads, shared, keys)
    flops = 2.0 * heads * shared * width * keys
    return [
        Product(run=lambda: torch.bmm(q, k.mT), flops=flops, times=2 * times),  # scores, gradient of their softmax
        Product(run=lambda: torch.bmm(scores, k), flops=flops, times=2 * times),  # output, gradient of the queries
        Product(run=lambda: torch.bmm(scores.mT, q), flops=flops, times=2 * times),  # gradients of keys and values
    ]


def products_of_step(drafter: DFly, grid: Grid, place: Place) -> list[Product]:
    """Every matrix product of a step, shape by shape."""
    projection, vocab = partial(_projection, place=place), drafter.spec.vocab_size
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
        *attention(shape, slots, mean_keys, times=layers, place=place),
        *projection(rows, 2 * hidden, hidden, times=2),
        *projection(rows, hidden, hidden),
        *(replace(product, times=rows // tile) for product in (*draft, *teacher)),
    ]


def case(
    name: str,
    want: str,
    loss: Callable[[TokenStats, Grid], Tensor],
    *,
    spec: TargetSpec = SPEC,
    anchors: int = 64,
    seq: int = SEQ,
    place: Place = CPU,
    reference_size: int | None = None,
    runs: int = 7,
) -> Case:
    """A step at one row of `seq` tokens with so many anchors."""

    def build() -> Work:
        torch.manual_seed(0)
        weight = place.randn(spec.vocab_size, spec.hidden_size).mul_(spec.hidden_size**-0.5)
        head, batch = Head(weight, weight), random_batch(spec, seq, place)
        drafter = DRAFTER.build(spec).to(place.device, place.dtype)
        chosen = 1 + torch.randperm(seq - DRAFTER.block_size)[:anchors].sort().values
        grid = build_grid(batch, [chosen], num_steps=drafter.num_draft_tokens)
        products = products_of_step(drafter, grid, place)
        batch, grid = batch.to(place.device), grid.to(place.device)

        def step() -> None:
            drafter.zero_grad()
            loss(drafter(batch, grid, head, (want,)), grid).backward()

        reference = None
        if reference_size is not None:
            reference = matrix_product(reference_size, reference_size, reference_size, place=place)
        return Work(run=step, products=products, reference=reference)

    return Case(name=name, build=build, runs=runs)


CASES = [
    case("lk_64_anchors", "lk", lk),
    case("e2e_tv_64_anchors", "tv", chains),
    case("lk_256_anchors", "lk", lk, anchors=256, runs=5),
    case("e2e_tv_256_anchors", "tv", chains, anchors=256, runs=5),
    case("lk_16_anchors", "lk", lk, anchors=16),
    case("lk_64_anchors_152k", "lk", lk, spec=replace(SPEC, vocab_size=151_936), runs=5),
]

on_cuda = partial(case, spec=QWEN3_SPEC, place=CUDA, reference_size=REFERENCE_SIZE)
CUDA_CASES = [
    *(
        on_cuda(f"lk_{anchors}_anchors_{seq}_tokens", "lk", lk, anchors=anchors, seq=seq)
        for anchors in (64, 128, 256, 512)
        for seq in (1024, 8192)
    ),
    on_cuda("lk_512_anchors_2048_tokens", "lk", lk, anchors=512, seq=2048),
    on_cuda("lk_512_anchors_4096_tokens", "lk", lk, anchors=512, seq=4096),
    on_cuda("e2e_tv_512_anchors_8192_tokens", "tv", chains, anchors=512, seq=8192),
]
