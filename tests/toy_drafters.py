"""Drafters with known behaviour, for tests of decoding: they need no training."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from draftsmith.data.batch import TargetStates
from draftsmith.models.drafter import Drafter, Proposal
from draftsmith.models.sampling import distribution, sample


@dataclass
class Seen:
    """What a toy drafter was shown: the states, and the token after each of their positions."""

    final: list[Tensor] = field(default_factory=list)
    layers: list[Tensor] = field(default_factory=list)
    next_ids: list[int] = field(default_factory=list)


class ToyDrafter(Drafter[Seen]):
    """Keeps what it is shown; drafts from `logits(seen, chain)`, where chain is the anchor and the drafts so far."""

    def __init__(self, num_draft_tokens: int, target_layer_ids: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.num_draft_tokens = num_draft_tokens
        self.target_layer_ids = target_layer_ids
        self.caches: list[Seen] = []

    def logits(self, seen: Seen, chain: list[int]) -> Tensor:
        """(vocab,)."""
        raise NotImplementedError

    def new_cache(self, batch_size: int) -> Seen:
        assert batch_size == 1
        self.caches.append(Seen())
        return self.caches[-1]

    def observe(self, cache: Seen, states: TargetStates, next_ids: Tensor, lengths: Tensor) -> None:
        count = int(lengths)
        assert next_ids.shape == (1, count) == states.final.shape[:2] == states.layers.shape[:2]
        cache.final.append(states.final[0])
        cache.layers.append(states.layers[0])
        cache.next_ids.extend(next_ids[0].tolist())

    def propose(
        self,
        cache: Seen,
        anchor_ids: Tensor,
        target_head: Any,
        *,
        temperature: float = 0.0,
        top_p: float = 1.0,
        generator: torch.Generator | None = None,
    ) -> Proposal:
        assert anchor_ids.tolist() == cache.next_ids[-1:]
        chain, probs = [int(anchor_ids)], []
        for _ in range(self.num_draft_tokens):
            logits = self.logits(cache, chain)
            if temperature == 0:
                chain.append(int(logits.argmax()))
            else:
                probs.append(distribution(logits, temperature, top_p))
                chain.append(int(sample(probs[-1], generator)))
        return Proposal(
            tokens=torch.tensor([chain[1:]], dtype=torch.int64),
            probs=torch.stack(probs)[None] if probs else None,
            confidence=torch.ones(1, self.num_draft_tokens),
        )

    def initialise(self, target: Any, documents: Any = ()) -> str:
        raise NotImplementedError

    def forward(self, *args: Any) -> Any:
        raise NotImplementedError

    def hidden(self, *args: Any) -> Any:
        raise NotImplementedError


class RandomDrafter(ToyDrafter):
    """Draws logits anew for each draft: mostly rejected."""

    def __init__(self, num_draft_tokens: int, vocab_size: int, **kwargs: Any) -> None:
        super().__init__(num_draft_tokens, **kwargs)
        self.vocab_size = vocab_size
        self.source = torch.Generator().manual_seed(0)

    def logits(self, seen: Seen, chain: list[int]) -> Tensor:
        return torch.randn(self.vocab_size, generator=self.source)


class TableDrafter(ToyDrafter):
    """Drafts from a table by the last token."""

    def __init__(self, num_draft_tokens: int, table: Tensor, **kwargs: Any) -> None:
        super().__init__(num_draft_tokens, **kwargs)
        self.table = table

    def logits(self, seen: Seen, chain: list[int]) -> Tensor:
        return self.table[chain[-1]]


class PerfectDrafter(ToyDrafter):
    """The target itself, run without a cache; `first_token` is what the prompt starts with, which nobody is shown."""

    def __init__(
        self, num_draft_tokens: int, target_logits: Callable[[Tensor], Tensor], first_token: int, **kwargs: Any
    ) -> None:
        super().__init__(num_draft_tokens, **kwargs)
        self.target_logits = target_logits
        self.first_token = first_token

    def logits(self, seen: Seen, chain: list[int]) -> Tensor:
        tokens = [self.first_token, *seen.next_ids, *chain[1:]]
        return self.target_logits(torch.tensor([tokens]))[0, -1]


class SideBySide(ToyDrafter):
    """One drafter for each request of a batch; a finished request (length 0) is shown nothing."""

    def __init__(self, drafters: list[ToyDrafter]) -> None:
        super().__init__(drafters[0].num_draft_tokens)
        self.drafters = drafters

    def new_cache(self, batch_size: int) -> Any:
        assert batch_size == len(self.drafters)
        return [drafter.new_cache(1) for drafter in self.drafters]

    def observe(self, cache: Any, states: TargetStates, next_ids: Tensor, lengths: Tensor) -> None:
        for i, count in enumerate(lengths.tolist()):
            own = TargetStates(layers=states.layers[i : i + 1, :count], final=states.final[i : i + 1, :count])
            self.drafters[i].observe(cache[i], own, next_ids[i : i + 1, :count], lengths[i : i + 1])

    def propose(self, cache: Any, anchor_ids: Tensor, target_head: Any, **sampling: Any) -> Proposal:
        each = [
            drafter.propose(own, anchor_ids[i : i + 1], target_head, **sampling)
            for i, (drafter, own) in enumerate(zip(self.drafters, cache, strict=True))
        ]
        return Proposal(
            tokens=torch.cat([proposal.tokens for proposal in each]),
            probs=None,
            confidence=torch.cat([proposal.confidence for proposal in each]),
        )
