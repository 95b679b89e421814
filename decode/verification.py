"""Which drafts the target keeps, and the token that follows them.

A rule is a function of one round's proposal and the target's scores for it that returns a `Verdict`: `verify_greedy` at
temperature 0, `verify_sampled` above. Both are lossless: what is emitted is what the target alone would emit, the same
tokens under the first, the same distribution under the second.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from draftsmith.models.drafter import Proposal
from draftsmith.models.sampling import sample


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What one round yields in each request: its first num_accepted drafts, then next_token.

    Attributes:
        num_accepted: (batch,) int64.
        next_token: (batch,) int64: the target's own token at the first rejected step, or the bonus after the last step.
        acceptance: (batch, step) float32: the probability that each draft would be accepted, averaged over the tokens
            that the drafter could have drawn there, sum_v min(p_v, q_v). Meaningful at steps that were reached.
    """

    num_accepted: Tensor
    next_token: Tensor
    acceptance: Tensor


def verify_greedy(proposal: Proposal, target_logits: Tensor) -> Verdict:
    """Accepts drafts while they are the target's argmax.

    Args:
        target_logits: (batch, step + 1, vocab), row s scores the token of step s, the last row the bonus.
    """
    best = target_logits.argmax(-1)
    matches = proposal.tokens == best[:, :-1]
    num_accepted = leading(matches)
    next_token = best.gather(1, num_accepted[:, None]).squeeze(1)
    return Verdict(num_accepted=num_accepted, next_token=next_token, acceptance=matches.float())


def verify_sampled(proposal: Proposal, target_probs: Tensor, generator: torch.Generator | None = None) -> Verdict:
    """Speculative sampling (arXiv 2211.17192, Algorithm 1; arXiv 2302.01318, Algorithm 2).

    Draft x is accepted with probability min(1, p(x) / q(x)); the first rejected step draws from norm(max(p - q, 0)),
    and after all steps the bonus is drawn from p. The tokens must have been drawn from `proposal.probs`; greedy drafts
    (probs None) are point masses, so that x is accepted with probability p(x).

    Args:
        target_probs: (batch, step + 1, vocab), the distributions that plain decoding would draw from.
    """
    p, q = target_probs[:, :-1].float(), draft_distributions(proposal, target_probs.shape[-1])
    threshold = torch.rand(proposal.tokens.shape, device=p.device, generator=generator)
    num_accepted = leading(threshold < acceptance_probs(proposal.tokens, p, q))
    following = torch.cat((residual(p, q), target_probs[:, -1:].float()), dim=1)
    rows = torch.arange(len(num_accepted), device=p.device)
    next_token = sample(following[rows, num_accepted], generator)
    return Verdict(num_accepted=num_accepted, next_token=next_token, acceptance=torch.minimum(p, q).sum(-1))


def draft_distributions(proposal: Proposal, vocab_size: int) -> Tensor:
    """(batch, step, vocab): what the drafts were drawn from, a point mass where they were chosen greedily."""
    if proposal.probs is not None:
        return proposal.probs.float()
    point = torch.zeros(*proposal.tokens.shape, vocab_size, device=proposal.tokens.device)
    return point.scatter_(-1, proposal.tokens[..., None], 1.0)


def acceptance_probs(tokens: Tensor, p: Tensor, q: Tensor) -> Tensor:
    """min(1, p(x) / q(x)) of each draft; 0 where p(x) is 0.

    Args:
        tokens: (batch, step).
        p: (batch, step, vocab), the target's distributions.
        q: (batch, step, vocab), the drafter's.

    Returns:
        (batch, step).
    """
    p_x = p.gather(-1, tokens[..., None]).squeeze(-1)
    q_x = q.gather(-1, tokens[..., None]).squeeze(-1)
    return torch.where(p_x > 0, (p_x / q_x).clamp(max=1.0), 0.0)


def residual(p: Tensor, q: Tensor) -> Tensor:
    """norm(max(p - q, 0)), what a rejected step draws from; p itself where p = q, which rejects nothing.

    Args:
        p: (..., vocab).
        q: (..., vocab).
    """
    excess = (p - q).clamp(min=0)
    mass = excess.sum(-1, keepdim=True)
    return torch.where(mass > 0, excess / mass, p)


def leading(flags: Tensor) -> Tensor:
    """The number of True entries before the first False.

    Args:
        flags: (batch, step) bool.

    Returns:
        (batch,) int64.
    """
    return flags.long().cumprod(dim=1).sum(dim=1)
