"""What a run will do, in derived numbers that are printed before any work."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from draftsmith.data.conversations import Documents, load_documents
from draftsmith.data.manifest import CacheManifest
from draftsmith.data.packing import Loader
from draftsmith.models.drafter import Drafter
from draftsmith.models.target import Target
from draftsmith.train.config import TrainConfig, TrainerConfig
from draftsmith.train.stages import Schedule
from draftsmith.train.world import World

# Rows whose grids are counted for the plan's mean number of predictions.
COUNTED_ROWS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchShape:
    """How the rows of one optimizer step are divided.

    rows_per_step = groups x accumulation_steps x rows_per_micro_batch, a group being `sequence_parallel` ranks that
    share their rows.
    """

    world_size: int
    sequence_parallel: int
    rows_per_step: int
    rows_per_micro_batch: int
    accumulation_steps: int

    @classmethod
    def derive(cls, config: TrainerConfig, world_size: int) -> BatchShape:
        """Fills in the one of the three that is not given.

        Raises:
            ValueError: fewer than two are given, or no whole number fits.
        """
        rows, micro, accumulation = config.rows_per_step, config.rows_per_micro_batch, config.accumulation_steps
        groups, rest = divmod(world_size, config.sequence_parallel)
        if rest:
            raise ValueError(
                f"trainer.sequence_parallel={config.sequence_parallel} does not divide the number of ranks "
                f"({world_size}); start a multiple of {config.sequence_parallel} ranks, or set "
                "trainer.sequence_parallel=1 (as preview and cache may, which make the same of it)"
            )
        ranks = f"{groups} {'rank' if config.sequence_parallel == 1 else 'group'}{'s' if groups > 1 else ''}"
        if [rows, micro, accumulation].count(None) > 1:
            raise ValueError(
                f"trainer.rows_per_step={rows}, rows_per_micro_batch={micro}, accumulation_steps={accumulation}: give "
                f"two of the three; the third follows from them and the number of ranks ({world_size})"
            )
        if rows is None:
            assert micro is not None
            assert accumulation is not None
            rows = micro * accumulation * groups
        elif micro is None:
            assert accumulation is not None
            micro = _divide(rows, accumulation, groups, "accumulation_steps", ranks)
        elif accumulation is None:
            accumulation = _divide(rows, micro, groups, "rows_per_micro_batch", ranks)
        elif rows != micro * accumulation * groups:
            raise ValueError(
                f"trainer.rows_per_step={rows} is not rows_per_micro_batch={micro} x accumulation_steps={accumulation} "
                f"x {ranks} = {micro * accumulation * groups}; give two of the three and set the other to null, as "
                "in trainer.accumulation_steps=null"
            )
        return cls(
            world_size=world_size,
            sequence_parallel=config.sequence_parallel,
            rows_per_step=rows,
            rows_per_micro_batch=micro,
            accumulation_steps=accumulation,
        )

    @property
    def sharers(self) -> str:
        """Among whom the rows are divided, in words."""
        if self.sequence_parallel == 1:
            return f"{self.world_size} rank(s)"
        return f"{self.world_size // self.sequence_parallel} group(s) of {self.sequence_parallel} ranks that share rows"

    def own_rows(self, rows: list[int | None], rank: int) -> list[list[int | None]]:
        """One rank's part of an optimizer step's rows, as its micro-batches."""
        size = self.rows_per_micro_batch
        first = rank // self.sequence_parallel * self.accumulation_steps * size
        return [rows[first + i * size : first + (i + 1) * size] for i in range(self.accumulation_steps)]


def _divide(rows: int, other: int, groups: int, name: str, ranks: str) -> int:
    unit = other * groups
    if rows % unit:
        below, above = rows // unit * unit, (rows // unit + 1) * unit
        choices = f"{below} or {above}" if below else f"{above}"
        raise ValueError(
            f"trainer.rows_per_step={rows} is no multiple of {name}={other} x {ranks} = {unit}; choose "
            f"trainer.rows_per_step={choices}, or a {name} that divides it"
        )
    return rows // unit


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan:
    """The derived numbers of a run.

    Attributes:
        documents_digest: hash of the documents in their order.
        num_tokens: tokens of all documents, without padding.
        predictions_per_row: mean number of valid predictions, counted on the first epoch's first rows.
        cache_bytes: size of the target states that the run reads.
    """

    num_documents: int
    num_held_out: int
    documents_digest: str
    num_tokens: int
    num_rows: int
    row_tokens: int
    batch: BatchShape
    steps_per_epoch: int
    total_steps: int
    warmup_steps: int
    predictions_per_row: float
    cache_bytes: int
    trainable_parameters: int
    schedule: Schedule

    @classmethod
    def build(
        cls,
        config: TrainConfig,
        documents: Documents,
        drafter: Drafter[Any],
        *,
        cache_bytes: int,
        batch: BatchShape,
    ) -> RunPlan:
        """Derives the numbers.

        Raises:
            ValueError: what `Schedule.build` refuses, and warm-up longer than the run.
        """
        loader = Loader(documents, row_tokens=config.data.row_tokens, seed=config.seed, states=None)
        steps_per_epoch = -(-loader.num_rows // batch.rows_per_step)
        epochs = config.trainer.epochs
        total_steps = epochs * steps_per_epoch if epochs is not None else config.trainer.steps
        assert total_steps is not None
        warmup_steps = config.optimizer.warmup_steps(total_steps)
        if warmup_steps >= total_steps and warmup_steps > 0:
            raise ValueError(
                f"optimizer.warmup={config.optimizer.warmup} gives {warmup_steps} warm-up steps of {total_steps} in "
                "all; lower it, or train for more steps"
            )
        return cls(
            num_documents=len(documents.documents),
            num_held_out=documents.num_other_side,
            documents_digest=_digest(documents),
            num_tokens=sum(len(document) for document in documents.documents),
            num_rows=loader.num_rows,
            row_tokens=config.data.row_tokens,
            batch=batch,
            steps_per_epoch=steps_per_epoch,
            total_steps=total_steps,
            warmup_steps=warmup_steps,
            predictions_per_row=_predictions_per_row(loader, drafter, config.seed),
            cache_bytes=cache_bytes,
            trainable_parameters=sum(p.numel() for p in drafter.parameters() if p.requires_grad),
            schedule=Schedule.build(config.loss, total_steps),
        )

    def facts(self, target_fingerprint: str) -> dict[str, Any]:
        """What decides the run's results beside its configuration; a resumed run must find it unchanged."""
        return {
            "total_steps": self.total_steps,
            "world_size": self.batch.world_size,
            "num_rows": self.num_rows,
            "documents": self.documents_digest,
            "target": target_fingerprint,
        }

    @property
    def held_out(self) -> str:
        """How many documents evaluation has to itself, in words."""
        if self.num_held_out == 0:
            return "none held out, so evaluation needs prompts=FILE.jsonl"
        return f"{self.num_held_out:,} more held out for evaluation"

    def print(self, console: Console, initialisation: str) -> None:
        """Prints the plan, how the drafter starts (see `Drafter.initialise`) and the schedule of the loss."""
        batch = self.batch
        tokens_per_step = self.num_tokens / self.steps_per_epoch
        predictions_per_step = self.predictions_per_row * self.num_rows / self.steps_per_epoch
        used = self.num_tokens / (self.num_rows * self.row_tokens)
        table = Table("", "", title="plan", show_header=False)
        for name, value in (
            ("documents", f"{self.num_documents:,} with {self.num_tokens:,} tokens; {self.held_out}"),
            ("rows", f"{self.num_rows:,} of {self.row_tokens:,} tokens, {used:.0%} filled"),
            (
                "rows per step",
                f"{batch.rows_per_step} = {batch.rows_per_micro_batch} per micro-batch x {batch.accumulation_steps} "
                f"accumulated x {batch.sharers}",
            ),
            ("tokens per step", f"{tokens_per_step:,.0f}"),
            ("valid predictions per step", f"about {predictions_per_step:,.0f}"),
            ("steps", f"{self.total_steps:,} ({self.steps_per_epoch:,} per epoch), {self.warmup_steps:,} of warm-up"),
            ("target states", f"{self.cache_bytes / 2**20:,.1f} MiB ({self.cache_bytes:,} bytes)"),
            ("trainable parameters", f"{self.trainable_parameters:,}"),
            ("start", initialisation),
        ):
            table.add_row(name, value)
        console.print(table)
        self.schedule.print(console)


