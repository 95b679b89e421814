"""The loss as a schedule of stages: which terms act at which step, with which weights. A pure function of the step.

A schedule cannot lie: every term's weight is known before step 0 and printed, and a term or setting that would never
act is refused.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from rich.console import Console
from rich.table import Table

from draftsmith.models.head import STATISTICS, StatsOptions
from draftsmith.train.terms import Term, TermConfig

NEEDS_TEACHER = frozenset(STATISTICS) - {"ce"}


# Not frozen: OmegaConf locks the elements of a list of a frozen class, and `loss.stages.0...=` could not override them.
@dataclass(slots=True, kw_only=True)
class StageConfig:
    """A stretch of the run with fixed terms.

    Attributes:
        name: what the log calls it.
        terms: its summands.
        steps: its length in optimizer steps; or
        fraction: its length as a share of the run. The last stage may leave out both: it takes what remains.
        fade: over this last share of its own steps it turns linearly into the next stage.
        rewarm_steps: the learning rate climbs again from 0 to the schedule's value over so many steps at the stage's
            start; 0: it goes on as it was. The optimizer's moments go on in either case.
    """

    name: str
    terms: list[TermConfig]
    steps: int | None = None
    fraction: float | None = None
    fade: float = 0.0
    rewarm_steps: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LossConfig:
    """What is minimised, stage by stage.

    Attributes:
        stages: in order.
        lk_eta: eta of LK-hybrid.
        temperature: divides both sides' logits for KL, TV, LK, log alpha, entropy and confidence.
        top_k: compute KL, TV and LK on the teacher's top_k tokens only (over-states acceptance); None: all.
        compile: run the statistics' arithmetic as one compiled kernel, see `StatsOptions`.
    """

    stages: list[StageConfig] = field(default_factory=list)
    lk_eta: float = 3.0
    temperature: float = 1.0
    top_k: int | None = None
    compile: bool = False

    def options(self) -> StatsOptions:
        """The part that belongs to the statistics: `head.with_options(loss.options())`."""
        return StatsOptions(lk_eta=self.lk_eta, temperature=self.temperature, top_k=self.top_k, compile=self.compile)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A line of the printed table: term `term` weighs `weight` in steps first..last (both included)."""

    stage: str
    first: int
    last: int
    term: str
    weight: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """A stage with its place in the run: steps first..last, the last `fade_steps` of them fading into the next."""

    name: str
    weights: dict[str, float]
    first: int
    last: int
    fade_steps: int
    rewarm_steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """The stages laid over a run of total_steps optimizer steps.

    Attributes:
        stages: in order; they tile the run without gap.
        terms: every term of the run by its label.
        total_steps: optimizer steps of the run.
    """

    stages: tuple[Stage, ...]
    terms: dict[str, Term]
    total_steps: int

    @classmethod
    def build(cls, config: LossConfig, total_steps: int, *, has_teacher: bool = True) -> Schedule:
        """Lays out the stages.

        Args:
            has_teacher: whether batches carry the target's states.

        Raises:
            ValueError: lengths that do not fit total_steps, or anything that would never act.
        """
        if not config.stages:
            raise ValueError("loss.stages is empty: choose loss=lk_then_e2e_tv or write at least one stage")
        terms = _collect_terms(config, has_teacher)
        lengths = _lengths(config.stages, total_steps)
        stages, first = [], 0
        for index, (stage, length) in enumerate(zip(config.stages, lengths, strict=True)):
            is_last = index == len(config.stages) - 1
            stages.append(
                Stage(
                    name=stage.name,
                    weights={term.name: term.weight for term in stage.terms},
                    first=first,
                    last=first + length - 1,
                    fade_steps=_fade_steps(stage, length, is_last),
                    rewarm_steps=_rewarm_steps(stage, length, index == 0),
                )
            )
            first += length
        return cls(stages=tuple(stages), terms=terms, total_steps=total_steps)

    def _index(self, step: int) -> int:
        if not 0 <= step < self.total_steps:
            raise ValueError(f"step {step} is outside the run of {self.total_steps} steps (0..{self.total_steps - 1})")
        return next(index for index, stage in enumerate(self.stages) if step <= stage.last)

    def stage(self, step: int) -> str:
        """The name of the stage that a step belongs to."""
        return self.stages[self._index(step)].name

    def weights(self, step: int) -> dict[str, float]:
        """The weight of each term that acts at a step."""
        index = self._index(step)
        stage = self.stages[index]
        into = step - (stage.last - stage.fade_steps)
        if into <= 0:
            return dict(stage.weights)
        share = into / (stage.fade_steps + 1)
        following = self.stages[index + 1].weights
        return {
            label: (1 - share) * stage.weights.get(label, 0.0) + share * following.get(label, 0.0)
            for label in self.terms
            if label in stage.weights or label in following
        }

    def lr_scale(self, step: int) -> float:
        """What the learning rate is multiplied with: below 1 only while a stage re-warms."""
        stage = self.stages[self._index(step)]
        return min(1.0, (step - stage.first + 1) / stage.rewarm_steps) if stage.rewarm_steps else 1.0

    def want(self, step: int) -> tuple[str, ...]:
        """The statistics that the terms of a step need of the target's head."""
        wanted = {name for label in self.weights(step) for name in self.terms[label].wants}
        return tuple(name for name in STATISTICS if name in wanted)

    def table(self) -> list[Row]:
        """Every term's weight over the whole run: (from, to, term, weight) for each stretch."""
        rows = []
        for stage in self.stages:
            fade_first = stage.last - stage.fade_steps + 1
            for first, last in ((stage.first, fade_first - 1), (fade_first, stage.last)):
                if first > last:
                    continue
                start, end = self.weights(first), self.weights(last)
                for label in start:
                    weight = f"{start[label]:.4g}"
                    if end[label] != start[label]:
                        weight += f" -> {end[label]:.4g}"
                    rows.append(Row(stage=stage.name, first=first, last=last, term=label, weight=weight))
        return rows

    def print(self, console: Console) -> None:
        """Prints the table."""
        table = Table("stage", "from", "to", "term", "weight", title="loss schedule (optimizer steps)")
        for row in self.table():
            table.add_row(row.stage, str(row.first), str(row.last), row.term, row.weight)
        console.print(table)


