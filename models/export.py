"""A drafter as a folder that loads by itself: `config.json` and `model.safetensors`.

`config.json` holds all that decoding needs besides the target: the drafter's configuration with every default filled
in, the shape of its target, the conventions in words, and the record of what it was trained for.
"""

from __future__ import annotations

import importlib
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save
from torch import Tensor

from draftsmith.configs.schema import restore
from draftsmith.models.drafter import Drafter, DrafterConfig
from draftsmith.models.target import Target, TargetSpec

if TYPE_CHECKING:
    from draftsmith.data.conversations import DataConfig

FORMAT_VERSION = 1
CONFIG, WEIGHTS = "config.json", "model.safetensors"

# The name in config.json of each drafter, and where its configuration class is.
DRAFTERS = {
    "dfly": ("draftsmith.models.dfly", "DFlyConfig"),
    "mtp": ("draftsmith.models.mtp", "MTPConfig"),
}

CONVENTIONS = {
    "num_draft_tokens": "tokens drafted in one round; the anchor is not among them",
    "step": "step s, from 0, predicts the token at anchor + s + 1; the anchor is the last committed token",
    "target_layer_ids": "decoder layers counted from 0; the output of that layer, before any norm",
    "final_state": "after the target's final norm, which is applied once",
    "head": "embedding and lm_head are the target's and are not stored here",
}

KEYS = (
    "format_version",
    "drafter",
    "drafter_config",
    "num_draft_tokens",
    "target_layer_ids",
    "mask_token_id",
    "conventions",
    "rope_parameters",
    "rope_theta",
    "rope_scaling",
    "partial_rotary_factor",
    "target_spec",
    "record",
)
RECORD_KEYS = ("target", "target_fingerprint", "chat_template", "data", "run")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedDrafter:
    """A drafter read from a folder, and the record of what it was trained for, see `new_record`."""

    drafter: Drafter[Any]
    record: dict[str, Any]


def new_record(target: Target, data: DataConfig, *, run: str) -> dict[str, Any]:
    """What a drafter's folder says about its training, so that it can be evaluated by itself.

    Local paths are made absolute: the folder may be read from elsewhere.

    Args:
        run: name of the run.

    Returns:
        target: the target's configuration (its template is below, as text); target_fingerprint; chat_template;
        data: the data's configuration, which includes the thinking mode; run.
    """
    config = replace(target.config, path=_absolute(target.config.path), chat_template=None)
    sources = [replace(source, path=_absolute(source.path)) for source in data.sources]
    return {
        "target": asdict(config),
        "target_fingerprint": target.fingerprint,
        "chat_template": target.tokenizer.chat_template,
        "data": asdict(replace(data, sources=sources)),
        "run": run,
    }


def _absolute(path: str) -> str:
    return str(Path(path).resolve()) if Path(path).exists() else path


