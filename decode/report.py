"""The figures of an evaluation: as a JSON file that they can all be recomputed from, and as a table for a person."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from draftsmith.decode.acceptance import analytic, pool
from draftsmith.decode.comparison import Outcome
from draftsmith.decode.speculative import DecodingConfig, Generation
from draftsmith.models.drafter import Drafter
from draftsmith.models.target import Target


def summarise(
    outcomes: Sequence[Outcome], target: Target, drafter: Drafter[Any], config: DecodingConfig, *, seed: int = 0
) -> dict[str, Any]:
    """The content of evaluation.json as far as decoding knows it; every figure follows from its `prompts`."""
    greedy = config.temperature == 0
    accepted = [outcome.speculative.accepted for outcome in outcomes]
    speed = _tokens_per_second([outcome.speculative for outcome in outcomes])
    baseline = _tokens_per_second([outcome.plain for outcome in outcomes])
    acceptance = [outcome.speculative.acceptance for outcome in outcomes]
    return {
        **asdict(pool(accepted, drafter.num_draft_tokens, seed=seed)),
        "analytic_acceptance": None if greedy else analytic(accepted, acceptance, drafter.num_draft_tokens),
        "tokens_per_second": speed,
        "baseline_tokens_per_second": baseline,
        "speedup": speed / baseline if speed is not None and baseline is not None else None,
        "identical_to_target": all(o.plain.tokens == o.speculative.tokens for o in outcomes) if greedy else None,
        "distinct_token_share": _distinct_share([outcome.speculative.tokens for outcome in outcomes]),
        "num_prompts": len(outcomes),
        "num_draft_tokens": drafter.num_draft_tokens,
        "temperature": config.temperature,
        "top_p": config.top_p,
        "verification": "greedy" if greedy else "speculative_sampling",
        "draft_sampling": "greedy" if greedy else config.draft_sampling,
        "max_new_tokens": config.max_new_tokens,
        "batch": config.batch_size,
        "seed": seed,
        "target": target.config.path,
        "target_revision": target.config.revision,
        "target_fingerprint": target.fingerprint,
        "dtype": target.config.dtype,
        "attention": target.config.attention,
        "hardware": hardware(target.device),
        "versions": {name: version(name) for name in ("draftsmith", "torch", "transformers")},
        "prompts": [_prompt_record(outcome, greedy) for outcome in outcomes],
    }


def _prompt_record(outcome: Outcome, greedy: bool) -> dict[str, Any]:
    return {
        "id": outcome.prompt.id,
        "hash": outcome.prompt.hash,
        "domain": outcome.prompt.domain,
        "prompt_tokens": outcome.prompt.tokens.tolist(),
        "baseline_tokens": outcome.plain.tokens,
        "tokens": outcome.speculative.tokens,
        "accepted": outcome.speculative.accepted,
        "acceptance": None if greedy else outcome.speculative.acceptance,
        "baseline_seconds": outcome.plain.seconds,
        "seconds": outcome.speculative.seconds,
        "divergence": None if outcome.divergence is None else asdict(outcome.divergence),
    }


def _tokens_per_second(generations: Sequence[Generation]) -> float | None:
    """Tokens of all outputs over their wall time, passes over the prompts included."""
    seconds = sum(generation.seconds for generation in generations)
    return sum(len(generation.tokens) for generation in generations) / seconds if seconds else None


def _distinct_share(outputs: Sequence[list[int]]) -> float | None:
    """Mean over outputs of distinct tokens over tokens: an output that repeats itself is easy to draft."""
    return sum(len(set(tokens)) / len(tokens) for tokens in outputs) / len(outputs) if outputs else None


def hardware(device: torch.device) -> str:
    """The device that decoded, in words."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    cpuinfo = Path("/proc/cpuinfo")
    names = [
        line.partition(":")[2].strip()
        for line in (cpuinfo.read_text().splitlines() if cpuinfo.exists() else [])
        if line.startswith("model name")
    ]
    name = names[0] if names else platform.processor() or platform.machine()
    return f"{name}, {torch.get_num_threads()} threads"


