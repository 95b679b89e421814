"""Plain and speculative decoding of one request with the target's KV cache.

Both start with one pass over the prompt, which gives the first token. From then on plain decoding reads one token in
each target pass. Speculative decoding reads the last committed token (the anchor) and the drafter's proposal in one
pass, keeps what the target agrees with, and crops the rest out of the cache.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from draftsmith.data.batch import TargetStates
from draftsmith.decode.verification import Verdict, verify_greedy, verify_sampled
from draftsmith.models.drafter import Drafter, Proposal
from draftsmith.models.sampling import distribution, sample
from draftsmith.models.target import Target

DRAFT_SAMPLING = ("sampled", "greedy")


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodingConfig:
    """How tokens are drawn, and how many.

    Attributes:
        max_new_tokens: an output ends there or at an end token, whichever comes first.
        temperature: 0: greedy; else tokens are drawn from softmax(logits / temperature).
        top_p: mass of the nucleus that tokens are drawn from, at temperature > 0; 1: all tokens.
        draft_sampling: at temperature > 0, ``sampled``: drafts are drawn as the target's tokens are; ``greedy``: they
            are the drafter's argmax, and verified as the point masses that they are.
    """

    max_new_tokens: int = 128
    temperature: float = 0.0
    top_p: float = 1.0
    draft_sampling: str = "sampled"

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens is {self.max_new_tokens}; it must be at least 1")
        if not self.temperature >= 0:
            raise ValueError(f"temperature is {self.temperature}; it must be 0 (greedy) or above")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}; it must be in (0, 1], and 1 keeps every token")
        if self.draft_sampling not in DRAFT_SAMPLING:
            raise ValueError(f"draft_sampling is {self.draft_sampling!r}; choose one of {', '.join(DRAFT_SAMPLING)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """One output and how it came about.

    Attributes:
        tokens: the output, its end token included.
        accepted: for each round (target pass after the prompt's), how many of its drafts were emitted.
        acceptance: for each round, the analytic acceptance probability of each step, `Verdict.acceptance`.
        seconds: wall time from the prompt to the last token, the pass over the prompt included.
    """

    tokens: list[int]
    accepted: list[int]
    acceptance: list[list[float]]
    seconds: float


class _Output:
    """Emitted tokens. Ends at max_new_tokens or after an end token; no other token's value means anything."""

    def __init__(self, ends: frozenset[int], max_new_tokens: int) -> None:
        self.tokens: list[int] = []
        self.ends = ends
        self.max_new_tokens = max_new_tokens

    @property
    def finished(self) -> bool:
        return len(self.tokens) >= self.max_new_tokens or (bool(self.tokens) and self.tokens[-1] in self.ends)

    def emit(self, tokens: list[int]) -> int:
        """Appends tokens until the output is finished; returns how many were taken."""
        for taken, token in enumerate(tokens):
            if self.finished:
                return taken
            self.tokens.append(token)
        return len(tokens)


def end_tokens(target: Target) -> frozenset[int]:
    """Every token that ends an output: all of the generation config's, or the tokenizer's where it names none."""
    ends = target.model.generation_config.eos_token_id
    if ends is None:
        ends = target.tokenizer.eos_token_id
    if ends is None:
        return frozenset()
    return frozenset(ends if isinstance(ends, list) else [ends])


@torch.no_grad()
def plain_decode(
    target: Target, prompt: Tensor, config: DecodingConfig, generator: torch.Generator | None = None
) -> Generation:
    """One token for each target pass: the baseline.

    Args:
        prompt: (seq,) int64, on the target's device.
        generator: for temperature > 0.
    """
    started = time.perf_counter()
    kv_cache = target.new_kv_cache()
    output = _Output(end_tokens(target), config.max_new_tokens)
    unread = prompt[None]
    while not output.finished:
        states = target.extend(unread, kv_cache, ())
        kv_cache.crop(0)  # a sliding-window layer drops what has left its window only here
        unread = _choose(target.head.logits(states.final[:, -1]), config, generator)[:, None]
        output.emit(unread[0].tolist())
    return Generation(tokens=output.tokens, accepted=[], acceptance=[], seconds=time.perf_counter() - started)


@torch.no_grad()
def speculative_decode(
    target: Target,
    drafter: Drafter[Any],
    prompt: Tensor,
    config: DecodingConfig,
    generator: torch.Generator | None = None,
) -> Generation:
    """One drafted block for each target pass; the output is the one of `plain_decode` (in distribution, when sampled).

    Args:
        prompt: (seq,) int64, on the device of target and drafter.
        generator: for temperature > 0.
    """
    started = time.perf_counter()
    kv_cache, draft_cache = target.new_kv_cache(), drafter.new_cache(1)
    output = _Output(end_tokens(target), config.max_new_tokens)
    accepted: list[int] = []
    acceptance: list[Tensor] = []
    draft_temperature = config.temperature if config.draft_sampling == "sampled" else 0.0

    states = target.extend(prompt[None], kv_cache, drafter.target_layer_ids)
    kv_cache.crop(0)
    anchor = _choose(target.head.logits(states.final[:, -1]), config, generator)
    committed = torch.cat((prompt[1:], anchor))
    output.emit(anchor.tolist())
    while not output.finished:
        _observe(drafter, draft_cache, states, committed)
        proposal = drafter.propose(
            draft_cache,
            anchor,
            target.head,
            temperature=draft_temperature,
            top_p=config.top_p,
            generator=generator,
        )
        states = target.extend(torch.cat((anchor[:, None], proposal.tokens), 1), kv_cache, drafter.target_layer_ids)
        verdict = _verify(proposal, target.head.logits(states.final), config, generator)
        num_accepted = int(verdict.num_accepted)
        kv_cache.crop(num_accepted - proposal.tokens.shape[1])
        anchor = verdict.next_token
        committed = torch.cat((proposal.tokens[0, :num_accepted], anchor))
        accepted.append(min(num_accepted, output.emit(committed.tolist())))
        acceptance.append(verdict.acceptance[0])
    rows = torch.stack(acceptance).tolist() if acceptance else []
    return Generation(tokens=output.tokens, accepted=accepted, acceptance=rows, seconds=time.perf_counter() - started)


def _observe(drafter: Drafter[Any], draft_cache: object, states: TargetStates, committed: Tensor) -> None:
    """Shows the drafter the positions that are followed by committed tokens; states of rejected drafts come after."""
    count = len(committed)
    verified = TargetStates(layers=states.layers[:, :count], final=states.final[:, :count])
    drafter.observe(draft_cache, verified, committed[None], torch.tensor([count], device=committed.device))


def _choose(logits: Tensor, config: DecodingConfig, generator: torch.Generator | None) -> Tensor:
    """logits: (batch, vocab) -> (batch,)."""
    if config.temperature == 0:
        return logits.argmax(-1)
    return sample(distribution(logits, config.temperature, config.top_p), generator)


def _verify(
    proposal: Proposal, target_logits: Tensor, config: DecodingConfig, generator: torch.Generator | None
) -> Verdict:
    if config.temperature == 0:
        return verify_greedy(proposal, target_logits)
    return verify_sampled(proposal, distribution(target_logits, config.temperature, config.top_p), generator)
