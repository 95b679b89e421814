"""The run folder: decided once by rank 0, its records, and what must not change when a run goes on."""

from __future__ import annotations

import json
import os
import platform
import secrets
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf

from draftsmith.train.checkpoint import CHECKPOINTS, clear_later, find_checkpoint, refuse_torn, write_whole
from draftsmith.train.config import TrainConfig

# Where a run writes, what it logs and keeps: changing these changes no weight.
FREE_TO_CHANGE = (
    "output_dir",
    "run_name",
    "resume",
    "wandb",
    "states",
    "evaluation",
    "trainer.log_every_steps",
    "trainer.checkpoint_every_steps",
    "trainer.keep_checkpoints",
)
RECORDED_VERSIONS = ("draftsmith", "torch", "deepspeed", "transformers", "hydra-core", "safetensors", "numpy")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFolder:
    """Where a run writes, and the checkpoint that it goes on from.

    Attributes:
        path: absolute.
        checkpoint: folder of the step to resume from; None: start at step 0.
        notes: what the user should know about how this was decided.
    """

    path: Path
    checkpoint: Path | None
    notes: tuple[str, ...] = ()


def choose_run_folder(config: TrainConfig) -> RunFolder:
    """Chooses a new run folder, or finds the one to resume. Rank 0 only: the other ranks are told.

    A new folder is made by `write_records`, once nothing can be refused any more.

    Raises:
        ValueError: the folder holds another run or cannot be made, or what should be resumed cannot be.
    """
    if config.run_name is not None and Path(config.run_name).name != config.run_name:
        raise ValueError(f"run_name={config.run_name} is no plain folder name; say where it lies by output_dir=...")
    if config.resume is None:
        return RunFolder(path=_new_folder(config), checkpoint=None)
    if config.resume == "auto":
        if config.run_name is None:
            raise ValueError("resume=auto finds a run by its name; add run_name=...")
        path = Path(config.output_dir).resolve() / config.run_name
        checkpoints = path / CHECKPOINTS
        if not any(checkpoints.glob("step_*")):
            _make_writable(path.parent)
            note = f"resume=auto: no checkpoint in {path}, starting anew"
            folder = RunFolder(path=path, checkpoint=None, notes=(note,))
        else:
            checkpoint, notes = find_checkpoint(checkpoints)
            folder = RunFolder(path=path, checkpoint=checkpoint, notes=notes)
    else:
        folder = _explicit(config, Path(config.resume).resolve())
    if (folder.path / "config.yaml").exists():
        refuse_changed_config(folder.path, config)
    elif folder.checkpoint is not None:
        raise ValueError(f"{folder.path} has checkpoints but no config.yaml, so what it trained is unknown")
    if folder.checkpoint is not None:
        clear_later(folder.path / CHECKPOINTS, folder.checkpoint)
    return folder


def _new_folder(config: TrainConfig) -> Path:
    root = Path(config.output_dir).resolve()
    _make_writable(root)
    # The suffix keeps two runs of one second apart.
    path = root / (config.run_name or f"{datetime.now():%Y-%m-%d_%H-%M-%S}_{secrets.token_hex(3)}")
    if path.exists() and any(path.iterdir()):
        raise ValueError(
            f"{path} is not empty; go on with that run by resume=auto, or choose another run_name than "
            f"{config.run_name}"
        )
    return path


def _make_writable(root: Path) -> None:
    try:
        root.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"output_dir={root} cannot be made ({error}); choose another output_dir") from error
    if not os.access(root, os.W_OK):
        raise ValueError(f"output_dir={root} cannot be written to; choose another output_dir")