def check_writable(path: Path) -> None:
    """Makes the folder of a report that is yet to be measured, and tries to write there.

    Raises:
        ValueError: the report could not be written.
    """
    advice = "give a file that can be written, such as output=evaluation.json"
    try:
        if path.is_dir():
            raise ValueError(f"output={path} is a folder; {advice}")
        path.parent.mkdir(parents=True, exist_ok=True)
        _partial(path).touch()
        _partial(path).unlink()
    except OSError as error:
        raise ValueError(f"output={path} cannot be written ({error.strerror}: {error.filename}); {advice}") from error


def _partial(path: Path) -> Path:
    return path.with_name(f".{path.name}.partial")


def write_report(path: Path, report: dict[str, Any]) -> None:
    """Writes evaluation.json, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = _partial(path)
    partial.write_text(json.dumps(report, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    os.replace(partial, path)


def read_report(path: Path) -> dict[str, Any]:
    """Reads evaluation.json.

    Raises:
        ValueError: there is none at this path, or it is not one.
    """
    if not path.is_file():
        raise ValueError(f"{path} does not exist; measure a drafter with: draftsmith evaluate drafter_path=FOLDER")
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON ({error}); measure the drafter again") from error
    if not isinstance(report, dict) or "acceptance_length" not in report:
        raise ValueError(f"{path} is not the report of an evaluation: it has no acceptance_length")
    return report


def table(report: dict[str, Any]) -> Table:
    """The figures for a person, both conventions of acceptance length named."""
    shown = Table(title=f"{report['num_prompts']} prompts, {report['num_rounds']} rounds", title_justify="left")
    shown.add_column("figure")
    shown.add_column("value", justify="right")
    interval = report["acceptance_length_interval"]
    low, high = interval if interval is not None else (None, None)
    identical = {True: "true", False: "FALSE", None: "not defined for sampled outputs"}[report["identical_to_target"]]
    rows = [
        ("acceptance length with bonus, pooled", _shown(report["acceptance_length"])),
        ("  95 % interval over prompts", f"{_shown(low)} to {_shown(high)}"),
        ("  mean over prompts", _shown(report["acceptance_length_mean_over_prompts"])),
        ("acceptance length without bonus", _shown(report["acceptance_length_without_bonus"])),
        ("accepted drafts / drafts", _shown(report["draft_acceptance"])),
        ("cumulative acceptance by step", _by_step(report["cumulative"])),
        ("conditional acceptance by step", _by_step(report["conditional"])),
        ("tokens per second", _shown(report["tokens_per_second"])),
        ("  plain decoding", _shown(report["baseline_tokens_per_second"])),
        ("  speedup", _shown(report["speedup"])),
        ("distinct tokens in an output", _shown(report["distinct_token_share"])),
        ("identical to the target alone", identical),
    ]
    if report["analytic_acceptance"] is not None:
        rows.insert(7, ("analytic acceptance by step", _by_step(report["analytic_acceptance"])))
    for row in rows:
        shown.add_row(*row)
    return shown


def circumstances(report: dict[str, Any]) -> str:
    """What a figure of speculative decoding means nothing without."""
    nucleus = f", top-p {report['top_p']:g}" if report["temperature"] > 0 else ""
    thinking = "the template's default" if report["thinking"] is None else str(report["thinking"]).lower()
    return (
        f"target {report['target']}, {report['dtype']}; {report['num_draft_tokens']} drafts a round, drawn "
        f"{report['draft_sampling']}; temperature {report['temperature']:g}{nucleus}, {report['verification']}; "
        f"prompts {report['prompt_set']}, at most {report['max_new_tokens']} new tokens, thinking: {thinking}, batch "
        f"{report['batch']}; {report['hardware']}"
    )


def _by_step(values: Sequence[float | None]) -> str:
    return " ".join("-" if value is None else f"{value:.2f}" for value in values)


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
