"""Objectives: a few lines of arithmetic each on the statistics of the grid (anchor, step).

p is the target's distribution, q the drafter's, alpha = 1 - TV(p, q) the probability that a draft is accepted. Every
function takes `valid` and gives the same value and gradient whatever stands at invalid entries, NaN included. Steps
count only as long as a chain has no hole: the first invalid step ends it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from draftsmith.models.head import TokenStats

NUM_BINS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """A mean that is still two sums, so that adding it up over chunks, micro-batches and ranks stays exact."""

    numerator: Tensor
    denominator: Tensor

    def __add__(self, other: Ratio) -> Ratio:
        return Ratio(numerator=self.numerator + other.numerator, denominator=self.denominator + other.denominator)

    @property
    def value(self) -> float | None:
        """The mean; None where nothing was counted."""
        count = float(self.denominator)
        return None if count == 0 else float(self.numerator) / count


def lk_hybrid(kl: Tensor, tv: Tensor, eta: float) -> Tensor:
    """LK-hybrid for each token: lambda KL + (1 - lambda) TV, lambda = exp(-eta sg[1 - TV]) (arXiv 2602.23881).

    The definition; in training the statistic `lk` is this, blended inside the vocabulary pass.

    Args:
        kl: (...).
        tv: (...).
        eta: 0 gives KL, large gives TV.
    """
    blend = torch.exp(-eta * (1 - tv.detach()))
    return blend * kl + (1 - blend) * tv


def lk_alpha(log_acceptance: Tensor) -> Tensor:
    """-log alpha for each token (arXiv 2602.23881). log_acceptance: (...)."""
    return -log_acceptance


def valid_prefix(valid: Tensor) -> Tensor:
    """valid: (..., step) -> the same up to each chain's first hole."""
    return valid.cumprod(-1).bool()


