"""The target's frozen vocabulary: embedding, lm_head, and the statistics that every objective is made of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

# What `want` may name. The last two are detached; they stand here because they cost the teacher's product.
STATISTICS = ("ce", "target_ce", "kl", "reverse_kl", "tv", "lk", "log_acceptance", "acceptance", "target_token")


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenStats:
    """Per-position statistics, float32 (tokens int64); None where not wanted.

    p is the target's distribution, q the drafter's. The first seven are differentiable with respect to the drafter and
    given where `want` names them; `acceptance` and `target_token` wherever the teacher is computed, that is, where
    `want` names anything but `ce`; the other detached ones always.

    Attributes:
        ce: -log q(label).
        target_ce: -log q(target_token).
        kl: KL(p || q).
        reverse_kl: KL(q || p).
        tv: total variation, 1/2 sum |p - q|; acceptance probability is 1 - tv.
        lk: LK-hybrid, lambda KL + (1 - lambda) TV with lambda = exp(-eta sg[1 - tv]) for each token.
        log_acceptance: log sum_v min(p_v, q_v).
        acceptance: 1 - TV(p, q) = sum_v min(p_v, q_v), the probability that a draft drawn from q is accepted.
        draft_token: argmax of q.
        target_token: argmax of p.
        label_prob: q(label).
        confidence: max of q.
        entropy: entropy of q, nats.
        confidence_logit: logit of a drafter's own confidence head, differentiable; a drafter that has one sets it.
    """

    ce: Tensor | None = None
    target_ce: Tensor | None = None
    kl: Tensor | None = None
    reverse_kl: Tensor | None = None
    tv: Tensor | None = None
    lk: Tensor | None = None
    log_acceptance: Tensor | None = None
    acceptance: Tensor | None = None
    draft_token: Tensor | None = None
    target_token: Tensor | None = None
    label_prob: Tensor | None = None
    confidence: Tensor | None = None
    entropy: Tensor | None = None
    confidence_logit: Tensor | None = None

    def map(self, change: Callable[[Tensor, float], Tensor]) -> TokenStats:
        """Applies change(value, fill) to every statistic that is there; fill is what stands at invalid entries."""

        def apply(value: Tensor | None, fill: float = 0) -> Tensor | None:
            return None if value is None else change(value, fill)

        return TokenStats(
            ce=apply(self.ce),
            target_ce=apply(self.target_ce),
            kl=apply(self.kl),
            reverse_kl=apply(self.reverse_kl),
            tv=apply(self.tv),
            lk=apply(self.lk),
            log_acceptance=apply(self.log_acceptance),
            acceptance=apply(self.acceptance),
            draft_token=apply(self.draft_token),
            target_token=apply(self.target_token),
            label_prob=apply(self.label_prob, 1),
            confidence=apply(self.confidence),
            entropy=apply(self.entropy),
            confidence_logit=apply(self.confidence_logit),
        )

    def masked(self, valid: Tensor) -> TokenStats:
        """The same with 0 (label_prob 1) at invalid entries, whatever stood there. valid: the statistics' shape."""
        return self.map(lambda value, fill: torch.where(valid, value, fill))


@dataclass(frozen=True, slots=True, kw_only=True)
class StatsOptions:
    """How p and q are compared.

    Attributes:
        lk_eta: eta of LK-hybrid.
        temperature: divides both sides' logits for KL, TV, LK, log alpha, entropy and confidence.
        top_k: compare on the teacher's top_k tokens only, both sides renormalised; None: the whole vocabulary.
    """

    lk_eta: float = 3.0
    temperature: float = 1.0
    top_k: int | None = None


