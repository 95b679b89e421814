"""Decodes prompts twice, plainly and speculatively, by two independent calls."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from draftsmith.decode.prompts import Prompt
from draftsmith.decode.speculative import DecodingConfig, Generation, plain_decode, speculative_decode
from draftsmith.models.drafter import Drafter
from draftsmith.models.target import Target

WARM_UP_TOKENS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """Where the two greedy outputs of a prompt first differ.

    Attributes:
        position: index in the output.
        token: of plain decoding; None where its output had ended.
        speculative_token: likewise.
        top2_gap: the target's largest logit there minus the second: a tiny one is a tie that rounding decides.
    """

    position: int
    token: int | None
    speculative_token: int | None
    top2_gap: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One prompt, decoded plainly and speculatively by two independent calls."""

    prompt: Prompt
    plain: Generation
    speculative: Generation
    divergence: Divergence | None


def decode_prompts(
    target: Target,
    drafter: Drafter[Any],
    prompts: Sequence[Prompt],
    config: DecodingConfig,
    *,
    plain: Sequence[Generation] | None = None,
    seed: int = 0,
    on_outcome: Callable[[Outcome], None] = lambda outcome: None,
) -> list[Outcome]:
    """Decodes every prompt twice, plainly and speculatively.

    Args:
        drafter: on the target's device, in its dtype.
        plain: what `decode_plainly` gave for these prompts, to compare many drafters; None: decoded here, next to each
            speculative decode, as a comparison of speed needs.
        seed: at temperature > 0, of both decodes; what is drawn for a prompt does not depend on the other prompts.
        on_outcome: called after each prompt.

    Raises:
        ValueError: a prompt for which target positions do not suffice.
    """
    check_lengths(target, prompts, config, drafter.num_draft_tokens)
    short = replace(config, max_new_tokens=min(WARM_UP_TOKENS, config.max_new_tokens))
    for prompt in prompts[:1]:  # the first calls pay for lazy initialisation, which is not decoding
        _plain(target, [prompt], short, seed)
        _speculative(target, drafter, [prompt], short, seed)
    outcomes = []
    for start in range(0, len(prompts), config.batch_size):
        batch = prompts[start : start + config.batch_size]
        baseline = _plain(target, batch, config, seed) if plain is None else plain[start : start + len(batch)]
        generations = _speculative(target, drafter, batch, config, seed)
        for prompt, one, other in zip(batch, baseline, generations, strict=True):
            divergence = None
            if config.temperature == 0 and one.tokens != other.tokens:
                divergence = _first_divergence(target, prompt, one.tokens, other.tokens)
            outcomes.append(Outcome(prompt=prompt, plain=one, speculative=other, divergence=divergence))
            on_outcome(outcomes[-1])
    return outcomes


def check_lengths(target: Target, prompts: Sequence[Prompt], config: DecodingConfig, num_draft_tokens: int) -> None:
    """Refuses prompts for which target positions do not suffice (ValueError)."""
    longest = target.spec.max_position_embeddings - config.max_new_tokens - num_draft_tokens
    for prompt in prompts:
        if len(prompt.tokens) > longest:
            raise ValueError(
                f"prompt {prompt.id} has {len(prompt.tokens)} tokens; with max_new_tokens={config.max_new_tokens} and "
                f"{num_draft_tokens} drafts the target's {target.spec.max_position_embeddings} positions leave "
                f"{longest}; lower max_new_tokens, or take other prompts"
            )


def decode_plainly(
    target: Target, prompts: Sequence[Prompt], config: DecodingConfig, *, seed: int = 0
) -> list[Generation]:
    """Decodes every prompt with the target alone; see `decode_prompts`."""
    starts = range(0, len(prompts), config.batch_size)
    return [one for start in starts for one in _plain(target, prompts[start : start + config.batch_size], config, seed)]


def _plain(target: Target, batch: Sequence[Prompt], config: DecodingConfig, seed: int) -> list[Generation]:
    generator = _generator(target.device, seed, batch[0], "plain")
    return plain_decode(target, _tokens(batch, target.device), config, generator)


def _speculative(
    target: Target, drafter: Drafter[Any], batch: Sequence[Prompt], config: DecodingConfig, seed: int
) -> list[Generation]:
    generator = _generator(target.device, seed, batch[0], "speculative")
    return speculative_decode(target, drafter, _tokens(batch, target.device), config, generator)


def _tokens(batch: Sequence[Prompt], device: torch.device) -> list[Tensor]:
    return [prompt.tokens.to(device) for prompt in batch]


def _generator(device: torch.device, seed: int, prompt: Prompt, purpose: str) -> torch.Generator:
    digest = hashlib.blake2b(f"{seed}:{prompt.hash}:{purpose}".encode(), digest_size=8).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest, "little") >> 1)


@torch.no_grad()
def _first_divergence(target: Target, prompt: Prompt, plain: list[int], speculative: list[int]) -> Divergence:
    pairs = zip_longest(plain, speculative)
    shared = next(index for index, (one, other) in enumerate(pairs) if one != other)
    text = torch.cat((prompt.tokens, torch.tensor(plain[:shared], dtype=torch.int64))).to(target.device)
    logits = target.head.logits(target.states(text[None], ()).final[0, -1]).float()
    first, second = logits.topk(2).values.tolist()
    return Divergence(
        position=shared,
        token=plain[shared] if shared < len(plain) else None,
        speculative_token=speculative[shared] if shared < len(speculative) else None,
        top2_gap=first - second,
    )