def _explicit(config: TrainConfig, path: Path) -> RunFolder:
    if not path.is_dir():
        raise ValueError(f"resume={config.resume}: no such folder; name a run folder or one of its checkpoints")
    if path.parent.name == CHECKPOINTS:
        refuse_torn(path)
        folder = RunFolder(path=path.parent.parent, checkpoint=path)
    else:
        checkpoint, notes = find_checkpoint(path / CHECKPOINTS)
        folder = RunFolder(path=path, checkpoint=checkpoint, notes=notes)
    if config.run_name not in (None, folder.path.name):
        raise ValueError(f"resume={config.resume} lies in run {folder.path.name}, not run_name={config.run_name}")
    return folder


def refuse_changed_config(folder: Path, config: TrainConfig) -> None:
    """Compares with the run's config.yaml.

    Raises:
        ValueError: a field that decides results differs.
    """
    before = _decisive(OmegaConf.load(folder / "config.yaml"))
    after = decisive_settings(config)
    for key in sorted(before.keys() | after.keys()):
        if before.get(key) != after.get(key):
            raise ValueError(
                f"resume: {key} was {before.get(key)} in {folder} and is {after.get(key)} now, which decides results; "
                f"set it back ({key}={before.get(key)}), or start a new run with another run_name"
            )


def decisive_settings(config: TrainConfig) -> dict[str, Any]:
    """The fields that decide results, by their dotted names."""
    return _decisive(OmegaConf.create(config_yaml(config)))


def _decisive(node: DictConfig | ListConfig) -> dict[str, Any]:
    return {
        key: value
        for key, value in _flatten(OmegaConf.to_container(node))
        if not any(key == name or key.startswith(f"{name}.") for name in FREE_TO_CHANGE)
    }


def _flatten(node: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(node, dict) and node:
        for key, value in node.items():
            yield from _flatten(value, f"{prefix}.{key}" if prefix else str(key))
    elif isinstance(node, list) and node:
        for index, value in enumerate(node):
            yield from _flatten(value, f"{prefix}.{index}")
    else:
        yield prefix, node


def config_yaml(config: TrainConfig) -> str:
    """The configuration as YAML."""
    return OmegaConf.to_yaml(OmegaConf.structured(config))


def refuse_changed_facts(folder: RunFolder, facts: dict[str, Any]) -> None:
    """Compares with the run's run.json, where there is one. Rank 0 only.

    Args:
        facts: what the run computed about itself that decides its results, such as total_steps and world_size.

    Raises:
        ValueError: a fact of the resumed run has changed.
    """
    record_path = folder.path / "run.json"
    before = json.loads(record_path.read_text())["facts"] if record_path.exists() else facts
    for name, value in facts.items():
        if before.get(name) != value:
            raise ValueError(
                f"resume: {name} was {before.get(name)} in {folder.path} and is {value} now, which decides results; "
                "bring the former data, target and number of ranks back, or start a new run with another run_name"
            )


def write_records(folder: RunFolder, config: TrainConfig, facts: dict[str, Any]) -> None:
    """Makes the run folder and writes config.yaml and run.json, once. Rank 0 only.

    Raises:
        ValueError: another run took the folder meanwhile.
    """
    if (folder.path / "run.json").exists():
        if config.resume is None:
            raise ValueError(f"another run has begun in {folder.path} meanwhile; choose another run_name")
        return
    record = {
        "argv": sys.argv,
        "cwd": os.getcwd(),
        "started": datetime.now().astimezone().isoformat(timespec="seconds"),
        "git_commit": _git("rev-parse", "HEAD"),
        "git_dirty": None if _git("rev-parse", "HEAD") is None else bool(_git("status", "--porcelain")),
        "versions": {"python": platform.python_version(), **{name: version(name) for name in RECORDED_VERSIONS}},
        "seeds": {"seed": config.seed},
        "facts": facts,
    }
    folder.path.mkdir(exist_ok=True)
    write_whole(folder.path / "config.yaml", config_yaml(config))
    write_whole(folder.path / "run.json", json.dumps(record, indent=2) + "\n")


def _git(*arguments: str) -> str | None:
    """What git says about the checkout that this code lies in; None outside one, or without git."""
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=Path(__file__).parent, capture_output=True, text=True, check=True, timeout=10
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
