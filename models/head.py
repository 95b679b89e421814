"""The target's frozen vocabulary: embedding, lm_head, and the statistics that every objective is made of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F

from draftsmith.models.comparison import DraftVocabulary, logit_stats
from draftsmith.models.readout import Readout, precision_of
from draftsmith.models.token_stats import STATISTICS, StatsOptions, TokenStats, needs_teacher
from draftsmith.models.vocabulary_pass import Job, Workspace, vocabulary_stats

__all__ = ["STATISTICS", "Head", "StatsOptions", "TokenStats", "logit_stats"]


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
    ) -> None:
        self.embedding = embedding
        self.lm_head = lm_head
        self.lm_head_bias = lm_head_bias
        self.embedding_scale = embedding_scale
        self.logit_scale = logit_scale
        self.logit_softcap = logit_softcap
        self.options = StatsOptions()
        self.draft_vocabulary: DraftVocabulary | None = None
        readout = Readout(weight=lm_head.detach(), bias=lm_head_bias, scale=logit_scale, softcap=logit_softcap)
        self._teacher_readout = self._draft_readout = readout
        self._workspace = Workspace()

    def _copy(self) -> Head:
        head = Head(
            self.embedding,
            self.lm_head,
            lm_head_bias=self.lm_head_bias,
            embedding_scale=self.embedding_scale,
            logit_scale=self.logit_scale,
            logit_softcap=self.logit_softcap,
        )
        head.options, head.draft_vocabulary = self.options, self.draft_vocabulary
        head._draft_readout, head._workspace = self._draft_readout, self._workspace
        return head

    def with_options(self, options: StatsOptions) -> Head:
        """The same head, whose `stats` compares as the options say.

        Raises:
            ValueError: top_k exceeds the vocabulary.
        """
        if options.top_k is not None and options.top_k > len(self.lm_head):
            raise ValueError(
                f"top_k={options.top_k} exceeds the vocabulary of {len(self.lm_head)}; null compares on all"
            )
        head = self._copy()
        head.options = options
        return head

    def with_draft_vocabulary(self, ids: Tensor) -> Head:
        """The same head for a drafter that can only propose these tokens.

        Acceptance is then sum_{v in S} min(p_v, q_v) with p over the full vocabulary and TV is 1 minus it; KL sums over
        S; a label outside S has CE 0 and label_prob 0. Token ids stay those of the full vocabulary.

        Args:
            ids: (draft_vocab,) int64, ascending.

        Raises:
            ValueError: ids that are empty, not ascending or not of this vocabulary.
        """
        vocab = len(self.lm_head)
        ascending = ids.numel() > 0 and bool((ids.diff() > 0).all())
        if not ascending or int(ids[0]) < 0 or int(ids[-1]) >= vocab:
            raise ValueError(
                f"the draft vocabulary's {ids.numel()} ids must ascend without repetition inside 0..{vocab - 1}"
            )
        place = torch.full((vocab,), -1, dtype=torch.int64, device=ids.device)
        place[ids] = torch.arange(len(ids), device=ids.device)
        head = self._copy()
        head.draft_vocabulary = DraftVocabulary(ids=ids, place=place)
        head._draft_readout = replace(
            self._teacher_readout,
            weight=self.lm_head.detach()[ids],
            bias=None if self.lm_head_bias is None else self.lm_head_bias[ids],
        )
        return head

    def embed(self, ids: Tensor) -> Tensor:
        """ids: (...) -> (..., hidden)."""
        return F.embedding(ids, self.embedding) * self.embedding_scale

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden: (..., hidden) -> (..., vocab)."""
        logits = F.linear(hidden, self.lm_head, self.lm_head_bias) * self.logit_scale
        if self.logit_softcap is not None:
            logits = self.logit_softcap * torch.tanh(logits / self.logit_softcap)
        return logits

    def teacher_logits(self, target_hidden: Tensor) -> Tensor:
        """The teacher's logits for several calls of `stats`, in a buffer that the next call of this overwrites.

        Args:
            target_hidden: (teacher_row, hidden).

        Returns:
            (teacher_row, vocab), float32 (float64 where the head is).
        """
        hidden = target_hidden.detach().to(self.lm_head.dtype)
        shape, precision = (len(hidden), len(self.lm_head)), precision_of(hidden)
        logits = self._workspace.tile("shared_teacher", *shape, dtype=precision, device=hidden.device)
        self._teacher_readout.write(hidden, logits)
        return logits

    def stats(
        self,
        draft_hidden: Tensor,
        target_hidden: Tensor,
        labels: Tensor,
        *,
        want: Sequence[str] = ("ce", "kl", "tv"),
        lk_eta: float | None = None,
        weight: Tensor | None = None,
        bias: tuple[Tensor, Tensor] | None = None,
        teacher_index: Tensor | None = None,
        teacher_logits: Tensor | None = None,
        uniform: Tensor | None = None,
    ) -> TokenStats:
        """Statistics of rows, chunk by chunk, differentiable in draft_hidden, weight and bias.

        With only draft_hidden to train it costs one vocabulary product for the drafter, one for the teacher (unless
        only CE is wanted) and one for each differentiable statistic in `want`. Training weight or bias computes each
        chunk a second time in backward.

        Args:
            draft_hidden: (row, hidden), the drafter's states that meet lm_head.
            target_hidden: (teacher_row, hidden), the target's final states at the same predictions.
            labels: (row,) int64, the tokens that follow in the data.
            want: names of the statistics to compute, see `TokenStats`.
            lk_eta: eta of LK-hybrid; None: that of the head's options, 3 by default.
            weight: (vocab, hidden), the drafter's own lm_head; None: the target's.
            bias: (row, rank) and (vocab, rank), whose product is added to the drafter's logits (a Markov head).
            teacher_index: (row,) int64, the teacher row of each draft row; None: row i's is i. Rows of one chunk that
                share a teacher row share its product.
            teacher_logits: (teacher_row, vocab), `teacher_logits(target_hidden)` where several calls share it.
            uniform: (row,) float64 in [0, 1): also draw `sampled_token` from q, at the temperature that p and q are
                compared at, by these numbers.

        Raises:
            ValueError: an unknown statistic, shapes that do not fit, or top_k together with a draft vocabulary.
        """
        if teacher_logits is not None and any(x is not None and x.requires_grad for x in (weight, *(bias or ()))):
            raise ValueError(
                "teacher_logits may be overwritten before backward needs them again to train weight or bias"
            )
        readout = self._draft_readout if weight is None else replace(self._draft_readout, weight=weight.detach())
        self._check(draft_hidden, target_hidden, labels, want, readout.weight, teacher_index)
        if uniform is not None and uniform.shape != labels.shape:
            raise ValueError(f"uniform {tuple(uniform.shape)} must be (row,), here {tuple(labels.shape)}")
        job = Job(
            target_hidden=target_hidden.detach().to(self.lm_head.dtype),
            teacher_index=teacher_index,
            teacher_logits=teacher_logits,
            labels=labels,
            uniform=uniform,
            want=tuple(want),
            options=self.options if lk_eta is None else replace(self.options, lk_eta=lk_eta),
            draft_readout=readout,
            teacher_readout=self._teacher_readout,
            draft_vocabulary=self.draft_vocabulary,
            workspace=self._workspace,
        )
        return vocabulary_stats(
            draft_hidden.to(readout.weight.dtype), readout.weight if weight is None else weight, bias, job
        )

    def _check(
        self,
        draft_hidden: Tensor,
        target_hidden: Tensor,
        labels: Tensor,
        want: Sequence[str],
        weight: Tensor,
        teacher_index: Tensor | None,
    ) -> None:
        rows, vocab = len(draft_hidden), len(self._draft_readout.weight)
        if draft_hidden.dim() != 2 or labels.shape != (rows,) or draft_hidden.shape[1:] != target_hidden.shape[1:]:
            raise ValueError(
                f"draft_hidden {tuple(draft_hidden.shape)}, target_hidden {tuple(target_hidden.shape)} and labels "
                f"{tuple(labels.shape)} must be (row, hidden), (teacher_row, hidden) and (row,)"
            )
        paired = len(target_hidden) if teacher_index is None else len(teacher_index)
        if needs_teacher(want) and paired != rows:
            raise ValueError(f"{rows} draft rows have {paired} teacher rows; give teacher_index where rows share one")
        if weight.shape != (vocab, draft_hidden.shape[1]):
            raise ValueError(
                f"weight {tuple(weight.shape)} must be (vocab, hidden), here {(vocab, draft_hidden.shape[1])}"
            )
        if self.draft_vocabulary is not None and self.options.top_k is not None:
            raise ValueError(f"top_k={self.options.top_k} cannot be combined with a draft vocabulary; remove one")
