"""The arithmetic of p against q on logits: every statistic of a few rows and, beside it, the row of its gradient.

`compare` works on plain tensors while the softmaxes are at hand; `logit_stats` makes it differentiable for logits that
somebody already holds, `draftsmith.models.vocabulary_pass` for hidden states.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from draftsmith.models.sampling import sample_at
from draftsmith.models.token_stats import COMPARED, StatsOptions, TokenStats, output_names

# What a logit of -inf becomes: its probability is exactly 0 and it can be subtracted without giving NaN.
DEAD = -1e30


def first_max(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The largest logit of each row and the lowest id that has it.

    torch.max scans with indices at a tenth of the speed of amax; so find the block with amax, then the place in it.

    Args:
        logits: (row, vocab).
    """
    width = 512
    whole = logits.shape[-1] // width * width
    if whole == 0:
        return logits.max(-1)
    blocks = logits[:, :whole].unflatten(-1, (-1, width))
    top, block = blocks.amax(-1).max(-1)
    chosen = blocks.gather(1, block[:, None, None].expand(-1, 1, width)).squeeze(1)
    place = block * width + chosen.argmax(-1)
    if whole < logits.shape[-1]:
        rest, rest_place = logits[:, whole:].max(-1)
        place = torch.where(rest > top, rest_place + whole, place)
        top = torch.maximum(top, rest)
    return top, place


def pick(values: Tensor, index: Tensor) -> Tensor:
    """values (row, vocab) at index (row,) -> (row,)."""
    return values.gather(-1, index[:, None]).squeeze(-1)


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftVocabulary:
    """The tokens that a drafter can propose.

    Attributes:
        ids: (draft_vocab,) int64 ascending, their ids in the full vocabulary.
        place: (vocab,) int64, the inverse; -1 for a token that cannot be proposed.
    """

    ids: Tensor
    place: Tensor


@dataclass(slots=True, kw_only=True)
class Pair:
    """Both sides of a comparison on one set of columns, at the temperature asked for.

    log q = draft_logits - draft_norm, log p = target_logits - target_norm.

    Attributes:
        draft_logits: (row, column).
        target_logits: (row, column).
        draft_norm: (row,).
        target_norm: (row,).
        q: (row, column).
        p: (row, column).
        mass: (row,), what p has on these columns, or 1.
    """

    draft_logits: Tensor
    target_logits: Tensor
    draft_norm: Tensor
    target_norm: Tensor
    q: Tensor
    p: Tensor
    mass: Tensor | float = 1.0


# Memory for q, for p, for the difference of the logits and for log q, which only log alpha needs; None: allocate.
Scratch = Sequence[Tensor | None]

# Statistics whose gradient rows are written when nothing reads the logits any more.
WRITTEN_LAST = ("kl", "tv", "lk")


def dot(a: Tensor, b: Tensor, buffer: Tensor | None) -> Tensor:
    """Sums of a * b over the last axis; the product is written to a buffer that is already mapped."""
    return torch.mul(a, b, out=buffer).sum(-1)


def softmax_backward(upstream: Tensor, q: Tensor, out: Tensor | None) -> Tensor:
    """upstream (row, column), a gradient with respect to q, as one with respect to q's logits; out may be upstream."""
    return torch.ops.aten._softmax_backward_data.out(upstream, q, -1, q.dtype, grad_input=out)


