"""What the accepted drafts of many rounds add up to, under both conventions in use, each named."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

RESAMPLES = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class Acceptance:
    """Figures of a set of prompts. None where nothing was there to divide by.

    Attributes:
        num_rounds: target passes after those over the prompts.
        acceptance_length: tokens for each round, accepted drafts and the bonus, pooled over all rounds.
        acceptance_length_without_bonus: accepted drafts for each round, pooled.
        acceptance_length_mean_over_prompts: the mean over prompts of each one's own length, bonus included.
        acceptance_length_interval: 95 % interval of acceptance_length, by bootstrap over prompts.
        draft_acceptance: accepted drafts over all drafts.
        cumulative: (step,) share of rounds that accepted at least that many drafts.
        conditional: (step,) the same among rounds that accepted all drafts before.
    """

    num_rounds: int
    acceptance_length: float | None
    acceptance_length_without_bonus: float | None
    acceptance_length_mean_over_prompts: float | None
    acceptance_length_interval: tuple[float, float] | None
    draft_acceptance: float | None
    cumulative: list[float | None]
    conditional: list[float | None]


def pool(accepted: Sequence[Sequence[int]], num_draft_tokens: int, *, seed: int = 0) -> Acceptance:
    """Pools rounds.

    Args:
        accepted: for each prompt, the accepted drafts of each of its rounds.
        num_draft_tokens: drafts of a round.
        seed: of the bootstrap.
    """
    rounds = [count for prompt in accepted for count in prompt]
    at_least = [sum(count >= step for count in rounds) for step in range(num_draft_tokens + 1)]
    own_lengths = [1 + sum(prompt) / len(prompt) for prompt in accepted if prompt]
    without_bonus = _ratio(sum(rounds), len(rounds))
    return Acceptance(
        num_rounds=len(rounds),
        acceptance_length=None if without_bonus is None else 1 + without_bonus,
        acceptance_length_without_bonus=without_bonus,
        acceptance_length_mean_over_prompts=_ratio(sum(own_lengths), len(own_lengths)),
        acceptance_length_interval=_interval(accepted, seed),
        draft_acceptance=_ratio(sum(rounds), len(rounds) * num_draft_tokens),
        cumulative=[_ratio(count, len(rounds)) for count in at_least[1:]],
        conditional=[_ratio(count, before) for before, count in pairwise(at_least)],
    )


def analytic(
    accepted: Sequence[Sequence[int]], acceptance: Sequence[Sequence[Sequence[float]]], num_draft_tokens: int
) -> list[float | None]:
    """(step,): the mean of sum_v min(p_v, q_v) over the rounds that reached each step.

    Args:
        accepted: for each prompt, the accepted drafts of each of its rounds.
        acceptance: for each prompt and round, the analytic acceptance probability of each step.
    """
    pairs = [pair for counts, rows in zip(accepted, acceptance, strict=True) for pair in zip(counts, rows, strict=True)]
    means = []
    for step in range(num_draft_tokens):
        reached = [row[step] for count, row in pairs if count >= step]
        means.append(_ratio(sum(reached), len(reached)))
    return means


def _ratio(numerator: float, denominator: int) -> float | None:
    return numerator / denominator if denominator else None


def _interval(accepted: Sequence[Sequence[int]], seed: int) -> tuple[float, float] | None:
    """Percentile bootstrap: prompts are drawn with replacement, their rounds pooled."""
    sums = np.array([[sum(prompt), len(prompt)] for prompt in accepted if prompt])
    if not len(sums):
        return None
    draws = np.random.default_rng(seed).integers(len(sums), size=(RESAMPLES, len(sums)))
    drafts, rounds = sums[draws].sum(axis=1).T
    low, high = np.percentile(1 + drafts / rounds, [2.5, 97.5])
    return float(low), float(high)
