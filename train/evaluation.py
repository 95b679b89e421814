"""What a drafter is worth while it trains: real decoding at every checkpoint, of which the best one is kept.

A loss may go on falling while the target accepts less.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from draftsmith.decode.comparison import check_lengths, decode_plainly, decode_prompts
from draftsmith.decode.evaluate import choose_prompts, in_dtype_of
from draftsmith.decode.prompts import Prompt
from draftsmith.decode.report import summarise, write_report
from draftsmith.decode.speculative import DecodingConfig, Generation
from draftsmith.models.export import load_drafter
from draftsmith.models.target import Target
from draftsmith.train.checkpoint import EVALUATION
from draftsmith.train.config import TrainConfig
from draftsmith.train.world import World


class CheckpointEvaluation:
    """Decodes the same prompts with the drafter of each checkpoint, greedily, on rank 0.

    The target's own outputs are made once, at the start, so that a target or prompts that cannot be decoded are refused
    before the first step. Rank 0 keeps the whole target for it, where cached states would need its head alone.

    Raises:
        ValueError: the target or the prompts cannot be decoded.
    """

    def __init__(
        self, config: TrainConfig, target: Target, num_draft_tokens: int, world: World, console: Console
    ) -> None:
        self.config = config.evaluation
        self.world = world
        self._decoding = DecodingConfig(
            max_new_tokens=self.config.max_new_tokens, batch_size=max(1, min(self.config.batch_size, self.num_prompts))
        )
        self._target = target if world.rank == 0 and self.num_prompts else None
        self._prompts: Sequence[Prompt] = ()
        self._plain: Sequence[Generation] = ()
        if self.num_prompts:
            console.print(
                f"evaluation at every checkpoint: at most {self.num_prompts} prompts ({self.config.prompts}), "
                f"{self.config.max_new_tokens} new tokens each; the target alone decodes them now",
                soft_wrap=True,
            )
            world.decided_by_rank_zero(lambda: self._decode_plainly(config, num_draft_tokens))

    @property
    def num_prompts(self) -> int:
        """At most how many prompts are decoded; 0: none."""
        return self.config.num_prompts

    def _decode_plainly(self, config: TrainConfig, num_draft_tokens: int) -> None:
        assert self._target is not None
        self._prompts = choose_prompts(
            self.config.prompts, self.num_prompts, config.data, self._target, Console(quiet=True)
        )
        check_lengths(self._target, self._prompts, self._decoding, num_draft_tokens)
        self._plain = decode_plainly(self._target, self._prompts, self._decoding)

    def measure(self, checkpoint: Path) -> dict[str, Any] | None:
        """The report on a checkpoint, on every rank: what `draftsmith evaluate` writes, kept in its folder.

        None: checkpoints are not evaluated.
        """
        return self.world.decided_by_rank_zero(lambda: self._measure(checkpoint)) if self.num_prompts else None

    def _measure(self, checkpoint: Path) -> dict[str, Any]:
        assert self._target is not None
        path = checkpoint / EVALUATION
        if path.exists():
            stored: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            outputs = [(one["prompt_tokens"], one["baseline_tokens"]) for one in stored["prompts"]]
            ours = zip(self._prompts, self._plain, strict=True)
            if outputs == [(prompt.tokens.tolist(), plain.tokens) for prompt, plain in ours]:
                return stored
        loaded = load_drafter(checkpoint / "drafter")
        drafter = in_dtype_of(loaded.drafter, self._target)
        outcomes = decode_prompts(self._target, drafter, self._prompts, self._decoding, plain=self._plain)
        report = {
            "drafter": str(checkpoint / "drafter"),
            "run": loaded.record["run"],
            "prompt_set": self.config.prompts,
            "thinking": loaded.record["data"]["thinking"],
            "warnings": [],
            **summarise(outcomes, self._target, drafter, self._decoding),
        }
        write_report(path, report)
        return report