def compare(
    draft_logits: Tensor,
    target_logits: Tensor | None,
    labels: Tensor,
    gradients: Mapping[str, Tensor],
    *,
    want: Sequence[str],
    options: StatsOptions,
    draft_vocabulary: DraftVocabulary | None = None,
    scratch: Scratch = (None, None, None, None),
    uniform: Tensor | None = None,
) -> dict[str, Tensor]:
    """Statistics of a block of rows; gradient rows with respect to the drafter's logits are written as it goes.

    Args:
        draft_logits: (row, vocab) or, with a draft vocabulary, (row, draft_vocab); float32 or float64, finite (see
            DEAD).
        target_logits: (row, vocab) likewise, or None: nothing of the teacher is computed.
        labels: (row,), ids of the full vocabulary.
        gradients: where to write the gradient of each of these statistics, each like draft_logits. Those named in
            WRITTEN_LAST may be the memory of draft_logits or target_logits.
        want: what to compute; the cheap detached ones come in any case.
        scratch: see `Scratch`, each like draft_logits; the third may be the memory of target_logits unless
            log_acceptance is wanted. Fresh large temporaries are mapped and unmapped by the system each time, which
            costs more than the arithmetic.
        uniform: (row,) float64 in [0, 1), which decide the sampled tokens; None: no token is sampled.
    """
    logits = draft_logits
    top, draft_token = first_max(logits)
    q = torch.softmax(logits, -1, out=scratch[0])
    norm = top - pick(q, draft_token).log()

    def cross_entropy(name: str, token: Tensor) -> Tensor:
        place, known = token, None
        if draft_vocabulary is not None:
            known = draft_vocabulary.place[token] >= 0
            place = draft_vocabulary.place[token].clamp(min=0)
        value = norm - pick(logits, place)
        if name in gradients:
            gradients[name].copy_(q).scatter_add_(-1, place[:, None], gradients[name].new_full((len(q), 1), -1))
        if known is None:
            return value
        if name in gradients:
            gradients[name].mul_(known[:, None])
        return torch.where(known, value, 0)

    found = {"ce": cross_entropy("ce", labels)}
    found["label_prob"] = (-found["ce"]).exp()
    found["draft_token"] = draft_token
    if draft_vocabulary is not None:
        found["label_prob"] = torch.where(draft_vocabulary.place[labels] >= 0, found["label_prob"], 0)
        found["draft_token"] = draft_vocabulary.ids[draft_token]
    teacher = target_logits
    if teacher is not None:
        teacher_top, found["target_token"] = first_max(teacher)
        if "target_ce" in want:
            found["target_ce"] = cross_entropy("target_ce", found["target_token"])

    if options.temperature != 1:
        logits = logits / options.temperature
        q = torch.softmax(logits, -1, out=scratch[0])
        norm = top / options.temperature - pick(q, draft_token).log()
    if uniform is not None:
        sampled = sample_at(q, uniform)
        found["sampled_token"] = sampled if draft_vocabulary is None else draft_vocabulary.ids[sampled]
    found["confidence"] = pick(q, draft_token)
    found["entropy"] = norm - dot(q, logits, scratch[1])
    if teacher is not None:
        teacher = teacher if options.temperature == 1 else teacher / options.temperature
        p = torch.softmax(teacher, -1, out=scratch[1] if draft_vocabulary is None else None)
        teacher_norm = teacher_top / options.temperature - pick(p, found["target_token"]).log()
        pair = Pair(draft_logits=logits, target_logits=teacher, draft_norm=norm, target_norm=teacher_norm, q=q, p=p)
        found.update(compare_on_support(pair, want, gradients, options, draft_vocabulary, scratch[2:]))
    return found


def full_precision(logits: Tensor) -> Tensor:
    """float32, or float64 where the input is (for gradient checks)."""
    return logits if logits.dtype == torch.float64 else logits.float()


def compare_on_support(
    pair: Pair,
    want: Sequence[str],
    gradients: Mapping[str, Tensor],
    options: StatsOptions,
    draft_vocabulary: DraftVocabulary | None,
    scratch: Scratch,
) -> dict[str, Tensor]:
    """Restricts both sides to the columns that are compared, and brings gradient rows back from there.

    A draft vocabulary keeps p's mass of the full vocabulary (what is outside cannot be accepted); a teacher's top-K
    renormalises both sides.
    """
    columns = None
    if draft_vocabulary is not None:
        pair.target_logits = pair.target_logits[:, draft_vocabulary.ids]
        pair.p = pair.p[:, draft_vocabulary.ids]
        pair.mass = pair.p.sum(-1)
    elif options.top_k is not None and options.top_k < pair.p.shape[-1]:
        columns = pair.target_logits.topk(options.top_k, sorted=False).indices
        draft_logits, target_logits = pair.draft_logits.gather(-1, columns), pair.target_logits.gather(-1, columns)
        pair = Pair(
            draft_logits=draft_logits,
            target_logits=target_logits,
            draft_norm=draft_logits.logsumexp(-1),
            target_norm=target_logits.logsumexp(-1),
            q=draft_logits.softmax(-1),
            p=target_logits.softmax(-1),
        )
        scratch = (None, None)

    rows = {name: gradients[name] for name in COMPARED if name in gradients}
    if columns is not None:
        rows = {name: torch.empty_like(pair.q) for name in rows}
    found = divergences(pair, want, rows, options.lk_eta, scratch)
    for name, row in rows.items():
        if options.temperature != 1:
            row.mul_(1 / options.temperature)
        if columns is not None:
            gradients[name].zero_().scatter_(-1, columns, row)
    return found


def divergences(
    pair: Pair, want: Sequence[str], rows: Mapping[str, Tensor], eta: float, scratch: Scratch
) -> dict[str, Tensor]:
    """KL, reverse KL, TV, LK-hybrid, log alpha, and their gradients with respect to the (tempered) draft logits.

    dKL/dz = m q - p with m the mass of p on the columns; dTV/dq = 1[q > p]. p is overwritten.

    Args:
        scratch: the last two of `Scratch`.
    """
    p, q = pair.p, pair.q
    found = {}
    if "log_acceptance" in want:
        found["log_acceptance"] = log_overlap(pair, rows.get("log_acceptance"), scratch)
    if "kl" in want or "lk" in want or "reverse_kl" in want:
        shift = pair.target_norm - pair.draft_norm
        gap = torch.sub(pair.target_logits, pair.draft_logits, out=scratch[0])  # log p - log q + shift
        if "reverse_kl" in want:
            mean_gap = dot(q, gap, scratch[1])
            found["reverse_kl"] = shift - mean_gap
            if "reverse_kl" in rows:
                torch.sub(mean_gap[:, None], gap, out=rows["reverse_kl"]).mul_(q)
        found["kl"] = dot(p, gap, gap) - pair.mass * shift
    mass = pair.mass[:, None] if isinstance(pair.mass, Tensor) else pair.mass
    if "kl" in rows:
        torch.mul(q, mass, out=rows["kl"]).sub_(p)

    excess = torch.sub(q, p, out=p)
    above = torch.clamp_min(excess, 0, out=scratch[0])
    found["tv"] = tv = above.sum(-1)
    found["acceptance"] = 1 - tv
    if "lk" in want:
        blend = torch.exp(-eta * (1 - tv))
        found["lk"] = blend * found["kl"] + (1 - blend) * tv
    if "tv" in rows or "lk" in rows:
        slope = softmax_backward(above.sign_(), q, rows.get("tv", above))
        if "lk" in rows:
            blend = blend[:, None]
            torch.lerp(slope, excess, blend, out=rows["lk"])
            if isinstance(mass, Tensor):
                rows["lk"].addcmul_(q, blend * (mass - 1))
    return found