def _collect_terms(config: LossConfig, has_teacher: bool) -> dict[str, Term]:
    """Builds each distinct term once and refuses what would be inert."""
    definitions: dict[str, TermConfig] = {}
    heaviest: dict[str, float] = {}
    for stage in config.stages:
        names = [term.name for term in stage.terms]
        if not names:
            raise ValueError(f"loss stage {stage.name} has no terms")
        for term in stage.terms:
            if names.count(term.name) > 1:
                raise ValueError(
                    f"loss stage {stage.name}: two terms are called {term.name} and one would shadow the other; "
                    "add up their weights, or give one a label"
                )
            if not 0 <= term.weight < math.inf:
                raise ValueError(f"loss term {term.name}: weight={term.weight}; it must be finite and not negative")
            definition = replace(term, weight=1.0)
            if definitions.setdefault(term.name, definition) != definition:
                raise ValueError(
                    f"loss term {term.name} means different things in two stages; give one of them a label"
                )
            heaviest[term.name] = max(heaviest.get(term.name, 0.0), term.weight)
    terms = {name: definition.build() for name, definition in definitions.items()}
    for name, built in terms.items():
        if heaviest[name] == 0:
            raise ValueError(f"loss term {name} is inert: its weight is 0 in every stage; remove it")
        missing = sorted(NEEDS_TEACHER.intersection(built.wants))
        if missing and not has_teacher:
            raise ValueError(
                f"loss term {name} is inert: it needs {', '.join(missing)} and there are no target states; "
                "train with states, or choose loss=ce"
            )
    _check_options(config, {name for term in terms.values() for name in term.wants})
    return terms


def _check_options(config: LossConfig, wanted: set[str]) -> None:
    config.options()  # refuses values out of range before any model is loaded
    default = LossConfig()
    compared = wanted - {"ce", "target_ce", "confidence_logit"}
    if config.lk_eta != default.lk_eta and "lk" not in wanted:
        raise ValueError(f"loss.lk_eta={config.lk_eta} is inert: no stage has an lk term")
    if config.temperature != default.temperature and not compared:
        raise ValueError(f"loss.temperature={config.temperature} is inert: no term compares distributions")
    if config.top_k is not None and not compared:
        raise ValueError(f"loss.top_k={config.top_k} is inert: no term compares distributions")


def _lengths(stages: list[StageConfig], total_steps: int) -> list[int]:
    """Steps of each stage; they add up to total_steps."""
    lengths: list[int] = []
    for index, stage in enumerate(stages):
        is_last = index == len(stages) - 1
        if stage.steps is not None and stage.fraction is not None:
            raise ValueError(f"loss stage {stage.name}: give steps or fraction, not both")
        if stage.fraction is not None and not 0 < stage.fraction <= 1:
            raise ValueError(f"loss stage {stage.name}: fraction={stage.fraction}; it must be above 0 and at most 1")
        if stage.steps is None and stage.fraction is None and not is_last:
            raise ValueError(f"loss stage {stage.name} has no length: give steps or fraction (only the last may not)")
        length = stage.steps if stage.steps is not None else round((stage.fraction or 0) * total_steps)
        remaining = total_steps - sum(lengths)
        if is_last:
            open_ended = stage.steps is None and stage.fraction is None
            rounding = 0 if stage.steps is not None else len(stages)
            if not open_ended and abs(remaining - length) > rounding:
                raise ValueError(
                    f"the loss stages cover {sum(lengths) + length} of {total_steps} steps; leave out the length of "
                    f"the last, {stage.name}, and it takes what remains"
                )
            length = remaining
        if length < 1 or length > remaining:
            raise ValueError(
                f"loss stage {stage.name} is inert: {remaining} of the run's {total_steps} steps are left for it and "
                f"it would have {length}; shorten the stages before it or raise trainer.steps (or trainer.epochs)"
            )
        lengths.append(length)
    return lengths


def _fade_steps(stage: StageConfig, length: int, is_last: bool) -> int:
    if not 0 <= stage.fade <= 1:
        raise ValueError(f"loss stage {stage.name}: fade={stage.fade}; it is a share of the stage's steps, 0 to 1")
    if stage.fade and is_last:
        raise ValueError(f"loss stage {stage.name}: fade={stage.fade} is inert, there is no next stage to fade into")
    steps = round(stage.fade * length)
    if stage.fade and steps == 0:
        raise ValueError(
            f"loss stage {stage.name}: fade={stage.fade} of {length} steps rounds to no step; raise it or set it to 0"
        )
    return steps


def _rewarm_steps(stage: StageConfig, length: int, is_first: bool) -> int:
    if stage.rewarm_steps < 0 or stage.rewarm_steps > length:
        raise ValueError(f"loss stage {stage.name}: rewarm_steps={stage.rewarm_steps}; the stage has {length} steps")
    if stage.rewarm_steps and is_first:
        raise ValueError(
            f"loss stage {stage.name}: rewarm_steps={stage.rewarm_steps} at the start of the run; the optimizer's own "
            "warm-up is meant for that"
        )
    return stage.rewarm_steps