def save_drafter(
    folder: Path, drafter: Drafter[Any], record: dict[str, Any], weights: Mapping[str, Tensor] | None = None
) -> None:
    """Writes a drafter's folder, whole or not at all; one that is there is replaced.

    Args:
        folder: its parent must exist.
        record: see `new_record`.
        weights: the drafter's state; None: what the module itself holds, which under ZeRO is rounded or sharded.

    Raises:
        ValueError: a drafter of a class that `DRAFTERS` does not name, or a record without one of its keys.
    """
    description = describe(drafter, record)
    state = drafter.state_dict() if weights is None else weights
    # A copy of each tensor: views and tensors that share memory cannot be stored.
    weights = {name: tensor.detach().cpu().clone().contiguous() for name, tensor in state.items()}
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    (partial / WEIGHTS).write_bytes(save(weights, metadata={"format": "pt"}))
    (partial / CONFIG).write_text(json.dumps(description, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    replace_folder(partial, folder)


def replace_folder(new: Path, folder: Path) -> None:
    """Puts a finished folder in the place of another, which is never seen half replaced."""
    for path in new.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
    old = folder.with_name(f".{folder.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.rename(old)
    new.rename(folder)
    shutil.rmtree(old, ignore_errors=True)


def describe(drafter: Drafter[Any], record: dict[str, Any]) -> dict[str, Any]:
    """The content of config.json."""
    where = (type(drafter.config).__module__, type(drafter.config).__qualname__)
    names = [name for name, place in DRAFTERS.items() if place == where]
    if not names:
        raise ValueError(f"{'.'.join(where)} is not in draftsmith.models.export.DRAFTERS; add it there to export it")
    _require(record, RECORD_KEYS, "the record of a drafter")
    rope = dict(drafter.spec.rope_parameters)
    older = {key: value for key, value in rope.items() if key not in ("rope_theta", "partial_rotary_factor")}
    return {
        "format_version": FORMAT_VERSION,
        "drafter": names[0],
        "drafter_config": asdict(drafter.config),
        "num_draft_tokens": drafter.num_draft_tokens,
        "target_layer_ids": list(drafter.target_layer_ids),
        "mask_token_id": drafter.spec.mask_token_id,
        "conventions": CONVENTIONS,
        "rope_parameters": rope,
        "rope_theta": rope["rope_theta"],
        "rope_scaling": None if rope.get("rope_type") == "default" else older,
        "partial_rotary_factor": rope.get("partial_rotary_factor", 1.0),
        "target_spec": asdict(drafter.spec),
        "record": record,
    }


def load_drafter(folder: Path) -> LoadedDrafter:
    """Reads a drafter's folder; the drafter is in eval mode, on the CPU.

    Raises:
        ValueError: the folder is not a drafter's, a key of config.json is missing or contradicts another, or tensors
            are missing, unexpected or of another shape.
    """
    description = read_description(folder)
    module, name = DRAFTERS[description["drafter"]]
    config_class: type[DrafterConfig] = vars(importlib.import_module(module))[name]
    config = restore(config_class, description["drafter_config"], f"{folder / CONFIG}: drafter_config")
    with torch.random.fork_rng():  # the random start that is replaced below must not cost the caller any draws
        drafter = config.build(_spec(description["target_spec"], folder / CONFIG))
    for key, built, written in (
        ("num_draft_tokens", drafter.num_draft_tokens, description["num_draft_tokens"]),
        ("target_layer_ids", list(drafter.target_layer_ids), description["target_layer_ids"]),
        ("mask_token_id", drafter.spec.mask_token_id, description["mask_token_id"]),
        ("rope_parameters", drafter.spec.rope_parameters, description["rope_parameters"]),
    ):
        if built != written:
            raise ValueError(f"{folder / CONFIG}: {key} is {written}, but the drafter described there has {built}")
    _load_weights(drafter, folder / WEIGHTS)
    return LoadedDrafter(drafter=drafter.eval(), record=description["record"])


def read_description(folder: Path) -> dict[str, Any]:
    """Reads and checks config.json, without building anything.

    Raises:
        ValueError: it is absent, unreadable, of another format, or lacks a key.
    """
    path = folder / CONFIG
    if not path.is_file():
        raise ValueError(f"{folder} holds no {CONFIG}; give a folder that `draftsmith export` wrote")
    try:
        description = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON ({error}); export the drafter again") from error
    if not isinstance(description, dict) or description.get("format_version") != FORMAT_VERSION:
        raise ValueError(f"{path} is not a drafter of format version {FORMAT_VERSION}; export the drafter again")
    _require(description, KEYS, str(path))
    _require(description["record"], RECORD_KEYS, f"{path}: record")
    if description["drafter"] not in DRAFTERS:
        raise ValueError(f"{path}: drafter {description['drafter']!r} is not one of {', '.join(DRAFTERS)}")
    return description


def check_fingerprint(record: Mapping[str, Any], target: Target) -> None:
    """Refuses a target other than the one that the drafter was trained for.

    Raises:
        ValueError: naming both.
    """
    if target.fingerprint != record["target_fingerprint"]:
        trained = record["target"]
        raise ValueError(
            f"the drafter was trained for target {trained['path']} (revision {trained['revision']}, dtype "
            f"{trained['dtype']}, fingerprint {record['target_fingerprint']}); {target.config.path} (revision "
            f"{target.config.revision}, dtype {target.config.dtype}) has fingerprint {target.fingerprint}; give the "
            "target that it was trained for"
        )


def _require(mapping: Mapping[str, Any], keys: tuple[str, ...], what: str) -> None:
    missing = [key for key in keys if key not in mapping]
    if missing:
        raise ValueError(f"{what} lacks {', '.join(missing)}; none of them has a default: export the drafter again")


def _spec(fields: dict[str, Any], path: Path) -> TargetSpec:
    _require(fields, tuple(TargetSpec.__dataclass_fields__), f"{path}: target_spec")
    unknown = sorted(set(fields) - set(TargetSpec.__dataclass_fields__))
    if unknown:
        raise ValueError(f"{path}: target_spec has no such keys: {', '.join(unknown)}")
    return TargetSpec(**{**fields, "rope_inv_freq": tuple(fields["rope_inv_freq"])})


def _load_weights(drafter: Drafter[Any], path: Path) -> None:
    """Every tensor of the drafter comes from the file, and every tensor of the file goes to the drafter."""
    if not path.is_file():
        raise ValueError(f"{path} is missing; export the drafter again")
    expected = drafter.state_dict()
    try:
        with safe_open(path, framework="pt") as file:
            shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(f"{path} cannot be read ({error}); export the drafter again") from error
    faults = [f"{name} is missing" for name in sorted(expected.keys() - shapes.keys())]
    faults += [f"{name} is unexpected" for name in sorted(shapes.keys() - expected.keys())]
    faults += [
        f"{name} has shape {shapes[name]}, not {tuple(expected[name].shape)}"
        for name in sorted(expected.keys() & shapes.keys())
        if shapes[name] != tuple(expected[name].shape)
    ]
    if faults:
        raise ValueError(f"{path} does not fit the drafter of {CONFIG}: {'; '.join(faults)}; export the drafter again")
    drafter.load_state_dict(load_file(path))
