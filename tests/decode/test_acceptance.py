"""Both conventions of acceptance length, by hand."""

from __future__ import annotations

import pytest

from draftsmith.decode.acceptance import analytic, pool


def test_known_answer() -> None:
    figures = pool([[3, 0, 5]], 5)
    assert figures.acceptance_length == pytest.approx(11 / 3)
    assert figures.acceptance_length_without_bonus == pytest.approx(8 / 3)
    assert figures.draft_acceptance == pytest.approx(8 / 15)
    assert figures.cumulative == pytest.approx([2 / 3, 2 / 3, 2 / 3, 1 / 3, 1 / 3])
    assert figures.conditional == pytest.approx([2 / 3, 1, 1, 0.5, 1])
    assert figures.num_rounds == 3
    assert [round(value, 3) for value in (figures.acceptance_length, figures.acceptance_length_without_bonus)] == [
        3.667,
        2.667,
    ]


def test_rounds_are_pooled_and_prompts_averaged() -> None:
    figures = pool([[4], [0, 0, 0]], 4)
    assert figures.acceptance_length == 2.0
    assert figures.acceptance_length_mean_over_prompts == 3.0


def test_a_step_that_no_round_reached_has_no_conditional_rate() -> None:
    figures = pool([[1, 0]], 3)
    assert figures.cumulative == [0.5, 0.0, 0.0]
    assert figures.conditional == [0.5, 0.0, None]


@pytest.mark.parametrize("accepted", [[], [[]], [[], []]])
def test_no_rounds_divide_nothing(accepted: list[list[int]]) -> None:
    figures = pool(accepted, 2)
    assert figures.num_rounds == 0
    assert figures.acceptance_length is None
    assert figures.acceptance_length_interval is None
    assert figures.cumulative == [None, None]
    assert figures.conditional == [None, None]
    assert analytic(accepted, [[] for _ in accepted], 2) == [None, None]


def test_no_drafts_leave_the_bonus() -> None:
    figures = pool([[0, 0]], 0)
    assert figures.acceptance_length == 1.0
    assert figures.draft_acceptance is None
    assert figures.cumulative == figures.conditional == []


def test_a_prompt_without_rounds_changes_no_mean() -> None:
    assert pool([[2], []], 3).acceptance_length_mean_over_prompts == 3.0


def test_interval_covers_the_spread_between_prompts() -> None:
    low, high = pool([[0] * 5, [4] * 5] * 20, 4).acceptance_length_interval or (0, 0)
    # 40 prompts of length 1 or 5: standard error 2 / sqrt(40) = 0.316 around 3.
    assert low == pytest.approx(3 - 1.96 * 0.316, abs=0.1)
    assert high == pytest.approx(3 + 1.96 * 0.316, abs=0.1)
    assert pool([[1, 1], [1]], 4).acceptance_length_interval == (2.0, 2.0)


def test_analytic_rate_is_over_rounds_that_reached_the_step() -> None:
    rows = [[[0.9, 0.5], [0.7, 0.3]], [[0.2, 0.1]]]
    assert analytic([[2, 0], [1]], rows, 2) == pytest.approx([0.6, 0.3])