def logit_stats(
    draft_logits: Tensor, target_logits: Tensor, labels: Tensor, want: Sequence[str], lk_eta: float = 3.0
) -> TokenStats:
    """The arithmetic of one chunk, by plain autograd.

    Args:
        draft_logits: (row, vocab).
        target_logits: (row, vocab).
        labels: (row,).
        want: which differentiable statistics to compute.
    """
    log_q = F.log_softmax(draft_logits.float(), dim=-1)
    log_p = F.log_softmax(target_logits.float(), dim=-1)
    p, q = log_p.exp(), log_q.exp()
    ce = -log_q.gather(-1, labels[:, None]).squeeze(-1)
    kl = (p * (log_p - log_q)).sum(-1)
    tv = 0.5 * (p - q).abs().sum(-1)
    lam = torch.exp(-lk_eta * (1 - tv.detach()))
    target_token = p.argmax(-1)
    values = {
        "ce": ce,
        "target_ce": -log_q.gather(-1, target_token[:, None]).squeeze(-1),
        "kl": kl,
        "reverse_kl": (q * (log_q - log_p)).sum(-1),
        "tv": tv,
        "lk": lam * kl + (1 - lam) * tv,
        "log_acceptance": torch.minimum(log_p, log_q).logsumexp(-1),
    }
    detached = q.detach()
    return TokenStats(
        **{name: values[name] for name in want if name in values},
        acceptance=1 - tv.detach(),
        draft_token=detached.argmax(-1),
        target_token=target_token,
        label_prob=(-ce.detach()).exp(),
        confidence=detached.amax(-1),
        entropy=-(detached * log_q.detach()).sum(-1),
    )


class Head:
    """The target's embedding and lm_head. Not a module: it is never trained, sharded or saved with a drafter.

    Args:
        embedding: (vocab, hidden).
        lm_head: (vocab, hidden); the same tensor as embedding where they are tied.
        lm_head_bias: (vocab,) or None.
        embedding_scale: what an embedding row is multiplied with (Gemma, Granite).
        logit_scale: what logits are multiplied with (Cohere, 1 / Granite's logits_scaling).
        logit_softcap: final soft-cap c: logits -> c tanh(logits / c) (Gemma-2).
    """

    def __init__(
        self,
        embedding: Tensor,
        lm_head: Tensor,
        *,
        lm_head_bias: Tensor | None = None,
        embedding_scale: float = 1.0,
        logit_scale: float = 1.0,
        logit_softcap: float | None = None,
        options: StatsOptions = StatsOptions(),
    ) -> None:
        self.embedding = embedding
        self.lm_head = lm_head
        self.lm_head_bias = lm_head_bias
        self.embedding_scale = embedding_scale
        self.logit_scale = logit_scale
        self.logit_softcap = logit_softcap
        self.options = options

    def with_options(self, options: StatsOptions) -> Head:
        """The same head, whose `stats` compares as the options say."""
        return Head(
            self.embedding,
            self.lm_head,
            lm_head_bias=self.lm_head_bias,
            embedding_scale=self.embedding_scale,
            logit_scale=self.logit_scale,
            logit_softcap=self.logit_softcap,
            options=options,
        )

    def embed(self, ids: Tensor) -> Tensor:
        """ids: (...) -> (..., hidden)."""
        return F.embedding(ids, self.embedding) * self.embedding_scale

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden: (..., hidden) -> (..., vocab)."""
        logits = F.linear(hidden, self.lm_head, self.lm_head_bias) * self.logit_scale
        if self.logit_softcap is not None:
            logits = self.logit_softcap * torch.tanh(logits / self.logit_softcap)
        return logits

    def stats(
        self,
        draft_hidden: Tensor,
        target_hidden: Tensor,
        labels: Tensor,
        *,
        want: Sequence[str] = ("ce", "kl", "tv"),
        lk_eta: float | None = None,
    ) -> TokenStats:
        """Statistics of rows.

        Args:
            draft_hidden: (row, hidden), the drafter's states that meet lm_head.
            target_hidden: (row, hidden), the target's final states at the same predictions.
            labels: (row,) int64, the tokens that follow in the data.
            want: names of the differentiable statistics to compute.
        """
        return logit_stats(
            self.logits(draft_hidden),
            self.logits(target_hidden),
            labels,
            want,
            self.options.lk_eta if lk_eta is None else lk_eta,
        )
