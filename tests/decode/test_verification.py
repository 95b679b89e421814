"""What verification emits is the target's own: exactly, by enumeration, and by counting draws."""

from __future__ import annotations

import itertools
from collections import defaultdict

import pytest
import torch
from torch import Tensor

from draftsmith.decode.verification import (
    acceptance_probs,
    draft_distributions,
    residual,
    verify_greedy,
    verify_sampled,
)
from draftsmith.models.drafter import Proposal
from draftsmith.models.sampling import distribution, sample

P, Q = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.3, 0.5])

Sequence = tuple[int, ...]


def proposal(tokens: Tensor, probs: Tensor | None) -> Proposal:
    return Proposal(tokens=tokens, probs=probs, confidence=torch.ones(tokens.shape))


def tables(vocab: int, steps: int, seed: int, *, top_p: float = 1.0) -> tuple[dict[Sequence, Tensor], ...]:
    """The target's and the drafter's distribution after every prefix of up to `steps` tokens."""
    generator = torch.Generator().manual_seed(seed)
    target, drafter = {}, {}
    for length in range(steps + 1):
        for prefix in itertools.product(range(vocab), repeat=length):
            target[prefix] = distribution(2 * torch.randn(vocab, generator=generator), 0.8, top_p)
            drafter[prefix] = distribution(2 * torch.randn(vocab, generator=generator), 0.8, top_p)
    return target, drafter


def emitted(target: dict[Sequence, Tensor], drafter: dict[Sequence, Tensor], vocab: int, steps: int) -> dict:
    """Probability of every output of steps + 1 tokens: one verified round, then plain decoding by the target."""
    outputs: dict[Sequence, float] = defaultdict(float)
    for drafts in itertools.product(range(vocab), repeat=steps):
        prefixes = [drafts[:step] for step in range(steps)]
        p, q = torch.stack([target[x] for x in prefixes])[None], torch.stack([drafter[x] for x in prefixes])[None]
        drawn = torch.stack([drafter[x][drafts[len(x)]] for x in prefixes]).prod().item()
        accept = acceptance_probs(torch.tensor([drafts]), p, q)[0].tolist()
        rest = residual(p, q)[0]
        reached = drawn
        for step in range(steps):
            for token in range(vocab):
                continue_plainly(
                    outputs,
                    target,
                    (*drafts[:step], token),
                    reached * (1 - accept[step]) * rest[step, token].item(),
                    steps,
                )
            reached *= accept[step]
        for token in range(vocab):
            outputs[(*drafts, token)] += reached * target[drafts][token].item()
    return outputs


def continue_plainly(
    outputs: dict, target: dict[Sequence, Tensor], prefix: Sequence, weight: float, steps: int
) -> None:
    if len(prefix) == steps + 1:
        outputs[prefix] += weight
        return
    for token, chance in enumerate(target[prefix].tolist()):
        continue_plainly(outputs, target, (*prefix, token), weight * chance, steps)


def by_target_alone(target: dict[Sequence, Tensor], vocab: int, steps: int) -> dict[Sequence, float]:
    outputs: dict[Sequence, float] = defaultdict(float)
    continue_plainly(outputs, target, (), 1.0, steps)
    return outputs


def largest_gap(one: dict[Sequence, float], other: dict[Sequence, float]) -> float:
    return max(abs(one[key] - other[key]) for key in {*one, *other})


@pytest.mark.parametrize(("vocab", "steps"), [(2, 1), (5, 1), (3, 2), (5, 2), (3, 3), (5, 3)])
@pytest.mark.parametrize("top_p", [1.0, 0.7])
def test_every_output_has_the_targets_probability(vocab: int, steps: int, top_p: float) -> None:
    target, drafter = tables(vocab, steps, seed=vocab * 10 + steps, top_p=top_p)
    assert largest_gap(emitted(target, drafter, vocab, steps), by_target_alone(target, vocab, steps)) < 1e-6


def test_every_output_has_the_targets_probability_with_greedy_drafts() -> None:
    target, drafter = tables(4, 3, seed=0)
    point = {prefix: torch.nn.functional.one_hot(q.argmax(), 4).float() for prefix, q in drafter.items()}
    assert largest_gap(emitted(target, point, 4, 3), by_target_alone(target, 4, 3)) < 1e-6


