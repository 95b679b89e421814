"""draftsmith export: writes a checkpoint's drafter as a folder that loads by itself."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from draftsmith.configs.schema import command, register
from draftsmith.models.export import load_drafter, save_drafter
from draftsmith.train.checkpoint import CHECKPOINTS, best_checkpoint, find_checkpoint, refuse_torn


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportConfig:
    """What to export.

    Attributes:
        run: a run folder, such as outputs/NAME.
        checkpoint: last; best, the one with the largest acceptance length (of runs with evaluation.num_prompts); or the
            name of one of its checkpoints, such as step_000100.
    """

    run: str = ""
    checkpoint: str = "last"

    def __post_init__(self) -> None:
        if not self.run:
            raise ValueError("which run? add run=outputs/NAME")


register("export_schema", ExportConfig)


def choose_checkpoint(config: ExportConfig, console: Console) -> Path:
    """The checkpoint's folder; torn ones are refused by name and passed over, loudly, by `last`.

    Raises:
        ValueError: it does not exist or is not whole.
    """
    folder = Path(config.run) / CHECKPOINTS
    if not folder.is_dir():
        raise ValueError(f"run={config.run}: there is no {folder}; give a run folder, such as run=outputs/NAME")
    if config.checkpoint == "last":
        checkpoint, warnings = find_checkpoint(folder)
        for warning in warnings:
            console.print(warning, style="yellow", soft_wrap=True)
        return checkpoint
    if config.checkpoint == "best":
        best = best_checkpoint(folder)
        if best is None:
            raise ValueError(
                f"checkpoint=best: no checkpoint of {config.run} was evaluated; choose checkpoint=last, or train with "
                "evaluation.num_prompts=16"
            )
        return best
    checkpoint = folder / config.checkpoint
    if not checkpoint.is_dir():
        names = ", ".join(sorted(path.name for path in folder.glob("step_*"))) or "none"
        raise ValueError(f"checkpoint={config.checkpoint}: {config.run} has {names}; choose one of them, last or best")
    refuse_torn(checkpoint)
    return checkpoint


@command("export", ExportConfig)
def main(config: ExportConfig) -> None:
    """Loads the checkpoint's drafter, which checks it, and writes it to the run's export folder."""
    console = Console()
    checkpoint = choose_checkpoint(config, console)
    target = Path(config.run) / "export"
    console.print(f"exporting {checkpoint} to {target}", soft_wrap=True, highlight=False)
    with console.status("reading, checking and writing"):
        loaded = load_drafter(checkpoint / "drafter")
        save_drafter(target, loaded.drafter, {**loaded.record, "checkpoint": checkpoint.name})
    console.print(
        f"exported {checkpoint.name}: {type(loaded.drafter).__name__} with {loaded.drafter.num_draft_tokens} drafts a "
        f"round; measure it with: draftsmith evaluate drafter_path={target}",
        soft_wrap=True,
        highlight=False,
    )


if __name__ == "__main__":
    main()
