"""An ablation: drafters trained alike but for what each cell changes, judged by real decoding of the same prompts.

A cell is a list of overrides on top of the settings that all cells share. Every cell is trained with every seed, all
cells with the first seed first, so that a run cut short still compares all cells. In `outputs/<run_name>/`:

- `plain.json`: what the target alone gives for every prompt, decoded once;
- `<cell>_seed<seed>/`: a run folder, and `result.json` once the drafter has decoded every prompt;
- `ablation.json`, `ablation.md`: the table of the finished ones (`train/ablation_table.py`).

What has a file is not done again.
"""

from __future__ import annotations

import json
import re
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from hydra import compose
from hydra.errors import HydraException
from rich.console import Console

from draftsmith.configs.schema import parse, register
from draftsmith.decode.comparison import Outcome, decode_plainly, decode_prompts
from draftsmith.decode.evaluate import choose_prompts, in_dtype_of
from draftsmith.decode.prompts import Prompt
from draftsmith.decode.report import hardware, write_report
from draftsmith.decode.speculative import DecodingConfig, Generation
from draftsmith.models.export import load_drafter
from draftsmith.models.target import Target
from draftsmith.train.ablation_table import markdown, summarise, tables
from draftsmith.train.checkpoint import CHECKPOINTS, find_checkpoint, write_whole
from draftsmith.train.config import TrainConfig
from draftsmith.train.loop import train
from draftsmith.train.run_folder import decisive_settings
from draftsmith.train.world import World