def _predictions_per_row(loader: Loader, drafter: Drafter[Any], seed: int) -> float:
    count = min(loader.num_rows, COUNTED_ROWS)
    grids = (drafter.grid(loader.batch([row]), seed=seed, epoch=0) for row in loader.rows(0, 0, count))
    return sum(int(grid.num_slots) for grid in grids) / count


def _digest(documents: Documents) -> str:
    return hashlib.sha256("\n".join(document.id for document in documents.documents).encode()).hexdigest()[:32]


def _check_confidence(schedule: Schedule, drafter: Drafter[Any], console: Console) -> None:
    """Refuses a confidence term where there is no confidence head; warns of a head that no term trains."""
    trained = any("confidence_logit" in term.wants for term in schedule.terms.values())
    if trained and not drafter.has_confidence_head:
        raise ValueError(
            "the loss has the term confidence, and this drafter has no confidence head; choose drafter=dspark (or "
            "drafter.confidence_head=true of a block drafter), or another loss"
        )
    if drafter.has_confidence_head and not trained:
        console.print(
            "WARNING: no term of the loss trains this drafter's confidence head, so its estimates will mean nothing; "
            "choose loss=dspark, add the term {objective: confidence} to a stage of yours, or switch the head off: "
            "drafter.confidence_head=false",
            style="yellow",
            soft_wrap=True,
            markup=False,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """What preview, cache and training begin with.

    Attributes:
        manifest: what a cache of the target's states on these documents must hold.
        initialisation: how the drafter's weights were set, in a sentence.
    """

    target: Target
    documents: Documents
    drafter: Drafter[Any]
    manifest: CacheManifest
    plan: RunPlan
    initialisation: str


def prepare(config: TrainConfig, world: World, console: Console) -> Prepared:
    """Loads target and documents, builds the drafter, derives the plan, and prints what it found.

    Raises:
        ValueError: anything in the configuration, the target or the data that cannot work.
    """
    batch = BatchShape.derive(config.trainer, world.size)
    target = world.first_on_each_machine(lambda: Target.load(config.target, device=world.device))
    documents = world.first_on_each_machine(lambda: load_documents(config.data, target.tokenizer, held_out=False))
    documents.report.print(console)
    torch.manual_seed(config.seed)
    drafter = config.drafter.build(target.spec)
    drafter.check_documents(documents.documents)
    drafter.check_sequence_parallel(config.trainer.sequence_parallel)
    manifest = CacheManifest.of(
        documents.documents,
        target,
        drafter.target_layer_ids,
        rendering={
            "max_length": config.data.max_length,
            "turns": config.data.turns,
            "thinking": config.data.thinking,
        },
        shard_tokens=config.states.shard_tokens,
    )
    plan = RunPlan.build(
        config,
        documents,
        drafter,
        cache_bytes=manifest.num_bytes,
        batch=batch,
    )
    _check_confidence(plan.schedule, drafter, console)
    # Fitting a start can take a minute: after everything that refuses.
    initialisation = drafter.initialise(target, documents.documents)
    plan.print(console, initialisation)
    return Prepared(
        target=target,
        documents=documents,
        drafter=drafter,
        manifest=manifest,
        plan=plan,
        initialisation=initialisation,
    )
