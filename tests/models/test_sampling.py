"""Temperature and top-p, by hand."""

from __future__ import annotations

import pytest
import torch

from draftsmith.models.sampling import BLOCK, distribution, sample, sample_at

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


def test_a_number_decides_the_token() -> None:
    """Cumulative .5, .5, .8, 1 (the second token has no mass): a token is drawn up to, not at, its upper bound."""
    probs = torch.tensor([0.5, 0.0, 0.3, 0.2]).expand(7, -1)
    uniform = torch.tensor([0.0, 0.25, 0.5 - 1e-6, 0.5 + 1e-6, 0.79, 0.81, 1 - 2**-53], dtype=torch.float64)
    assert sample_at(probs, uniform).tolist() == [0, 0, 0, 2, 2, 3, 3]
    # Rows need not be normalised, and no draw ends on a token without mass, at either end.
    padded = torch.nn.functional.pad(torch.tensor([[3.0, 5.0]]), (2 * BLOCK, 2 * BLOCK)).expand(7, -1)
    assert sample_at(padded, uniform).tolist() == [2 * BLOCK, 2 * BLOCK, *[2 * BLOCK + 1] * 5]
    assert sample_at(padded[:0], uniform[:0]).tolist() == []


@pytest.mark.parametrize("vocab", [3, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 7])
def test_draws_invert_the_cumulative_distribution(vocab: int) -> None:
    generator = torch.Generator().manual_seed(vocab)
    probs = (3 * torch.randn(400, vocab, generator=generator)).softmax(-1)
    uniform = torch.rand(400, generator=generator, dtype=torch.float64)
    tokens = sample_at(probs, uniform)
    cumulative = probs.double().cumsum(-1)
    upper = cumulative.gather(-1, tokens[:, None]).squeeze(-1)
    lower = upper - probs.double().gather(-1, tokens[:, None]).squeeze(-1)
    assert (uniform >= lower - 1e-6).all()
    assert (uniform <= upper + 1e-6).all()


def test_draws_are_distributed_as_the_probabilities() -> None:
    probs = torch.tensor([0.05, 0.4, 0.0, 0.25, 0.3])
    uniform = torch.rand(20_000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    counts = torch.bincount(sample_at(probs.expand(20_000, -1), uniform), minlength=5)
    assert counts[2] == 0
    expected = 20_000 * probs[probs > 0]
    chi2 = ((counts[probs > 0] - expected) ** 2 / expected).sum()
    assert chi2 < 16.3  # 3 degrees of freedom: p < 1e-3


def test_a_row_that_is_not_finite_gives_some_token() -> None:
    probs = torch.full((2, 2 * BLOCK + 5), float("nan"))
    assert (sample_at(probs, torch.tensor([0.1, 0.9], dtype=torch.float64)) < 2 * BLOCK + 5).all()
