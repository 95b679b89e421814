"""Measures a drafter by real speculative decoding: which drafter, on which target, over which prompts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from draftsmith.configs.schema import restore
from draftsmith.data.conversations import DataConfig, load_documents
from draftsmith.decode.comparison import Outcome, decode_prompts
from draftsmith.decode.prompts import Prompt, held_out_prompts, read_prompts
from draftsmith.decode.report import check_writable, circumstances, summarise, table, write_report
from draftsmith.decode.speculative import DecodingConfig
from draftsmith.models.drafter import Drafter
from draftsmith.models.export import LoadedDrafter, check_fingerprint, load_drafter
from draftsmith.models.target import DTYPES, Target, TargetConfig

HELD_OUT = "held_out"


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluateConfig(DecodingConfig):
    """What to evaluate; the rest is read from the drafter's own record.

    Attributes:
        drafter_path: a folder that `draftsmith export` wrote, or the drafter folder of a checkpoint.
        target_path: path or id in place of the recorded one (the same weights somewhere else); None: the recorded one.
        revision: branch, tag or commit of a Hugging Face id; None: the recorded one.
        dtype: what target and drafter compute in; None: the recorded one.
        attention: transformers' attention implementation; None: the recorded one.
        device: cpu, cuda or cuda:N; None: the GPU where there is one.
        prompts: held_out (conversations kept from training), or a JSONL file of prompts.
        num_prompts: at most how many.
        thinking: the template's thinking mode; None: the recorded one.
        seed: of drawn tokens at temperature > 0, and of the bootstrap interval.
        output: the file to write; None: evaluation.json in the drafter's folder.
    """

    drafter_path: str = ""
    target_path: str | None = None
    revision: str | None = None
    dtype: str | None = None
    attention: str | None = None
    device: str | None = None
    prompts: str = HELD_OUT
    num_prompts: int = 16
    thinking: bool | None = None
    seed: int = 0
    output: str | None = None

    def __post_init__(self) -> None:
        DecodingConfig.__post_init__(self)
        if not self.drafter_path:
            raise ValueError(
                "which drafter? add drafter_path=outputs/NAME/export, a folder that `draftsmith export` wrote"
            )
        if self.num_prompts < 1:
            raise ValueError(f"num_prompts is {self.num_prompts}; it must be at least 1")
        if self.dtype is not None and self.dtype not in DTYPES:
            raise ValueError(f"dtype is {self.dtype!r}; choose one of {', '.join(DTYPES)}")


def evaluate(config: EvaluateConfig, console: Console) -> dict[str, Any]:
    """Evaluates, prints and writes the report.

    Returns:
        The content of evaluation.json.

    Raises:
        ValueError: the drafter, its target, the prompts, the device or the output cannot be used.
    """
    loaded = load_drafter(Path(config.drafter_path))
    data = restore(DataConfig, loaded.record["data"], "the drafter's record of its data")
    warnings = _thinking_warnings(config.thinking, data.thinking)
    if config.thinking is not None:
        data = replace(data, thinking=config.thinking)
    output = Path(config.output or Path(config.drafter_path) / "evaluation.json")
    check_writable(output)
    device = choose_device(config.device)
    _print_plan(config, loaded, data, output, console)

    target = load_target(config, loaded.record, device)
    drafter = in_dtype_of(loaded.drafter, target)
    prompts = choose_prompts(config.prompts, config.num_prompts, data, target, console)
    longest = max(len(prompt.tokens) for prompt in prompts)
    console.print(f"{len(prompts)} prompts of at most {longest} tokens; each is decoded plainly, then with the drafter")
    outcomes = _decode_with_progress(target, drafter, prompts, config, console)

    report = {
        "drafter": config.drafter_path,
        "run": loaded.record["run"],
        "prompt_set": config.prompts,
        "thinking": data.thinking,
        "warnings": warnings,
        **summarise(outcomes, target, drafter, config, seed=config.seed),
    }
    write_report(output, report)
    console.print(table(report))
    console.print(circumstances(report), highlight=False)
    for warning in warnings:
        console.print(f"WARNING: {warning}", style="yellow", soft_wrap=True)
    console.print(f"written to {output}", soft_wrap=True)
    return report


def choose_device(name: str | None) -> torch.device:
    """The device of this name, or without one the GPU where there is one.

    Raises:
        ValueError: there is no such device here.
    """
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise ValueError(f"device={name}: this is no device; use device=cpu, device=cuda or device=cuda:N")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device={name}: no CUDA device here; use device=cpu")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        last = torch.cuda.device_count() - 1
        raise ValueError(f"device={name}: the last CUDA device here is cuda:{last}; use device=cuda:{last}")
    return device


def load_target(config: EvaluateConfig, record: dict[str, Any], device: torch.device) -> Target:
    """The target that the drafter was trained for, with the chat template it was trained with.

    Raises:
        ValueError: it is not that target.
    """
    trained = restore(TargetConfig, record["target"], "the drafter's record of its target")
    wanted = replace(
        trained,
        path=config.target_path or trained.path,
        revision=config.revision if config.target_path else config.revision or trained.revision,
        attention=config.attention or trained.attention,
    )
    if Path(wanted.path).is_absolute() and not Path(wanted.path).exists():
        raise ValueError(f"the drafter's target {wanted.path} is not there; say where it is with target_path=PATH")
    target = Target.load(wanted, device=device)
    check_fingerprint(record, target)  # of weights in the recorded dtype
    if config.dtype not in (None, trained.dtype):
        target = Target.load(replace(wanted, dtype=str(config.dtype)), device=device)
    target.tokenizer.chat_template = record["chat_template"]
    return target


def in_dtype_of(drafter: Drafter[Any], target: Target) -> Drafter[Any]:
    """The drafter on the target's device and in its dtype, as both decode."""
    return drafter.to(device=target.device, dtype=DTYPES[target.config.dtype])


