"""Temperature and top-p, by hand."""

from __future__ import annotations

import pytest
import torch

from draftsmith.models.sampling import distribution, sample

LOGITS = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()


@pytest.mark.parametrize(
    ("top_p", "expected"),
    [
        (1.0, [0.5, 0.3, 0.15, 0.05]),
        (0.9, [0.5 / 0.95, 0.3 / 0.95, 0.15 / 0.95, 0.0]),
        (0.7, [0.625, 0.375, 0.0, 0.0]),
        (0.4, [1.0, 0.0, 0.0, 0.0]),
        (0.001, [1.0, 0.0, 0.0, 0.0]),
    ],
)
def test_nucleus(top_p: float, expected: list[float]) -> None:
    assert torch.allclose(distribution(LOGITS, 1.0, top_p), torch.tensor(expected), atol=1e-6)
    shuffled = torch.tensor([2, 0, 3, 1])
    assert torch.allclose(distribution(LOGITS[shuffled], 1.0, top_p), torch.tensor(expected)[shuffled], atol=1e-6)


def test_temperature_divides_logits() -> None:
    squared = LOGITS.exp() ** 2
    assert torch.allclose(distribution(LOGITS, 0.5), squared / squared.sum(), atol=1e-6)


def test_ties_are_cut_in_the_order_of_token_ids() -> None:
    assert distribution(torch.zeros(4), 1.0, 0.5).tolist() == [0.5, 0.5, 0.0, 0.0]


@pytest.mark.parametrize(("temperature", "top_p"), [(0.0, 1.0), (-1.0, 1.0), (1.0, 0.0), (1.0, 1.5)])
def test_out_of_range_is_refused(temperature: float, top_p: float) -> None:
    with pytest.raises(ValueError, match=r"(temperature|top_p) is"):
        distribution(LOGITS, temperature, top_p)


def test_sample_keeps_leading_shape_and_draws_only_what_has_mass() -> None:
    probs = distribution(LOGITS, 1.0, 0.7).expand(5, 400, 4)
    drawn = sample(probs, torch.Generator().manual_seed(0))
    assert drawn.shape == (5, 400)
    assert set(drawn.flatten().tolist()) == {0, 1}
    assert (drawn == 0).float().mean().item() == pytest.approx(0.625, abs=0.04)
