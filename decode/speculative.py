"""Plain and speculative decoding of a batch of requests with the target's KV cache.

Both start with one pass over the prompts, which gives the first tokens. From then on plain decoding reads one token of
each request in each target pass. Speculative decoding reads the last committed token (the anchor) and the drafter's
proposal in one pass, and keeps what the target agrees with.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

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
        batch_size: how many requests are decoded together, at temperature 0. Acceptance is the same for every size;
            speed at 1 is that of one user alone.
    """

    max_new_tokens: int = 128
    temperature: float = 0.0
    top_p: float = 1.0
    draft_sampling: str = "sampled"
    batch_size: int = 1

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens is {self.max_new_tokens}; it must be at least 1")
        if not self.temperature >= 0:
            raise ValueError(f"temperature is {self.temperature}; it must be 0 (greedy) or above")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}; it must be in (0, 1], and 1 keeps every token")
        if self.draft_sampling not in DRAFT_SAMPLING:
            raise ValueError(f"draft_sampling is {self.draft_sampling!r}; choose one of {', '.join(DRAFT_SAMPLING)}")
        if self.batch_size < 1:
            raise ValueError(f"batch_size is {self.batch_size}; it must be at least 1")
        if self.batch_size > 1 and self.temperature > 0:
            raise ValueError(
                f"batch_size is {self.batch_size} at temperature {self.temperature}: what is drawn for a prompt must "
                "not depend on the others; set batch_size=1, or temperature=0"
            )

    @property
    def draft_temperature(self) -> float:
        """What drafts are drawn at; 0: they are the drafter's argmax."""
        return self.temperature if self.draft_sampling == "sampled" else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """One output and how it came about.

    Attributes:
        tokens: the output, its end token included.
        accepted: for each round (target pass after the prompt's), how many of its drafts were emitted.
        acceptance: for each round, the analytic acceptance probability of each step, `Verdict.acceptance`.
        seconds: wall time from the prompt to the last token, the pass over the prompt included; of requests that
            were decoded together, the equal share of each.
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
    target: Target, prompts: Sequence[Tensor], config: DecodingConfig, generator: torch.Generator | None = None
) -> list[Generation]:
    """One token of each request for each target pass: the baseline.

    Args:
        prompts: each (seq,) int64, on the target's device; decoded together, as one batch.
        generator: for temperature > 0.

    Raises:
        ValueError: several prompts, and a target that takes only one at a time.
    """
    started = time.perf_counter()
    kv_cache = target.new_kv_cache(len(prompts))
    outputs = _outputs(target, prompts, config)
    unread, counts = pad_sequence(list(prompts), batch_first=True), [len(prompt) for prompt in prompts]
    while not all(output.finished for output in outputs):
        states = target.extend(unread, kv_cache, ())
        kv_cache.keep(counts)
        unread = _choose(target.head.logits(_newest(states.final, counts)), config, generator)[:, None]
        counts = [output.emit(tokens) for output, tokens in zip(outputs, unread.tolist(), strict=True)]
    seconds = (time.perf_counter() - started) / len(prompts)
    return [Generation(tokens=output.tokens, accepted=[], acceptance=[], seconds=seconds) for output in outputs]


@torch.no_grad()
def speculative_decode(
    target: Target,
    drafter: Drafter[Any],
    prompts: Sequence[Tensor],
    config: DecodingConfig,
    generator: torch.Generator | None = None,
) -> list[Generation]:
    """One drafted block of each request for each target pass.

    The outputs are those of `plain_decode` (in distribution, when sampled).

    Args:
        prompts: each (seq,) int64, on the device of target and drafter; decoded together, as one batch.
        generator: for temperature > 0.

    Raises:
        ValueError: several prompts, and a target that takes only one at a time.
    """
    started = time.perf_counter()
    kv_cache, draft_cache = target.new_kv_cache(len(prompts)), drafter.new_cache(len(prompts))
    outputs = _outputs(target, prompts, config)
    accepted: list[list[int]] = [[] for _ in prompts]
    acceptance: list[list[list[float]]] = [[] for _ in prompts]

    prompt_ids, counts = pad_sequence(list(prompts), batch_first=True), [len(prompt) for prompt in prompts]
    states = target.extend(prompt_ids, kv_cache, drafter.target_layer_ids)
    kv_cache.keep(counts)
    anchor = _choose(target.head.logits(_newest(states.final, counts)), config, generator)
    for output, token in zip(outputs, anchor.tolist(), strict=True):
        output.emit([token])
    following = _place_next(prompt_ids[:, 1:], counts, anchor)
    while not all(output.finished for output in outputs):
        _observe(drafter, draft_cache, states, following, counts)
        proposal = drafter.propose(
            draft_cache,
            anchor,
            target.head,
            temperature=config.draft_temperature,
            top_p=config.top_p,
            generator=generator,
        )
        states = target.extend(torch.cat((anchor[:, None], proposal.tokens), 1), kv_cache, drafter.target_layer_ids)
        verdict = _verify(proposal, target.head.logits(states.final), config, generator)
        # A finished request stays in the batch and takes nothing in any more.
        going = [not output.finished for output in outputs]
        num_accepted = verdict.num_accepted.tolist()
        counts = [(count + 1) * goes for count, goes in zip(num_accepted, going, strict=True)]
        kv_cache.keep(counts)
        anchor = torch.where(torch.tensor(going, device=anchor.device), verdict.next_token, anchor)
        following = _place_next(proposal.tokens, counts, anchor)
        for request, (tokens, rates) in enumerate(zip(following.tolist(), verdict.acceptance.tolist(), strict=True)):
            if going[request]:
                emitted = outputs[request].emit(tokens[: counts[request]])
                accepted[request].append(min(num_accepted[request], emitted))
                acceptance[request].append(rates)
    seconds = (time.perf_counter() - started) / len(prompts)
    return [
        Generation(tokens=output.tokens, accepted=accepted[i], acceptance=acceptance[i], seconds=seconds)
        for i, output in enumerate(outputs)
    ]


def _outputs(target: Target, prompts: Sequence[Tensor], config: DecodingConfig) -> list[_Output]:
    ends = end_tokens(target)
    return [_Output(ends, config.max_new_tokens) for _ in prompts]


def _newest(states: Tensor, counts: list[int]) -> Tensor:
    """The last real position of each request. states: (batch, seq, hidden), left-aligned -> (batch, hidden)."""
    last = torch.tensor(counts, device=states.device) - 1
    return states[torch.arange(len(counts), device=states.device), last.clamp(min=0)]


def _place_next(tokens: Tensor, counts: list[int], next_token: Tensor) -> Tensor:
    """The token after each of the newest positions: their own, and next_token after the last of them.

    Args:
        tokens: (batch, seq - 1), the tokens of the positions but for the first.
        counts: how many of the seq positions are real in each request.

    Returns:
        (batch, seq).
    """
    last = (torch.tensor(counts, device=tokens.device) - 1).clamp(min=0)
    return torch.cat((tokens, next_token[:, None]), dim=1).scatter(1, last[:, None], next_token[:, None])


def _observe(
    drafter: Drafter[Any], draft_cache: object, states: TargetStates, following: Tensor, counts: list[int]
) -> None:
    """Shows the drafter the positions that are followed by committed tokens; states of rejected drafts come after."""
    most = max(counts)
    verified = TargetStates(layers=states.layers[:, :most], final=states.final[:, :most])
    drafter.observe(draft_cache, verified, following[:, :most], torch.tensor(counts, device=following.device))


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
