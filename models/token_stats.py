"""Per-position statistics of a drafter against its target: what every objective is arithmetic on.

p is the target's distribution, q the drafter's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

DIFFERENTIABLE = ("ce", "target_ce", "kl", "reverse_kl", "tv", "lk", "log_acceptance")

# What `want` may name. The last two are detached; they stand here because they cost the teacher's product.
# Those that compare p and q.
COMPARED = ("kl", "reverse_kl", "tv", "lk", "log_acceptance")
STATISTICS = (*DIFFERENTIABLE, "acceptance", "target_token")


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenStats:
    """Per-position statistics, float32 (tokens int64); None where not wanted.

    The first seven are differentiable with respect to the drafter and given where `want` names them; `acceptance` and
    `target_token` wherever the teacher is computed, that is, where `want` names anything but `ce`; the other detached
    ones always.

    Attributes:
        ce: -log q(label).
        target_ce: -log q(target_token).
        kl: KL(p || q).
        reverse_kl: KL(q || p).
        tv: total variation, 1/2 sum |p - q|; acceptance probability is 1 - tv.
        lk: LK-hybrid, lambda KL + (1 - lambda) TV with lambda = exp(-eta sg[1 - tv]) for each token.
        log_acceptance: log sum_v min(p_v, q_v).
        acceptance: 1 - TV(p, q) = sum_v min(p_v, q_v), the probability that a draft drawn from q is accepted.
        draft_token: argmax of q, the lowest id among equals.
        target_token: argmax of p, likewise.
        sampled_token: drawn from q, where `Head.stats` is given what decides the draw.
        label_prob: q(label).
        confidence: max of q.
        entropy: entropy of q, nats.
        confidence_logit: logit of a drafter's own confidence head, differentiable; a drafter that has one sets it.
    """

    ce: Tensor | None = None
    target_ce: Tensor | None = None
    kl: Tensor | None = None
    reverse_kl: Tensor | None = None
    tv: Tensor | None = None
    lk: Tensor | None = None
    log_acceptance: Tensor | None = None
    acceptance: Tensor | None = None
    draft_token: Tensor | None = None
    target_token: Tensor | None = None
    sampled_token: Tensor | None = None
    label_prob: Tensor | None = None
    confidence: Tensor | None = None
    entropy: Tensor | None = None
    confidence_logit: Tensor | None = None

    def map(self, change: Callable[[Tensor, float], Tensor]) -> TokenStats:
        """Applies change(value, fill) to every statistic that is there; fill is what stands at invalid entries."""

        def apply(value: Tensor | None, fill: float = 0) -> Tensor | None:
            return None if value is None else change(value, fill)

        return TokenStats(
            ce=apply(self.ce),
            target_ce=apply(self.target_ce),
            kl=apply(self.kl),
            reverse_kl=apply(self.reverse_kl),
            tv=apply(self.tv),
            lk=apply(self.lk),
            log_acceptance=apply(self.log_acceptance),
            acceptance=apply(self.acceptance),
            draft_token=apply(self.draft_token),
            target_token=apply(self.target_token),
            sampled_token=apply(self.sampled_token),
            label_prob=apply(self.label_prob, 1),
            confidence=apply(self.confidence),
            entropy=apply(self.entropy),
            confidence_logit=apply(self.confidence_logit),
        )

    def masked(self, valid: Tensor) -> TokenStats:
        """The same with 0 (label_prob 1) at invalid entries, whatever stood there. valid: the statistics' shape."""
        return self.map(lambda value, fill: torch.where(valid, value, fill))


@dataclass(frozen=True, slots=True, kw_only=True)
class StatsOptions:
    """How p and q are compared, and with which means.

    Attributes:
        lk_eta: eta of LK-hybrid.
        temperature: divides both sides' logits for KL, TV, LK, log alpha, entropy and confidence; CE, label
            probability and argmaxes stay at 1.
        top_k: KL, TV, LK and log alpha on the teacher's top_k tokens only, both sides renormalised; None: all tokens.
        compile: run the arithmetic as one torch.compile'd kernel, in half of its time or less, which the first step
            builds for ten seconds or more; where it cannot be built the eager one, equal to rounding, runs and the log
            says so.
        budget_bytes: for all live tiles of one chunk of rows.
    """

    lk_eta: float = 3.0
    temperature: float = 1.0
    top_k: int | None = None
    compile: bool = False
    budget_bytes: int = 256 * 2**20

    def __post_init__(self) -> None:
        if not self.temperature > 0:
            raise ValueError(f"temperature={self.temperature} must be above 0")
        if not self.lk_eta >= 0:
            raise ValueError(f"lk_eta={self.lk_eta} must be at least 0")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k={self.top_k} must be at least 1; null compares on all tokens")
        if self.budget_bytes < 1:
            raise ValueError(f"budget_bytes={self.budget_bytes} must be positive")


def output_names(want: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The differentiable and the detached statistics that `want` asks for."""
    unknown = sorted(set(want) - set(STATISTICS))
    if unknown:
        raise ValueError(f"want names {', '.join(unknown)}; choose from {', '.join(STATISTICS)}")
    teachers = ("target_token", "acceptance") if needs_teacher(want) else ()
    detached = ("draft_token", "label_prob", "confidence", "entropy", *teachers)
    return tuple(name for name in DIFFERENTIABLE if name in want), detached


def needs_teacher(want: Sequence[str]) -> bool:
    """Whether anything but CE is wanted."""
    return any(name != "ce" for name in want)