def test_enumeration_notices_a_missing_residual(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "residual", lambda p, q: p)
    target, drafter = tables(3, 2, seed=1)
    assert largest_gap(emitted(target, drafter, 3, 2), by_target_alone(target, 3, 2)) > 1e-2


def test_enumeration_notices_greedy_drafts_scored_as_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    target, drafter = tables(3, 2, seed=1)
    point = {prefix: torch.nn.functional.one_hot(q.argmax(), 3).float() for prefix, q in drafter.items()}
    honest = acceptance_probs
    scored = torch.stack([drafter[()], drafter[(int(drafter[()].argmax()),)]])[None]
    monkeypatch.setitem(globals(), "acceptance_probs", lambda tokens, p, q: honest(tokens, p, scored))
    assert largest_gap(emitted(target, point, 3, 2), by_target_alone(target, 3, 2)) > 1e-2


def one_step(draws: int, probs: Tensor | None, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Accepted or not, and the first token emitted, for many draws of one step with target P."""
    generator = torch.Generator().manual_seed(seed)
    tokens = sample(Q.expand(draws, 1, 3), generator) if probs is not None else torch.full((draws, 1), 2)
    verdict = verify_sampled(proposal(tokens, probs), P.expand(draws, 2, 3), generator)
    return verdict.num_accepted, torch.where(verdict.num_accepted == 1, tokens[:, 0], verdict.next_token)


def test_sampled_drafts_known_values() -> None:
    accepted, first = one_step(20_000, Q.expand(20_000, 1, 3))
    assert accepted.float().mean().item() == pytest.approx(0.70, abs=0.015)
    assert torch.allclose(first.bincount(minlength=3) / 20_000, P, atol=0.015)
    assert torch.allclose(residual(P, Q), torch.tensor([1.0, 0.0, 0.0]))


def test_greedy_drafts_are_point_masses() -> None:
    accepted, first = one_step(20_000, None)
    assert accepted.float().mean().item() == pytest.approx(0.2, abs=0.015)
    assert torch.allclose(first.bincount(minlength=3) / 20_000, P, atol=0.015)


def test_greedy_drafts_scored_with_the_drafters_distribution_would_be_wrong() -> None:
    tokens = torch.full((20_000, 1), 2)
    verdict = verify_sampled(proposal(tokens, Q.expand(20_000, 1, 3)), P.expand(20_000, 2, 3), torch.Generator())
    first = torch.where(verdict.num_accepted == 1, 2, verdict.next_token)
    assert torch.allclose(first.bincount(minlength=3) / 20_000, torch.tensor([0.6, 0.0, 0.4]), atol=0.015)


def test_analytic_acceptance() -> None:
    sampled = verify_sampled(proposal(torch.tensor([[2]]), Q.expand(1, 1, 3)), P.expand(1, 2, 3))
    assert sampled.acceptance.item() == pytest.approx(0.7)
    greedy = verify_sampled(proposal(torch.tensor([[2]]), None), P.expand(1, 2, 3))
    assert greedy.acceptance.item() == pytest.approx(0.2)


def test_a_token_without_target_mass_is_never_accepted() -> None:
    p, q = torch.tensor([[[1.0, 0.0]]]), torch.tensor([[[0.0, 1.0]]])
    assert acceptance_probs(torch.tensor([[1]]), p, q).item() == 0
    assert acceptance_probs(torch.tensor([[0]]), p, q).item() == 1
    assert residual(p, q).tolist() == [[[1.0, 0.0]]]
    assert residual(p, p).tolist() == p.tolist()


@pytest.mark.parametrize("greedy_drafts", [False, True])
def test_first_three_tokens_follow_the_target(greedy_drafts: bool) -> None:
    vocab, steps, draws = 4, 2, 200_000
    target, drafter = tables(vocab, steps, seed=5)
    generator = torch.Generator().manual_seed(6)
    outputs = many_rounds(target, drafter, vocab, draws, generator, greedy_drafts=greedy_drafts)
    codes = (outputs * torch.tensor([vocab**2, vocab, 1])).sum(-1)
    observed = codes.bincount(minlength=vocab**3).double()
    alone = by_target_alone(target, vocab, steps)
    expected = draws * torch.tensor([alone[x] for x in itertools.product(range(vocab), repeat=3)]).double()
    # 63 degrees of freedom: chi-square is above 103.4 once in a thousand.
    assert ((observed - expected) ** 2 / expected).sum().item() < 103.4


def many_rounds(
    target: dict[Sequence, Tensor],
    drafter: dict[Sequence, Tensor],
    vocab: int,
    draws: int,
    generator: torch.Generator,
    *,
    greedy_drafts: bool,
) -> Tensor:
    """(draws, 3): two drafts, one verified round, then plain decoding up to three tokens; all draws as one batch."""

    def lookup(table: dict[Sequence, Tensor], prefix: Tensor) -> Tensor:
        length = prefix.shape[1]
        dense = torch.stack([table[x] for x in itertools.product(range(vocab), repeat=length)])
        return dense[(prefix * vocab ** torch.arange(length - 1, -1, -1)).sum(-1)]

    drafts = torch.empty(draws, 0, dtype=torch.int64)
    q = []
    for _ in range(2):
        q.append(lookup(drafter, drafts))
        token = q[-1].argmax(-1) if greedy_drafts else sample(q[-1], generator)
        drafts = torch.cat((drafts, token[:, None]), 1)
    p = torch.stack([lookup(target, drafts[:, :step]) for step in range(3)], 1)
    verdict = verify_sampled(proposal(drafts, None if greedy_drafts else torch.stack(q, 1)), p, generator)
    outputs = torch.cat((drafts, verdict.next_token[:, None]), 1)
    for step in (0, 1):
        short = verdict.num_accepted == step
        outputs[short, step] = verdict.next_token[short]
        for later in range(step + 1, 3):
            outputs[short, later] = sample(lookup(target, outputs[short, :later]), generator)
    return outputs


def test_greedy_counts_the_matching_prefix() -> None:
    logits = torch.nn.functional.one_hot(torch.tensor([[3, 1, 4, 0]]), 5).float()
    for drafts, accepted, following in [
        ([3, 1, 4], 3, 0),
        ([3, 1, 2], 2, 4),
        ([3, 2, 4], 1, 1),
        ([0, 1, 4], 0, 3),
    ]:
        verdict = verify_greedy(proposal(torch.tensor([drafts]), None), logits)
        assert verdict.num_accepted.tolist() == [accepted]
        assert verdict.next_token.tolist() == [following]


def test_rows_of_a_batch_are_independent() -> None:
    logits = torch.nn.functional.one_hot(torch.tensor([[3, 1, 4, 0], [2, 2, 2, 2]]), 5).float()
    verdict = verify_greedy(proposal(torch.tensor([[3, 0, 4], [2, 2, 2]]), None), logits)
    assert verdict.num_accepted.tolist() == [1, 3]
    assert verdict.next_token.tolist() == [1, 2]


def test_sampling_at_low_temperature_is_argmax_matching() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(500, 4, 6, generator=generator)
    drafts = torch.where(torch.rand(500, 3, generator=generator) < 0.7, logits[:, :3].argmax(-1), 0)
    greedy = verify_greedy(proposal(drafts, None), logits)
    sampled = verify_sampled(proposal(drafts, None), distribution(logits, 1e-6), generator)
    assert torch.equal(greedy.num_accepted, sampled.num_accepted)
    assert torch.equal(greedy.next_token, sampled.next_token)
    assert set(greedy.num_accepted.tolist()) == {0, 1, 2, 3}


def test_no_drafts_yield_the_targets_token() -> None:
    logits = torch.tensor([[[0.0, 2.0, 1.0]]])
    nothing = proposal(torch.empty(1, 0, dtype=torch.int64), None)
    verdict = verify_greedy(nothing, logits)
    assert (verdict.num_accepted.item(), verdict.next_token.item()) == (0, 1)
    verdict = verify_sampled(nothing, distribution(logits, 1e-6))
    assert (verdict.num_accepted.item(), verdict.next_token.item()) == (0, 1)


def test_greedy_drafts_of_bfloat16_targets_are_scored_in_float32() -> None:
    logits = torch.randn(1, 2, 1000, generator=torch.Generator().manual_seed(0)).bfloat16()
    probs = distribution(logits, 1.0)
    assert probs.dtype == torch.float32
    assert draft_distributions(proposal(torch.tensor([[7]]), None), 1000).sum().item() == 1
    assert probs.sum(-1).sub(1).abs().max().item() < 1e-6