def e2e_tv(tv: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
    """End-to-end TV of each chain: 1 - (1/n) sum_{j<=n} prod_{i<=j} alpha_i over its n valid steps (arXiv 2607.25852).

    Args:
        tv: (..., step).
        valid: (..., step) bool.

    Returns:
        The loss (...), 0 where a chain has no valid step, and which chains (...) have one.
    """
    prefix = valid_prefix(valid)
    survival = torch.where(prefix, 1 - torch.where(prefix, tv, 0), 1).cumprod(-1)
    expected = torch.where(prefix, survival, 0).sum(-1)
    chain_valid = prefix[..., 0]
    return torch.where(chain_valid, 1 - expected / prefix.sum(-1).clamp(min=1), 0), chain_valid


def e2e_tv_weights(tv: Tensor, valid: Tensor) -> Tensor:
    """The gradient of `e2e_tv` with respect to tv: how much each step of a chain matters to it.

    With pre_m = prod_{i<m} alpha_i, S_n = 1 and S_m = 1 + alpha_{m+1} S_{m+1} it is pre_m S_m / n, so end-to-end TV has
    the gradient of a TV loss with these weights held fixed.

    Args:
        tv: (..., step).
        valid: (..., step) bool.

    Returns:
        (..., step), detached, 0 outside the valid prefix.
    """
    prefix = valid_prefix(valid)
    alpha = torch.where(prefix, 1 - tv.detach(), 0)
    before = F.pad(alpha, (1, 0), value=1.0)[..., :-1].cumprod(-1)
    after = torch.ones_like(alpha)
    for step in range(alpha.shape[-1] - 2, -1, -1):
        after[..., step] = 1 + alpha[..., step + 1] * after[..., step + 1]
    return torch.where(prefix, before * after, 0) / prefix.sum(-1, keepdim=True).clamp(min=1)


def decay_weights(num_steps: int, decay: float, *, device: torch.device | None = None) -> Tensor:
    """exp(-k / decay) for steps k = 0, 1, ...: (step,). 7 in DFlash (arXiv 2602.06036), 4 in DSpark (2607.05147)."""
    return torch.exp(-torch.arange(num_steps, dtype=torch.float32, device=device) / decay)


def geometric_weights(num_steps: int, beta: float, *, device: torch.device | None = None) -> Tensor:
    """beta^k for steps k = 0, 1, ...: (step,). Depth weights of MTP."""
    return beta ** torch.arange(num_steps, dtype=torch.float32, device=device)


def dpace_weights(label_prob: Tensor, valid: Tensor, rho: float) -> Tensor:
    """D-PACE (arXiv 2605.18810): w_k = sum_{i>=k} P_i, P_i = prod_{j<=i} s_j, s_j = (1 - rho) sg[q_j(x)] + rho.

    A step weighs as much as the steps that can only be reached through it. Sums and products run over the valid prefix.

    Args:
        label_prob: (..., step), q of the label.
        valid: (..., step) bool.
        rho: floor of each factor; 1 leaves w_k = n - k.

    Returns:
        (..., step), detached, 0 outside the valid prefix.
    """
    prefix = valid_prefix(valid)
    reach = torch.where(prefix, (1 - rho) * label_prob.detach() + rho, 1).cumprod(-1)
    return torch.where(prefix, reach, 0).flip(-1).cumsum(-1).flip(-1)


def confidence_bce(confidence_logit: Tensor, acceptance: Tensor) -> Tensor:
    """Binary cross-entropy of a confidence head against acceptance, 1 - TV (DSpark, arXiv 2607.05147)."""
    return F.binary_cross_entropy_with_logits(confidence_logit, acceptance.detach(), reduction="none")


def given(value: Tensor | None, name: str) -> Tensor:
    """A statistic that an objective needs.

    Raises:
        ValueError: it was not computed.
    """
    if value is None:
        raise ValueError(
            f"the statistic {name} was not computed: name it in `want` "
            "(confidence_logit comes from a drafter with a confidence head)"
        )
    return value


def proxies(stats: TokenStats, valid: Tensor, *, top_k: int | None = None) -> dict[str, Ratio]:
    """What the statistics say about acceptance. Teacher-forced: every step sees the true prefix, so none of these is an
    acceptance length; that is measured by decoding.

    `conditional_k` is the probability that step k is accepted given that it was reached, `cumulative_k` that the chain
    survives step k (1-based), each over the chains that have a step k.

    Args:
        stats: each (..., step); `acceptance` and `target_token` are needed.
        valid: (..., step) bool.
        top_k: the teacher's support where acceptance was computed on one (it over-states acceptance): it is named.

    Returns:
        Means as ratios: expected_accepted and greedy_match (tokens per chain), acceptance and confidence (mean over
        slots), conditional_k, cumulative_k, and those of `calibration`. Names begin with teacher_forced.
    """
    prefix = valid_prefix(valid)
    alpha = torch.where(prefix, given(stats.acceptance, "acceptance").detach(), 0)
    target_token = given(stats.target_token, "target_token")
    survival = alpha.cumprod(-1)
    reached = torch.where(prefix, F.pad(survival, (1, 0), value=1.0)[..., :-1], 0)
    match = (prefix & (given(stats.draft_token, "draft_token") == target_token)).cumprod(-1)
    chains, slots = prefix[..., 0].sum(), prefix.sum()
    confidence = torch.where(prefix, given(stats.confidence, "confidence"), 0)

    name = "teacher_forced" if top_k is None else f"teacher_forced_top_k_{top_k}"
    measured = {
        f"{name}/expected_accepted": Ratio(numerator=survival.sum(), denominator=chains),
        "teacher_forced/greedy_match": Ratio(numerator=match.sum(), denominator=chains),
        f"{name}/acceptance": Ratio(numerator=alpha.sum(), denominator=slots),
        "teacher_forced/confidence": Ratio(numerator=confidence.sum(), denominator=slots),
    }
    for step in range(valid.shape[-1]):
        accepted, count = survival[..., step].sum(), prefix[..., step].sum()
        measured[f"{name}/conditional_{step + 1}"] = Ratio(numerator=accepted, denominator=reached[..., step].sum())
        measured[f"{name}/cumulative_{step + 1}"] = Ratio(numerator=accepted, denominator=count)
    measured.update(calibration(stats, valid, top_k=top_k))
    return measured


def calibration(stats: TokenStats, valid: Tensor, *, top_k: int | None = None) -> dict[str, Ratio]:
    """Acceptance minus confidence, apart for each tenth of confidence: 0 everywhere where confidence can be believed.

    Returns:
        "teacher_forced/calibration_gap_<i>", the mean over slots with confidence in [i / 10, (i + 1) / 10).
    """
    prefix = valid_prefix(valid)
    confidence = torch.where(prefix, given(stats.confidence, "confidence"), 0)
    gap = torch.where(prefix, given(stats.acceptance, "acceptance").detach(), 0) - confidence
    bins = (confidence * NUM_BINS).long().clamp(0, NUM_BINS - 1)
    name = "teacher_forced" if top_k is None else f"teacher_forced_top_k_{top_k}"
    measured = {}
    for index in range(NUM_BINS):
        inside = prefix & (bins == index)
        ratio = Ratio(numerator=torch.where(inside, gap, 0).sum(), denominator=inside.sum())
        measured[f"{name}/calibration_gap_{index}"] = ratio
    return measured


def expected_calibration_error(gaps: dict[str, Ratio]) -> float | None:
    """The mean absolute gap of `calibration` over its bins, weighted by count; None where nothing was counted."""
    total = sum(float(gap.denominator) for gap in gaps.values())
    return None if total == 0 else sum(abs(float(gap.numerator)) for gap in gaps.values()) / total


def by_domain(
    stats: TokenStats, valid: Tensor, domain_ids: Tensor, domains: Sequence[str], *, top_k: int | None = None
) -> dict[str, Ratio]:
    """The `proxies` of each domain, names ending in /<domain>.

    Args:
        domain_ids: (...), the domain of each chain as an index into domains.
    """
    measured = {}
    for index, domain in enumerate(domains):
        own = proxies(stats, valid & (domain_ids == index)[..., None], top_k=top_k)
        measured.update({f"{name}/{domain}": ratio for name, ratio in own.items()})
    return measured
