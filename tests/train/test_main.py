"""The entry, through real launchers."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from draftsmith.train.__main__ import without_local_rank


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        (["--local_rank=1", "seed=3"], ["seed=3"]),
        (["--local-rank=1", "seed=3"], ["seed=3"]),
        (["--local_rank", "1", "seed=3"], ["seed=3"]),
        (["seed=3", "--local-rank", "0"], ["seed=3"]),
        (["--local_rankk=1", "--cfg", "job"], ["--local_rankk=1", "--cfg", "job"]),
        (["seed=3"], ["seed=3"]),
    ],
)
def test_only_the_launchers_rank_is_taken_off(given: list[str], kept: list[str]) -> None:
    assert without_local_rank(given) == kept


def overrides(target: Path, data: Path, **changes: str) -> list[str]:
    settings = {
        "target": "hf",
        "target.path": str(target),
        "data": "files",
        "data.sources": f"[{{path: {data}}}]",
        "data.max_length": "64",
        "data.row_tokens": "64",
        "data.held_out_fraction": "0",
        "drafter.num_layers": "1",
        "drafter.target_layer_ids": "[0, 2]",
        "drafter.anchors_per_document": "8",
        "states.path": "cache",
        "trainer.epochs": "null",
        "trainer.steps": "2",
        "trainer.rows_per_step": "2",
        "run_name": "first",
    }
    return [f"{key}={value}" for key, value in {**settings, **changes}.items()]


def launch(
    command: list[str], folder: Path, *, accelerator: str | None = None, path: str | None = None
) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("DS_", "LOCAL_RANK"))}
    environment["OMP_NUM_THREADS"] = "1"
    if accelerator is not None:
        environment["DS_ACCELERATOR"] = accelerator
    if path is not None:
        environment["PATH"] = path
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=240)


def losses(folder: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


def free_port() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, target_path: Path, conversations: Path) -> Path:
    """Plain Python, no launcher and no compiler in PATH, with a relative data path."""
    folder = tmp_path_factory.mktemp("launches")
    (folder / "mine.jsonl").write_bytes(conversations.read_bytes())
    command = [sys.executable, "-m", "draftsmith.train", *overrides(target_path, Path("mine.jsonl")), "--local_rank=0"]
    done = launch(command, folder, path=str(folder))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "valid predictions per step" in done.stdout
    return folder


def test_plain_python_trains_without_a_compiler_where_the_user_stands(alone: Path) -> None:
    assert len(losses(alone / "outputs" / "first")) == 2
    assert sorted(path.name for path in alone.iterdir()) == ["cache", "mine.jsonl", "outputs"]
    assert (alone / "outputs" / "first" / "checkpoints" / "step_000002" / "complete.json").is_file()
    record = json.loads((alone / "outputs" / "first" / "run.json").read_text())
    assert "run_name=first" in record["argv"]


def test_the_deepspeed_launcher_runs_two_ranks_into_one_folder(alone: Path, target_path: Path) -> None:
    launcher = [str(Path(sys.executable).with_name("deepspeed")), "--num_gpus", "2", "--master_port", free_port()]
    changed = overrides(target_path, Path("mine.jsonl"), run_name="second", deepspeed="zero2")
    done = launch([*launcher, "--module", "draftsmith.train", *changed], alone, accelerator="cpu")
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(path.name for path in (alone / "outputs").iterdir()) == ["first", "second"]
    assert losses(alone / "outputs" / "second") == pytest.approx(losses(alone / "outputs" / "first"), rel=1e-5)


def test_torchrun_goes_on_with_a_run_and_errors_are_one_line(alone: Path, target_path: Path) -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "1", "--master-port", free_port()]
    changed = overrides(target_path, Path("mine.jsonl"), resume="auto", seed="7")
    done = launch([*launcher, "-m", "draftsmith.train", *changed], alone)
    assert done.returncode != 0
    assert "error: resume: seed was 0 in" in done.stderr
    assert "and is 7 now, which decides results" in done.stderr
