"""Benchmark of the pass over the vocabulary: time over the bare products, and memory that does not grow with rows."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from draftsmith.models.head import Head, TokenStats
from draftsmith.scripts.measure import Case, Product, Work
from draftsmith.train.objectives import e2e_tv, given

NUM_STEPS = 7


def lk(stats: TokenStats) -> Tensor:
    """The sum of LK-hybrid."""
    return given(stats.lk, "lk").sum()


def chains(stats: TokenStats) -> Tensor:
    """The sum of end-to-end TV, rows read as chains of NUM_STEPS."""
    tv = given(stats.tv, "tv")
    tv = tv[: len(tv) // NUM_STEPS * NUM_STEPS].view(-1, NUM_STEPS)
    return e2e_tv(tv, torch.ones_like(tv, dtype=torch.bool))[0].sum()


def cross_entropy(stats: TokenStats) -> Tensor:
    """The sum of CE."""
    return given(stats.ce, "ce").sum()


def case(
    name: str,
    want: tuple[str, ...],
    loss: Callable[[TokenStats], Tensor],
    *,
    rows: int = 448,
    hidden: int = 576,
    vocab: int = 49_152,
    runs: int = 9,
) -> Case:
    """Forward and backward of a loss beside one product for the drafter, one for the teacher, one for each gradient."""
    num_logits, num_gradients = 1 if want == ("ce",) else 2, len(want)

    def build() -> Work:
        torch.manual_seed(0)
        weight = torch.empty(vocab, hidden).normal_(std=hidden**-0.5)
        target = 3 * torch.randn(rows, hidden)
        draft = (target + torch.randn(rows, hidden)).requires_grad_()
        labels = torch.randint(vocab, (rows,))
        head = Head(weight, weight)

        def step() -> None:
            draft.grad = None
            loss(head.stats(draft, target, labels, want=want)).backward()

        # Bare products of the same shapes and layouts, into tiles of the size that the pass itself would choose from
        # its budget: one tile for the whole case would not fit in memory at the largest shape.
        tile_rows = min(rows, max(64, 256 * 2**20 // (4 * vocab * (num_logits + num_gradients))))
        logits, gradient = torch.empty(tile_rows, vocab), torch.empty(rows, hidden)
        inputs = target.clone()

        def project() -> None:
            for part in inputs.split(tile_rows):
                torch.mm(part, weight.T, out=logits[: len(part)])

        def pull_back() -> None:
            for part in gradient.split(tile_rows):
                torch.mm(logits[: len(part)], weight, out=part)

        flops = 2.0 * rows * hidden * vocab
        return Work(
            run=step,
            products=[
                Product(run=project, flops=flops, times=num_logits),
                Product(run=pull_back, flops=flops, times=num_gradients),
            ],
        )

    return Case(name=name, build=build, runs=runs)


CASES = [
    case("ce", ("ce",), cross_entropy),
    case("lk", ("lk",), lk),
    case("e2e_tv", ("tv",), chains),
    case("lk+e2e_tv", ("lk", "tv"), lambda stats: lk(stats) + chains(stats)),
    *(
        case(f"lk_{rows}_rows_152k", ("lk",), lk, rows=rows, hidden=1024, vocab=151_936, runs=5)
        for rows in (1024, 4096)
    ),
]