def _thinking_warnings(wanted: bool | None, trained: bool | None) -> list[str]:
    if wanted in (None, trained):
        return []
    return [
        f"prompts are rendered with thinking={wanted}, the drafter was trained with thinking={trained}: "
        "it drafts text that it was not trained on"
    ]


def choose_prompts(source: str, count: int, data: DataConfig, target: Target, console: Console) -> list[Prompt]:
    """The first `count` prompts of a source.

    Args:
        source: a JSONL file, or held_out: the conversations that training on `data` leaves out.

    Raises:
        ValueError: there are none, or the file cannot be used.
    """
    if source != HELD_OUT:
        return read_prompts(Path(source), target.tokenizer, thinking=data.thinking, count=count)
    if data.held_out_fraction == 0:
        raise ValueError(
            "the drafter was trained with data.held_out_fraction=0, on all there is; give prompts=FILE.jsonl"
        )
    documents = load_documents(data, target.tokenizer, held_out=True)
    documents.report.print(console)
    prompts = held_out_prompts(documents.documents, count)
    if not prompts:
        raise ValueError("no held-out conversation has a prompt before its first answer; give prompts=FILE.jsonl")
    return prompts


def _print_plan(
    config: EvaluateConfig, loaded: LoadedDrafter, data: DataConfig, output: Path, console: Console
) -> None:
    drafter, sampling = loaded.drafter, "greedy"
    if config.temperature > 0:
        sampling = f"temperature {config.temperature}, top-p {config.top_p}, drafts {config.draft_sampling}"
    parameters = sum(parameter.numel() for parameter in drafter.parameters())
    sources = ", ".join(source.path for source in data.sources)
    for line in (
        f"drafter   {config.drafter_path}: {type(drafter).__name__}, {parameters:,} parameters, "
        f"{drafter.num_draft_tokens} drafts a round, of run {loaded.record['run']}",
        f"target    {config.target_path or loaded.record['target']['path']}, "
        f"{config.dtype or loaded.record['target']['dtype']}",
        f"prompts   {f'held out of {sources}' if config.prompts == HELD_OUT else config.prompts}, "
        f"at most {config.num_prompts}, thinking={data.thinking}",
        f"decoding  {sampling}, batch {config.batch_size}, at most {config.max_new_tokens} new tokens: "
        f"{config.num_prompts * config.max_new_tokens:,} target passes at most for the baseline",
        f"output    {output}",
    ):
        console.print(line, soft_wrap=True, markup=False, highlight=False)


def _decode_with_progress(
    target: Target, drafter: Drafter[Any], prompts: list[Prompt], config: EvaluateConfig, console: Console
) -> list[Outcome]:
    columns = (
        TextColumn("decoding"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("", total=len(prompts))
        accepted: list[int] = []

        def show(outcome: Outcome) -> None:
            accepted.extend(outcome.speculative.accepted)
            length = f"acceptance length {1 + sum(accepted) / len(accepted):.2f} so far" if accepted else ""
            progress.update(task, advance=1, description=length)

        return decode_prompts(target, drafter, prompts, config, seed=config.seed, on_outcome=show)
