"""From hidden states to statistics, a chunk of rows at a time: no (row, vocab) tensor outlives its chunk.

A row's statistic depends on that row's hidden state alone. So the row of its gradient, (hidden,), is formed in the
forward pass, while the chunk's softmaxes are at hand: one product with the vocabulary for each differentiable statistic
in use, and backward is an elementwise product with the upstream gradient. Only where the head itself is trained is the
chunk computed again in backward, since its gradient sums over rows that are weighted by what comes from upstream.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from draftsmith.models.comparison import WRITTEN_LAST, DraftVocabulary, Scratch, compare
from draftsmith.models.readout import Readout, precision_of, pull_back
from draftsmith.models.token_stats import StatsOptions, TokenStats, needs_teacher, output_names

log = logging.getLogger(__name__)

MIN_CHUNK_ROWS = 64
# The share of the budget for a block of rows that stays in cache, and how many arrays its operations go over: both
# sides' logits, q, p and what is formed of them.
BLOCK_SHARE = 8
NUM_BLOCK_ARRAYS = 6


class Workspace:
    """Buffers that stay from chunk to chunk and from step to step."""

    def __init__(self) -> None:
        self._flat: dict[str, Tensor] = {}

    def tile(self, purpose: str, rows: int, columns: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """An uninitialised (row, column) view of this purpose's buffer, which grows to the largest ever asked for."""
        size = rows * columns
        flat = self._flat.get(purpose)
        if flat is None or flat.numel() < size or flat.dtype != dtype or flat.device != device:
            self._flat.pop(purpose, None)
            with torch.inference_mode(False):
                flat = self._flat[purpose] = torch.empty(size, dtype=dtype, device=device)
        return flat[:size].view(rows, columns)


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What a pass over the vocabulary computes, apart from the tensors that it is differentiable in.

    Attributes:
        target_hidden: (teacher_row, hidden).
        teacher_index: (row,), the teacher row of each draft row; None: its own.
        teacher_logits: (teacher_row, vocab), where they are known already.
        labels: (row,).
        uniform: (row,), see `Head.stats`, or None.
        want: see `TokenStats`.
        options: see `StatsOptions`.
        draft_readout: the drafter's; its weight is passed beside it.
        teacher_readout: the target's.
        draft_vocabulary: what the drafter can propose; None: everything.
        workspace: where tiles live.
    """

    target_hidden: Tensor
    teacher_index: Tensor | None
    teacher_logits: Tensor | None
    labels: Tensor
    uniform: Tensor | None
    want: Sequence[str]
    options: StatsOptions
    draft_readout: Readout
    teacher_readout: Readout
    draft_vocabulary: DraftVocabulary | None
    workspace: Workspace

    @property
    def outputs(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The differentiable and the detached statistics that a pass gives."""
        differentiable, detached = output_names(self.want)
        return differentiable, detached if self.uniform is None else (*detached, "sampled_token")

    def chunks(
        self, hidden: Tensor, bias: tuple[Tensor, Tensor] | None, gradient_names: Sequence[str]
    ) -> Iterator[Chunk]:
        """Computes chunk after chunk. A chunk's tiles are overwritten by the next.

        Args:
            hidden: (row, hidden), the drafter's.
            bias: (row, rank) and (vocab, rank), whose product is added to the drafter's logits.
            gradient_names: the statistics to form gradient rows for.
        """
        vocab, teacher_vocab = len(self.draft_readout.weight), len(self.teacher_readout.weight)
        cap = self.draft_readout.softcap if gradient_names else None
        precision = precision_of(hidden)
        tile = functools.partial(self.workspace.tile, dtype=precision, device=hidden.device)
        has_teacher = needs_teacher(self.want)
        shared = self._shared_tiles(gradient_names)
        num_tiles = 1 + len(gradient_names) - len(shared) + (cap is not None)
        row_bytes = (num_tiles * vocab + has_teacher * teacher_vocab) * torch.finfo(precision).bits // 8
        budget_bytes = self.options.budget_bytes - self.options.budget_bytes // BLOCK_SHARE
        for part in split(len(hidden), row_bytes, budget_bytes):
            rows = part.stop - part.start
            logits = tile("draft", rows, vocab)
            self.draft_readout.write(hidden[part], logits)
            slope = None
            if cap is not None:
                slope = torch.mul(logits, -1 / cap**2, out=tile("slope", rows, vocab)).mul_(logits).add_(1)
            if bias is not None:
                logits.addmm_(bias[0][part].to(precision), bias[1].to(precision).T)
            teacher, place = self._teacher(part, tile) if has_teacher else (None, None)
            gradients = {name: tile(shared.get(name, name), rows, vocab) for name in gradient_names}
            found = self._compare(logits, teacher, place, part, gradients)
            yield Chunk(part=part, found=found, gradients=gradients, slope=slope)

    def _shared_tiles(self, gradient_names: Sequence[str]) -> dict[str, str]:
        """Which gradients are written over logits that nobody reads any more: fewer tiles, larger chunks."""
        last = [name for name in gradient_names if name in WRITTEN_LAST]
        free = ["draft"]
        if self.teacher_index is None and self.draft_vocabulary is None:
            free.append("teacher")
        return dict(zip(last, free, strict=False))

    def _teacher(self, part: slice, tile: Callable[..., Tensor]) -> tuple[Tensor, Tensor | None]:
        """The teacher's logits of a chunk, and which of them each row reads (None: its own)."""
        if self.teacher_logits is not None:
            index = self.teacher_index
            return (self.teacher_logits[part], None) if index is None else (self.teacher_logits, index[part])
        if self.teacher_index is None:
            needed, place = self.target_hidden[part], None
        else:
            unique, place = self.teacher_index[part].unique(return_inverse=True)
            needed = self.target_hidden[unique]
        logits = tile("teacher", len(needed), len(self.teacher_readout.weight))
        self.teacher_readout.write(needed, logits)
        return logits, place

    def _compare(
        self,
        logits: Tensor,
        teacher: Tensor | None,
        place: Tensor | None,
        part: slice,
        gradients: dict[str, Tensor],
    ) -> dict[str, Tensor]:
        """The elementwise part, in blocks of rows that stay in cache."""
        labels, uniform = self.labels[part], None if self.uniform is None else self.uniform[part]
        compiled = self.options.compile and kernel_works(logits.device.type)
        owns_teacher = place is not None or self.teacher_logits is None
        row_bytes = NUM_BLOCK_ARRAYS * logits.shape[-1] * logits.element_size()
        block_rows = max(1, self.options.budget_bytes // BLOCK_SHARE // row_bytes)
        found = []
        for first in range(0, len(logits), block_rows):
            block = slice(first, min(first + block_rows, len(logits)))
            own, other = logits[block], None
            if teacher is not None:
                other = teacher[block] if place is None else self._gather(teacher, place[block])
            rows = {name: row[block] for name, row in gradients.items()}
            settings: dict[str, Any] = {
                "want": self.want,
                "options": self.options,
                "draft_vocabulary": self.draft_vocabulary,
                "uniform": None if uniform is None else uniform[block],
            }
            if compiled:
                block_found, formed = compiled_compare()(own, other, labels[block], tuple(rows), **settings)
                for name, row in rows.items():
                    row.copy_(formed[name])
            else:
                scratch = self._scratch(own, other, owns_teacher)
                block_found = compare(own, other, labels[block], rows, scratch=scratch, **settings)
            found.append(block_found)
        return {name: torch.cat([block_found[name] for block_found in found]) for name in found[0]}

    def _tile_like(self, purpose: str, like: Tensor, rows: int) -> Tensor:
        return self.workspace.tile(purpose, rows, like.shape[-1], dtype=like.dtype, device=like.device)

    def _gather(self, teacher: Tensor, place: Tensor) -> Tensor:
        out = self._tile_like("gathered", teacher, len(place))
        return torch.index_select(teacher, 0, place, out=out)

    def _scratch(self, logits: Tensor, teacher: Tensor | None, owns_teacher: bool) -> Scratch:
        """The buffers of a block; the difference of logits goes over the teacher's where nobody reads those again."""
        tile = functools.partial(self._tile_like, like=logits, rows=len(logits))
        if "log_acceptance" in self.want:
            return tile("q"), tile("p"), tile("difference"), tile("log_q")
        overwritten = owns_teacher and self.draft_vocabulary is None
        return tile("q"), tile("p"), teacher if overwritten else tile("difference"), None


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """A chunk's results.

    Attributes:
        part: which rows.
        found: statistics, (row,).
        gradients: with respect to the drafter's logits, (row, vocab), for each name.
        slope: (row, vocab), derivative of the soft-cap, or None.
    """

    part: slice
    found: dict[str, Tensor]
    gradients: dict[str, Tensor]
    slope: Tensor | None


def split(rows: int, bytes_per_row: int, budget_bytes: int) -> Iterator[slice]:
    """Equal chunks whose tiles fit the budget, of at least MIN_CHUNK_ROWS rows (fewer starve the products)."""
    limit = max(MIN_CHUNK_ROWS, budget_bytes // bytes_per_row)
    count = math.ceil(rows / limit)
    for index in range(count):
        yield slice(index * rows // count, (index + 1) * rows // count)


def compare_apart(
    draft_logits: Tensor, target_logits: Tensor | None, labels: Tensor, gradient_names: Sequence[str], **settings: Any
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """`compare` as a function without side effects: statistics, and the gradient rows apart from the logits.

    The compiler's caches do not tell arguments that share memory from others: a kernel that was built to write over its
    logits would be taken for one that does not.
    """
    gradients = {name: torch.empty_like(draft_logits) for name in gradient_names}
    return compare(draft_logits, target_logits, labels, gradients, **settings), gradients


@functools.cache
def compiled_compare() -> Callable[..., tuple[dict[str, Tensor], dict[str, Tensor]]]:
    """`compare_apart` as one kernel."""
    return torch.compile(compare_apart, dynamic=True)


@functools.cache
def kernel_works(device_type: str) -> bool:
    """Whether torch.compile has a compiler here; says in the log which path is taken, once."""
    try:
        torch.compile(lambda x: x.exp() + 1)(torch.ones(64, device=device_type))
    except (torch._dynamo.exc.TorchDynamoException, OSError) as error:
        first_line = str(error).strip().splitlines()[0]
        log.warning("statistics run eagerly, torch.compile cannot build a kernel: %s", first_line)
        return False
    log.info("statistics run as one compiled kernel")
    return True


class _VocabularyPass(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias_rows: Tensor | None, basis: Tensor | None, job: Job
    ) -> tuple[Tensor, ...]:
        differentiable, detached = job.outputs
        trains_head = any(ctx.needs_input_grad[1:4])
        formed = differentiable if ctx.needs_input_grad[0] and not trains_head else ()
        gradient_rows = {name: torch.empty_like(hidden) for name in formed}
        bias = None if bias_rows is None or basis is None else (bias_rows, basis)
        found: dict[str, list[Tensor]] = {name: [] for name in (*differentiable, *detached)}
        for chunk in job.chunks(hidden, bias, formed):
            for name, values in found.items():
                values.append(chunk.found[name])
            for name, gradient in chunk.gradients.items():
                if chunk.slope is not None:
                    gradient.mul_(chunk.slope)
                gradient_rows[name][chunk.part] = pull_back(gradient, weight)
        for row in gradient_rows.values():
            row.mul_(job.draft_readout.scale)
        outputs = {name: _join(name, values, hidden) for name, values in found.items()}
        ctx.job, ctx.trains_head, ctx.num_differentiable = job, trains_head, len(differentiable)
        ctx.save_for_backward(*((hidden, weight, bias_rows, basis) if trains_head else gradient_rows.values()))
        ctx.mark_non_differentiable(*(outputs[name] for name in detached))
        return tuple(outputs.values())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        upstream = upstream[: ctx.num_differentiable]
        if ctx.trains_head:
            return (*_recompute(ctx, upstream), None)
        gradient: Tensor | None = None
        for up, row in zip(upstream, ctx.saved_tensors, strict=True):
            weighted = row * up[:, None].to(row.dtype)
            gradient = weighted if gradient is None else gradient.add_(weighted)
        return gradient, None, None, None, None


def _join(name: str, values: list[Tensor], hidden: Tensor) -> Tensor:
    if values:
        return torch.cat(values)
    return hidden.new_empty(0, dtype=torch.int64 if name.endswith("_token") else precision_of(hidden))


def _recompute(ctx: Any, upstream: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
    """Gradients of hidden, weight, bias rows and basis, the statistics' gradients summed before any product."""
    hidden, weight, bias_rows, basis = ctx.saved_tensors
    job: Job = ctx.job
    names, _ = output_names(job.want)
    scale = job.draft_readout.scale
    inputs = (hidden, weight, bias_rows, basis)
    grads = [torch.zeros_like(x) if needed else None for x, needed in zip(inputs, ctx.needs_input_grad, strict=False)]
    d_hidden, d_weight, d_bias_rows, d_basis = grads
    for chunk in job.chunks(hidden, None if bias_rows is None else (bias_rows, basis), names):
        total: Tensor | None = None
        for name, up in zip(names, upstream, strict=True):
            weighted = chunk.gradients[name].mul_(up[chunk.part, None])
            total = weighted if total is None else total.add_(weighted)
        if total is None:
            break
        if d_bias_rows is not None:
            d_bias_rows[chunk.part] = pull_back(total, basis)
        if d_basis is not None:
            d_basis.addmm_(total.T.to(basis.dtype), bias_rows[chunk.part])
        if chunk.slope is not None:
            total.mul_(chunk.slope)
        if d_hidden is not None:
            d_hidden[chunk.part] = pull_back(total, weight).mul_(scale)
        if d_weight is not None:
            d_weight.addmm_(total.T.to(weight.dtype), hidden[chunk.part], alpha=scale)
    return tuple(grads)


def vocabulary_stats(hidden: Tensor, weight: Tensor, bias: tuple[Tensor, Tensor] | None, job: Job) -> TokenStats:
    """The pass as an operation of autograd, differentiable in hidden, weight and bias."""
    differentiable, detached = job.outputs
    rows, basis = (None, None) if bias is None else bias
    if not torch.is_grad_enabled():  # a Function would form gradient rows for anything that requires grad
        hidden, weight = hidden.detach(), weight.detach()
        rows, basis = None if rows is None else rows.detach(), None if basis is None else basis.detach()
    values = _VocabularyPass.apply(hidden, weight, rows, basis, job)
    return TokenStats(**dict(zip((*differentiable, *detached), values, strict=True)))
