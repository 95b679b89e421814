"""What a run says about itself: metrics.jsonl, Weights & Biases, and the terminal."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any

import wandb
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from draftsmith.train.checkpoint import TrainState, write_whole
from draftsmith.train.config import TrainConfig
from draftsmith.train.stages import Schedule
from draftsmith.train.step import StepResult

# Without a terminal there is no bar; then so many lines tell how far a run is.
LINES_WITHOUT_TERMINAL = 20


class MetricsLog:
    """The log of rank 0. Use it as a context manager; on the other ranks nothing is written.

    Args:
        state: where the run begins; lines of later steps, left by an interrupted run, are taken out of metrics.jsonl.
    """

    def __init__(
        self,
        folder: Path,
        config: TrainConfig,
        schedule: Schedule,
        state: TrainState,
        console: Console,
        *,
        writes: bool,
    ) -> None:
        self.schedule = schedule
        self.every_steps = config.trainer.log_every_steps
        self.console = console
        self.writes = writes
        self._since_seconds = time.monotonic()
        self._since_tokens = state.tokens_seen
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
            disable=not (writes and console.is_terminal),
        )
        self._task = self._progress.add_task("training", total=schedule.total_steps, completed=state.step)
        if writes:
            _cut_back(folder / "metrics.jsonl", state.step)
            self._file = (folder / "metrics.jsonl").open("a")
            self._wandb = _start_wandb(folder, config) if config.wandb.mode != "disabled" else None

    def __enter__(self) -> MetricsLog:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()
        if self.writes:
            self._file.close()
            if self._wandb is not None:
                self._wandb.finish(exit_code=0 if kind is None else 1)

    def step_done(self, step: int, epoch: int, lr: float, result: StepResult, state: TrainState) -> None:
        """Takes in the result of one optimizer step (0-based); state is already that after it."""
        last = state.step == self.schedule.total_steps
        if not self.writes:
            return
        if step % self.every_steps == 0 or last or result.loss is None:
            line = self._line(step, epoch, lr, result, state)
            self._file.write(json.dumps(line, allow_nan=False) + "\n")
            self._file.flush()
            if self._wandb is not None:
                self._wandb.log(flatten(line), step=step)
            self._tell(line, last)
        self._progress.update(self._task, completed=state.step)

    def evaluated(self, step: int, report: dict[str, Any] | None) -> None:
        """Takes in what decoding says of the drafter after `step` steps; None: it was not decoded."""
        if report is None or not self.writes:
            return
        length, interval = report["acceptance_length"], report["acceptance_length_interval"]
        line = {"step": step, "acceptance_length": length, "acceptance_length_interval": interval}
        self._file.write(json.dumps(line, allow_nan=False) + "\n")
        self._file.flush()
        if self._wandb is not None:
            self._wandb.log({"decoded/acceptance_length": length}, step=step)
        shown = "no round was decoded" if length is None else f"acceptance length {length:.3f}"
        bounds = "" if interval is None else f" (95 %: {interval[0]:.3f} to {interval[1]:.3f})"
        self.console.print(f"after {step} steps: {shown}{bounds}, decoding {report['num_prompts']} prompts")

    def _line(self, step: int, epoch: int, lr: float, result: StepResult, state: TrainState) -> dict[str, Any]:
        now = time.monotonic()
        rate = (state.tokens_seen - self._since_tokens) / max(now - self._since_seconds, 1e-9)
        self._since_seconds, self._since_tokens = now, state.tokens_seen
        values = {name: ratio.value for name, ratio in result.measured.items()}
        weights = self.schedule.weights(step)
        proxies = {name: value for name, value in values.items() if name.startswith("teacher_forced")}
        expected = [value for name, value in proxies.items() if name.endswith("/expected_accepted")]
        return {
            "step": step,
            "epoch": epoch,
            "stage": self.schedule.stage(step),
            "loss": result.loss,
            "terms": {label: values.get(f"terms/{label}") for label in weights},
            "weights": weights,
            "position_weights": {
                label: values[f"position_weights/{label}"] for label in weights if f"position_weights/{label}" in values
            },
            "lr": lr,
            "grad_norm": result.grad_norm,
            "expected_accepted": expected[0] if expected else None,
            "tokens_per_second": rate,
            "tokens_seen": state.tokens_seen,
            "predictions": int(result.counts.slots),
            "chains": int(result.counts.chains),
            "proxies": proxies,
            "drafter": result.drafter,
        }

    def _tell(self, line: dict[str, Any], last: bool) -> None:
        if line["loss"] is None:
            self.console.print(f"step {line['step']}: no valid prediction in any row; weights unchanged")
            return
        accepted = line["expected_accepted"]
        text = f"{line['stage']}  loss {line['loss']:.4f}"
        text += "" if accepted is None else f"  expected accepted {accepted:.3f} (teacher-forced)"
        self._progress.update(self._task, description=text)
        total = self.schedule.total_steps
        if not self.console.is_terminal and (line["step"] % max(1, total // LINES_WITHOUT_TERMINAL) == 0 or last):
            rate = f"{line['tokens_per_second']:,.0f} tokens/s"
            self.console.print(f"step {line['step'] + 1}/{total}  {text}  lr {line['lr']:.2e}  {rate}", soft_wrap=True)


def flatten(line: dict[str, Any]) -> dict[str, Any]:
    """A line with nested groups spelled as group/name, which is how Weights & Biases groups its charts."""
    flat: dict[str, Any] = {}
    for name, value in line.items():
        if isinstance(value, dict):
            flat.update({f"{name}/{key}" if name != "proxies" else key: item for key, item in value.items()})
        else:
            flat[name] = value
    return flat


def _cut_back(path: Path, step: int) -> None:
    """Takes out the lines of steps that a resumed run will do again, and a last line that was cut off."""
    if not path.exists():
        return
    whole = path.read_text().splitlines(keepends=True)
    kept = [line for line in whole if line.endswith("\n") and json.loads(line)["step"] < step]
    write_whole(path, "".join(kept))


def _start_wandb(folder: Path, config: TrainConfig) -> Any:
    return wandb.init(
        project=config.wandb.project,
        entity=config.wandb.entity,
        mode="online" if config.wandb.mode == "online" else "offline",
        name=folder.name,
        id=folder.name,
        resume="allow",
        dir=str(folder),
        config=asdict(config),
    )