PLAIN, RESULT = "plain.json", "result.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class AblationConfig:
    """What is compared, and on which prompts.

    Attributes:
        cells: for each cell, Hydra overrides of the options that all cells share.
        seeds: every cell is trained with each of them; they are pooled in the table.
        prompts: for each domain, a JSONL file of prompts, or held_out (conversations kept from training).
        num_prompts: at most how many of each domain.
        max_new_tokens: of each output; decoding is greedy.
        batch_size: how many prompts are decoded together, which decides the time it takes and no figure.
    """

    cells: dict[str, list[str]] = field(default_factory=dict)
    seeds: list[int] = field(default_factory=lambda: [0, 1, 2])
    prompts: dict[str, str] = field(default_factory=dict)
    num_prompts: int = 12
    max_new_tokens: int = 48
    batch_size: int = 12

    def __post_init__(self) -> None:
        for name in self.cells:
            if not re.fullmatch(r"[\w.+-]+", name):
                raise ValueError(f"ablation.cells: {name!r} becomes a folder; use letters, digits and _ . + - only")
        if not self.seeds or len(set(self.seeds)) < len(self.seeds):
            raise ValueError(f"ablation.seeds={self.seeds}: give at least one, each once, as in ablation.seeds=[0,1,2]")
        for domain, source in self.prompts.items():
            if not source:
                raise ValueError(
                    f"ablation.prompts.{domain} is not given; add ablation.prompts.{domain}=FILE.jsonl, lines of "
                    f'{{"prompt": text}}, or drop the domain by ~ablation.prompts.{domain}'
                )
        if self.num_prompts < 1:
            raise ValueError(f"ablation.num_prompts={self.num_prompts} must be at least 1")
        if self.max_new_tokens < 2:
            raise ValueError(f"ablation.max_new_tokens={self.max_new_tokens} must be at least 2: one round")
        if self.batch_size < 1:
            raise ValueError(f"ablation.batch_size={self.batch_size} must be at least 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class AblateConfig(TrainConfig):
    """The root of ablate.yaml: the settings of training that all cells share, and what they change."""

    ablation: AblationConfig = field(default_factory=AblationConfig)

    def __post_init__(self) -> None:
        TrainConfig.__post_init__(self)
        if not self.ablation.cells:
            raise ValueError("ablation.cells is empty; choose what to compare, as in experiment=ablation_dfly")
        if not self.ablation.prompts:
            raise ValueError("ablation.prompts is empty; add +ablation.prompts.chat=held_out")
        if self.run_name is None:
            raise ValueError("an ablation goes on by its name; add run_name=NAME")
        if self.resume is not None:
            raise ValueError(f"resume={self.resume}: an ablation goes on by itself where it stopped; remove resume")
        if self.seed != 0:
            raise ValueError(
                f"seed={self.seed}: an ablation trains with ablation.seeds={self.ablation.seeds}; set those"
            )

    @property
    def folder(self) -> Path:
        """Where everything is written."""
        assert self.run_name is not None
        return Path(self.output_dir).resolve() / self.run_name

    def training(self, cell: str, seed: int) -> TrainConfig:
        """The training run of a cell, if this is the cell's configuration."""
        return TrainConfig(
            target=self.target,
            drafter=self.drafter,
            data=self.data,
            states=self.states,
            loss=self.loss,
            optimizer=self.optimizer,
            trainer=self.trainer,
            evaluation=self.evaluation,
            deepspeed=self.deepspeed,
            wandb=self.wandb,
            run_name=f"{cell}_seed{seed}",
            output_dir=str(self.folder),
            resume="auto",
            seed=seed,
        )


register("ablate_schema", AblateConfig)


def compose_cells(shared: AblateConfig, overrides: Sequence[str]) -> dict[str, AblateConfig]:
    """Each cell's configuration. Needs an initialised Hydra, as inside a command.

    Args:
        overrides: those that gave `shared`; a cell's own come after them.

    Raises:
        ValueError: a cell's overrides cannot be composed, or change what all cells share.
    """
    cells = {}
    for name, changes in shared.ablation.cells.items():
        try:
            cell = parse(compose("ablate", [*overrides, *changes]), AblateConfig)
        except (HydraException, ValueError) as error:
            raise ValueError(f"ablation.cells.{name}={changes}: {error}") from error
        if (cell.target, cell.folder, cell.ablation) != (shared.target, shared.folder, shared.ablation):
            raise ValueError(
                f"ablation.cells.{name}={changes}: target, output_dir, run_name and ablation are the same for all "
                "cells; set them outside the cell"
            )
        cells[name] = cell
    return cells


def ablate(config: AblateConfig, overrides: Sequence[str], world: World, console: Console) -> dict[str, Any]:
    """Trains and decodes every cell that has no result yet; prints and writes the table after each.

    Args:
        overrides: those that gave `config`.

    Returns:
        The content of ablation.json.

    Raises:
        ValueError: a cell, the prompts or the data cannot be used, or what is on disk was made with other settings.
    """
    cells = compose_cells(config, overrides)
    runs = [(name, cells[name].training(name, seed)) for seed in config.ablation.seeds for name in cells]
    target = Target.load(config.target, device=world.device)
    prompts = _choose_prompts(config, target, console)
    decoding = DecodingConfig(max_new_tokens=config.ablation.max_new_tokens, batch_size=config.ablation.batch_size)
    given = _decoding_settings(target, prompts, decoding)
    results = [_stored(_result_path(run), given | decisive_settings(run)) for _, run in runs]
    console.print(f"{len(prompts)} prompts; the target alone decodes them once, then each drafter")
    plain = _plain_outputs(config.folder / PLAIN, target, prompts, decoding, given)
    report = _show(config, target, prompts, results, console)
    for place, (name, run) in enumerate(runs):
        if results[place] is not None:
            continue
        console.rule(f"{name}, seed {run.seed}: {place + 1} of {len(runs)}")
        started = time.perf_counter()
        path, _ = find_checkpoint(train(run, world) / CHECKPOINTS)
        trained = time.perf_counter()
        console.print(f"trained in {trained - started:.0f} s; decoding")
        drafter = in_dtype_of(load_drafter(path / "drafter").drafter, target)
        outcomes = decode_prompts(target, drafter, prompts, decoding, plain=plain)
        results[place] = result = {
            "cell": name,
            "seed": run.seed,
            "settings": given | decisive_settings(run),
            "num_draft_tokens": drafter.num_draft_tokens,
            "prompts": [_prompt_record(outcome) for outcome in outcomes],
        }
        write_report(_result_path(run), result)
        console.print(f"decoded in {time.perf_counter() - trained:.0f} s")
        report = _show(config, target, prompts, results, console)
    return report


def _choose_prompts(config: AblateConfig, target: Target, console: Console) -> list[Prompt]:
    """The prompts of all domains, each named by its domain."""
    chosen = []
    for domain, source in config.ablation.prompts.items():
        own = choose_prompts(source, config.ablation.num_prompts, config.data, target, console)
        chosen += [replace(prompt, domain=domain) for prompt in own]
    return chosen


def _decoding_settings(target: Target, prompts: list[Prompt], decoding: DecodingConfig) -> dict[str, Any]:
    """What decides the target's own outputs."""
    hashes: dict[str, Any] = {}
    for prompt in prompts:
        hashes.setdefault(f"ablation.prompts.{prompt.domain} (hashes)", []).append(prompt.hash)
    return {"target fingerprint": target.fingerprint, "ablation.max_new_tokens": decoding.max_new_tokens} | hashes


def _stored(path: Path, settings: dict[str, Any]) -> dict[str, Any] | None:
    """What an earlier start left at this path; None: nothing.

    Raises:
        ValueError: it was made with other settings.
    """
    if not path.exists():
        return None
    stored: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    before = stored["settings"]
    for key in [*before, *(key for key in settings if key not in before)]:
        if before.get(key) != settings.get(key):
            raise ValueError(
                f"{key} was {before.get(key)} in {path} and is {settings.get(key)} now, which decides results; set it "
                "back, or start another ablation with another run_name"
            )
    return stored


def _plain_outputs(
    path: Path, target: Target, prompts: list[Prompt], decoding: DecodingConfig, settings: dict[str, Any]
) -> list[Generation]:
    stored = _stored(path, settings)
    if stored is None:
        outputs = decode_plainly(target, prompts, decoding)
        stored = {"settings": settings, "outputs": [asdict(output) for output in outputs]}
        write_report(path, stored)
    return [Generation(**output) for output in stored["outputs"]]


def _result_path(run: TrainConfig) -> Path:
    assert run.run_name is not None
    return Path(run.output_dir) / run.run_name / RESULT


def _prompt_record(outcome: Outcome) -> dict[str, Any]:
    return {
        "domain": outcome.prompt.domain,
        "hash": outcome.prompt.hash,
        "tokens": outcome.speculative.tokens,
        "accepted": outcome.speculative.accepted,
        "divergence": None if outcome.divergence is None else asdict(outcome.divergence),
    }


def _show(
    config: AblateConfig,
    target: Target,
    prompts: list[Prompt],
    results: Sequence[dict[str, Any] | None],
    console: Console,
) -> dict[str, Any]:
    """Prints and writes what is finished."""
    finished = [result for result in results if result is not None]
    cells = summarise(config.ablation.cells, list(config.ablation.prompts), finished)
    identical = sum(cell["outputs_identical_to_target"] for cell in cells.values())
    outputs = sum(cell["outputs"] for cell in cells.values())
    report = {
        "finished": len(finished),
        "planned": len(results),
        "cells": cells,
        "circumstances": _circumstances(config, target, prompts)
        + f"; {identical} of {outputs} outputs identical to the target's own",
    }
    write_report(config.folder / "ablation.json", report)
    write_whole(config.folder / "ablation.md", markdown(report))
    for table in tables(report):
        console.print(table.rich())
    console.print(report["circumstances"], highlight=False)
    return report


def _circumstances(config: AblateConfig, target: Target, prompts: list[Prompt]) -> str:
    """What the figures mean nothing without."""
    ablation, trainer = config.ablation, config.trainer
    budget = f"{trainer.steps} steps" if trainer.steps is not None else f"{trainer.epochs} epochs"
    data = ", ".join(source.path for source in config.data.sources)
    counts = Counter(prompt.domain for prompt in prompts)
    sets = ", ".join(f"{counts[domain]} {domain} ({Path(source).name})" for domain, source in ablation.prompts.items())
    return (
        f"target {target.config.path}, {target.config.dtype}; trained on {data} for {budget} of "
        f"{trainer.rows_per_step} rows of {config.data.row_tokens} tokens, seeds {ablation.seeds}; prompts: {sets}; at "
        f"most {ablation.max_new_tokens} new tokens, greedy, batch {ablation.batch_size}; {hardware(target.device)}"
    )