def log_overlap(pair: Pair, row: Tensor | None, scratch: Scratch) -> Tensor:
    """log sum_v min(p_v, q_v) without leaving the logarithm: log(1 - TV) is -inf from logit gaps of about 17 on.

    With w_v = min(p_v, q_v) / alpha where q_v < p_v, else 0, the gradient is w_v - q_v sum_u w_u.
    """
    log_p = torch.sub(pair.target_logits, pair.target_norm[:, None], out=scratch[0])
    log_q = torch.sub(pair.draft_logits, pair.draft_norm[:, None], out=scratch[1])
    below = None if row is None else torch.sub(log_p, log_q, out=row).relu_().sign_()
    common = torch.minimum(log_p, log_q, out=log_q)
    top = common.amax(-1, keepdim=True)
    share = common.sub_(top).exp_()
    total = share.sum(-1, keepdim=True)
    if row is not None and below is not None:
        weight = share.mul_(below).div_(total)
        torch.mul(pair.q, -weight.sum(-1, keepdim=True), out=row).add_(weight)
    return (top + total.log()).squeeze(-1)


class _LogitStats(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        draft_logits: Tensor,
        target_logits: Tensor,
        labels: Tensor,
        want: Sequence[str],
        options: StatsOptions,
    ) -> tuple[Tensor, ...]:
        differentiable, detached = output_names(want)
        needed = differentiable if ctx.needs_input_grad[0] else ()
        gradients = {name: torch.empty_like(draft_logits) for name in needed}
        found = compare(draft_logits, target_logits, labels, gradients, want=want, options=options)
        ctx.save_for_backward(*gradients.values())
        ctx.mark_non_differentiable(*(found[name] for name in detached))
        return tuple(found[name] for name in (*differentiable, *detached))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        rows: tuple[Tensor, ...] = ctx.saved_tensors
        gradient = torch.zeros_like(rows[0])
        for up, row in zip(upstream, rows, strict=False):  # upstream of the detached ones comes last
            gradient.addcmul_(up[:, None], row)
        return gradient, None, None, None, None


def logit_stats(
    draft_logits: Tensor, target_logits: Tensor, labels: Tensor, want: Sequence[str], lk_eta: float = 3.0
) -> TokenStats:
    """The arithmetic of one chunk on logits that somebody holds; -inf marks a column as dead.

    Args:
        draft_logits: (row, vocab).
        target_logits: (row, vocab).
        labels: (row,).
        want: which differentiable statistics to compute.

    Raises:
        ValueError: a wanted divergence is infinite: KL or LK where p > 0 = q, reverse KL where q > 0 = p, log
            acceptance where p and q share no token.
    """
    differentiable, detached = output_names(want)
    draft, target = full_precision(draft_logits), full_precision(target_logits.detach())
    _refuse_infinite(draft.detach(), target, want)
    values = _LogitStats.apply(draft.clamp(min=DEAD), target.clamp(min=DEAD), labels, want, StatsOptions(lk_eta=lk_eta))
    return TokenStats(**dict(zip((*differentiable, *detached), values, strict=True)))


def _refuse_infinite(draft: Tensor, target: Tensor, want: Sequence[str]) -> None:
    def refuse(names: Sequence[str], bad: Tensor, what: str) -> None:
        named = [name for name in names if name in want]
        if named and bool(bad.any()):
            row = int(bad.nonzero()[0, 0])
            raise ValueError(f"{', '.join(named)} is infinite: in row {row} {what}; tv is finite there")

    q, p = draft.softmax(-1), target.softmax(-1)
    dead_q, dead_p = draft == -torch.inf, target == -torch.inf
    refuse(("kl", "lk"), (p > 0) & dead_q, "p > 0 where q = 0 (a logit of -inf in the drafter's only)")
    refuse(("reverse_kl",), (q > 0) & dead_p, "q > 0 where p = 0 (a logit of -inf in the target's only)")
    shared = (~dead_q & ~dead_p).any(-1)
    refuse(("log_acceptance",), ~shared & ~dead_q.all(-1), "p and q have no token in common")
