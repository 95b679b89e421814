"""What flows through training: a document, a packed batch of documents, and the target's states for it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """One rendered conversation, whole: what the target sees, and which of it the assistant wrote.

    Attributes:
        tokens: (seq,) int64, the rendered conversation.
        supervised: (seq,) bool, True where the assistant wrote the token, its end-of-turn token included.
        domain: the name of the data source's domain, such as ``chat``.
        id: content hash in two halves, ``<opening>-<content>``: the hash of the conversation's first user message
            (documents that share it are held out together), then the hash of tokens and supervision.
    """

    tokens: Tensor
    supervised: Tensor
    domain: str
    id: str

    def __len__(self) -> int:
        return self.tokens.numel()


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetStates:
    """Hidden states of the frozen target.

    Attributes:
        layers: (batch, seq, layer, hidden), the output of each captured decoder layer, before any norm.
        final: (batch, seq, hidden), after the target's final norm, which is what its lm_head reads.
    """

    layers: Tensor
    final: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Rows of packed documents. Padding is known by position (``document_ids == -1``), never by a token's value.

    Attributes:
        input_ids: (batch, seq) int64.
        supervised: (batch, seq) bool, False at padding.
        document_ids: (batch, seq) int64, equal within a document, -1 at padding. The loader takes 63 bits of the
            document's content hash, so that what is drawn for a document does not depend on where it is packed.
        position_ids: (batch, seq) int64, restarting at 0 in each document.
        states: the target's states on these rows, or None where nobody reads them.
        domain_ids: (batch, seq) int64, an index into the run's list of domains, or None where all are one domain.
    """

    input_ids: Tensor
    supervised: Tensor
    document_ids: Tensor
    position_ids: Tensor
    states: TargetStates | None = None
    domain_ids: Tensor | None = None

    def to(self, device: torch.device | str) -> Batch:
        """The same batch on another device."""
        states = self.states
        if states is not None:
            states = TargetStates(layers=states.layers.to(device), final=states.final.to(device))
        return Batch(
            input_ids=self.input_ids.to(device),
            supervised=self.supervised.to(device),
            document_ids=self.document_ids.to(device),
            position_ids=self.position_ids.to(device),
            states=states,
            domain_ids=None if self.domain_ids is None else self.domain_ids.to(device),
        )
