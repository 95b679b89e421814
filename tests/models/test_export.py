"""A drafter's folder: what is in it, that it loads to the same drafter, and that nothing less than all of it loads."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from draftsmith.data.conversations import DataConfig, SourceConfig
from draftsmith.models.dfly import DFlyConfig
from draftsmith.models.drafter import Drafter
from draftsmith.models.export import (
    check_fingerprint,
    describe,
    load_drafter,
    new_record,
    read_description,
    save_drafter,
)
from draftsmith.models.mtp import MTPConfig
from draftsmith.models.target import Target, TargetConfig

DRAFT = """
import sys, torch
from pathlib import Path
from draftsmith.models.export import load_drafter
from draftsmith.models.target import Target, TargetConfig

@torch.no_grad()
def draft(folder, path):
    loaded = load_drafter(Path(folder))
    target = Target.load(TargetConfig(path=path), device="cpu")
    prompt = torch.arange(20)[None]
    states = target.states(prompt[:, :-1], loaded.drafter.target_layer_ids)
    cache = loaded.drafter.new_cache(1)
    loaded.drafter.observe(cache, states, prompt[:, 1:], torch.tensor([19]))
    proposal = loaded.drafter.propose(cache, prompt[:, -1], target.head)
    return proposal.tokens.tolist(), [f"{x:.6f}" for x in proposal.confidence.flatten().tolist()]
"""


@pytest.fixture(scope="module")
def target(target_path: Path) -> Target:
    return Target.load(TargetConfig(path=str(target_path)), device="cpu")


def randomise(drafter: Drafter[Any]) -> Drafter[Any]:
    """Every parameter at random: none at its zero or one initialisation."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator) + 0.1)
    return drafter


def dfly(target: Target, **settings: Any) -> Drafter[Any]:
    return randomise(DFlyConfig(**{"block_size": 5, "target_layer_ids": [0, 1, 3], **settings}).build(target.spec))


def mtp(target: Target) -> Drafter[Any]:
    return randomise(MTPConfig(num_draft_tokens=2).build(target.spec))


@pytest.fixture(scope="module")
def record(target: Target) -> dict[str, Any]:
    return new_record(target, DataConfig(), run="a-run")


@pytest.fixture
def folder(target: Target, record: dict[str, Any], tmp_path: Path) -> Path:
    save_drafter(tmp_path / "export", dfly(target), record)
    return tmp_path / "export"


def edit(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    description = json.loads((folder / "config.json").read_text())
    change(description)
    (folder / "config.json").write_text(json.dumps(description))


def test_a_fresh_process_drafts_the_same_tokens(
    target: Target, record: dict[str, Any], target_path: Path, tmp_path: Path
) -> None:
    save_drafter(tmp_path / "dfly", dfly(target), record)
    save_drafter(tmp_path / "mtp", mtp(target), record)
    here: dict[str, Any] = {}
    exec(DRAFT, here)
    expected = [here["draft"](tmp_path / name, str(target_path)) for name in ("dfly", "mtp")]
    script = f"{DRAFT}\nprint([draft(name, sys.argv[1]) for name in ('dfly', 'mtp')])"
    arguments = [sys.executable, "-c", script, str(target_path)]
    there = subprocess.run(arguments, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert there.returncode == 0, there.stderr
    assert there.stdout.splitlines()[-1] == repr(expected)
    assert all(len(set(tokens[0])) > 1 for tokens, _ in expected)


@pytest.mark.parametrize("build", [dfly, mtp])
def test_a_round_trip_changes_nothing(
    build: Callable[[Target], Drafter[Any]], target: Target, record: dict[str, Any], tmp_path: Path
) -> None:
    drafter = build(target)
    save_drafter(tmp_path / "export", drafter, record)
    loaded = load_drafter(tmp_path / "export")
    assert loaded.record == json.loads(json.dumps(record))
    assert loaded.drafter.config == drafter.config
    assert loaded.drafter.spec == drafter.spec
    assert not loaded.drafter.training
    before, after = drafter.state_dict(), loaded.drafter.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


HIDDEN, KV, INTERMEDIATE = 32, 16, 64
ATTENTION = {
    "q_proj.weight": (HIDDEN, HIDDEN),
    "k_proj.weight": (KV, HIDDEN),
    "v_proj.weight": (KV, HIDDEN),
    "o_proj.weight": (HIDDEN, HIDDEN),
}
MLP = {
    "gate_proj.weight": (INTERMEDIATE, HIDDEN),
    "up_proj.weight": (INTERMEDIATE, HIDDEN),
    "down_proj.weight": (HIDDEN, INTERMEDIATE),
}


def prefixed(prefix: str, tensors: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    return {prefix + name: shape for name, shape in tensors.items()}


DFLY_LAYER = {
    "input_layernorm.weight": (HIDDEN,),
    **prefixed("self_attn.", ATTENTION),
    "post_attention_layernorm.weight": (HIDDEN,),
    **prefixed("mlp.", MLP),
}
DFLY_TENSORS = {
    "backbone.context.fusion": (2, 3),
    "backbone.context.projection.weight": (HIDDEN, 3 * HIDDEN),
    "backbone.context.norm.weight": (HIDDEN,),
    **prefixed("backbone.layers.0.", DFLY_LAYER),
    **prefixed("backbone.layers.1.", DFLY_LAYER),
    "backbone.norm.weight": (HIDDEN,),
    "correction.hidden_norm.weight": (HIDDEN,),
    "correction.embedding_norm.weight": (HIDDEN,),
    "correction.gate_proj.weight": (HIDDEN, 2 * HIDDEN),
    "correction.up_proj.weight": (HIDDEN, 2 * HIDDEN),
    "correction.down_proj.weight": (HIDDEN, HIDDEN),
}
MTP_TENSORS = prefixed(
    "block.",
    {
        "enorm.weight": (HIDDEN,),
        "hnorm.weight": (HIDDEN,),
        "eh_proj.weight": (HIDDEN, 2 * HIDDEN),
        "input_layernorm.weight": (HIDDEN,),
        **ATTENTION,
        "post_attention_layernorm.weight": (HIDDEN,),
        **prefixed("mlp.", MLP),
        "final_layernorm.weight": (HIDDEN,),
    },
)


@pytest.mark.parametrize(("build", "expected"), [(dfly, DFLY_TENSORS), (mtp, MTP_TENSORS)])
def test_the_file_holds_exactly_these_tensors(
    build: Callable[[Target], Drafter[Any]],
    expected: dict[str, tuple[int, ...]],
    target: Target,
    record: dict[str, Any],
    tmp_path: Path,
) -> None:
    save_drafter(tmp_path / "export", build(target), record)
    tensors = load_file(tmp_path / "export" / "model.safetensors")
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == expected
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float32}


def test_a_drafter_for_a_tied_target_is_saved_at_the_first_try(new_target: Callable[..., Path], tmp_path: Path) -> None:
    tied = Target.load(TargetConfig(path=str(new_target(tmp_path / "tied", tie_word_embeddings=True))), device="cpu")
    save_drafter(tmp_path / "export", dfly(tied), new_record(tied, DataConfig(), run="tied"))
    names = load_file(tmp_path / "export" / "model.safetensors").keys()
    assert names == dfly(tied).state_dict().keys()
    check_fingerprint(load_drafter(tmp_path / "export").record, tied)


def test_config_states_the_conventions(folder: Path, target: Target, target_path: Path) -> None:
    description = read_description(folder)
    assert description["num_draft_tokens"] == 4
    assert "the anchor is not among them" in description["conventions"]["num_draft_tokens"]
    assert description["target_layer_ids"] == [0, 1, 3]
    assert "counted from 0" in description["conventions"]["target_layer_ids"]
    assert description["mask_token_id"] == target.spec.mask_token_id
    assert description["drafter_config"]["intermediate_size"] == 64
    assert description["record"]["target"]["path"] == str(target_path)
    assert description["record"]["target_fingerprint"] == target.fingerprint
    assert description["record"]["chat_template"] == target.tokenizer.chat_template
    assert description["record"]["data"]["thinking"] is None


@pytest.mark.parametrize(
    "spelling",
    [
        {"rope_theta": 500000.0, "rope_scaling": {"rope_type": "linear", "factor": 4.0}},
        {"rope_parameters": {"rope_theta": 500000.0, "rope_type": "linear", "factor": 4.0}},
    ],
)
def test_rope_is_written_in_both_spellings(
    spelling: dict[str, Any], new_target: Callable[..., Path], tmp_path: Path
) -> None:
    scaled = Target.load(TargetConfig(path=str(new_target(tmp_path / "scaled", **spelling))), device="cpu")
    save_drafter(tmp_path / "export", dfly(scaled), new_record(scaled, DataConfig(), run="scaled"))
    description = read_description(tmp_path / "export")
    assert description["rope_theta"] == description["rope_parameters"]["rope_theta"] == 500000.0
    assert description["rope_scaling"] == {"rope_type": "linear", "factor": 4.0}
    assert description["rope_parameters"]["factor"] == 4.0
    expected = 500000.0 ** -(torch.arange(0, 8, 2) / 8) / 4
    assert torch.allclose(torch.tensor(load_drafter(tmp_path / "export").drafter.spec.rope_inv_freq), expected)


def test_plain_rope_has_no_scaling(folder: Path) -> None:
    description = read_description(folder)
    assert description["rope_scaling"] is None
    assert (description["rope_theta"], description["partial_rotary_factor"]) == (10000.0, 1.0)


def test_local_paths_are_recorded_absolute(target_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(target_path.parent)
    (tmp_path / "chat.jsonl").write_text("")
    target = Target.load(TargetConfig(path=f"./{target_path.name}"), device="cpu")
    monkeypatch.setattr(Target, "fingerprint", "f")
    monkeypatch.chdir(target_path.parent)
    data = DataConfig(sources=[SourceConfig(path="org/dataset"), SourceConfig(path=str(tmp_path / "chat.jsonl"))])
    record = new_record(target, data, run="r")
    assert record["target"]["path"] == str(target_path)
    assert [source["path"] for source in record["data"]["sources"]] == ["org/dataset", str(tmp_path / "chat.jsonl")]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda weights: weights.pop("backbone.layers.0.mlp.up_proj.weight"),
            r"backbone\.layers\.0\.mlp\.up_proj\.weight is missing",
        ),
        (lambda weights: weights.update(extra=torch.ones(1)), "extra is unexpected"),
        (
            lambda weights: weights.update({"backbone.layers.0.mlp.up_proj.weight": torch.ones(3, 2)}),
            r"backbone\.layers\.0\.mlp\.up_proj\.weight has shape \(3, 2\), not \(64, 32\)",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_named(folder: Path, change: Callable[[Any], object], message: str) -> None:
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(ValueError, match=message):
        load_drafter(folder)


@pytest.mark.parametrize("key", ["target_layer_ids", "num_draft_tokens", "drafter_config", "target_spec", "record"])
def test_a_key_that_is_missing_is_never_guessed(folder: Path, key: str) -> None:
    edit(folder, lambda description: description.pop(key))
    with pytest.raises(ValueError, match=f"lacks {key}"):
        load_drafter(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.update(num_draft_tokens=5), "num_draft_tokens is 5, but the drafter described there has 4"),
        (lambda d: d.update(target_layer_ids=[0, 1, 2]), r"target_layer_ids is \[0, 1, 2\], but"),
        (lambda d: d["drafter_config"].update(blok_size=4), "blok_size"),
        (lambda d: d["drafter_config"].update(block_size="x"), "DFlyConfig"),
        (lambda d: d["target_spec"].pop("rope_inv_freq"), "lacks rope_inv_freq"),
        (lambda d: d["record"].pop("target_fingerprint"), "lacks target_fingerprint"),
        (lambda d: d.update(drafter="eagle"), "'eagle' is not one of dfly, mtp"),
        (lambda d: d.update(format_version=99), "format version 1"),
    ],
)
def test_contradictions_are_refused(folder: Path, change: Callable[[Any], object], message: str) -> None:
    edit(folder, change)
    with pytest.raises(ValueError, match=message):
        load_drafter(folder)


def test_folders_that_are_no_export_are_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"holds no config\.json"):
        load_drafter(tmp_path / "absent")
    weights = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    with pytest.raises(ValueError, match="cannot be read"):
        load_drafter(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="is missing"):
        load_drafter(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(ValueError, match="is not valid JSON"):
        load_drafter(folder)


def test_saving_replaces_a_folder_whole(
    folder: Path, target: Target, record: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = load_file(folder / "model.safetensors")

    def fail(*args: Any, **kwargs: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as broken:
        broken.setattr("draftsmith.models.export.save", fail)
        with pytest.raises(OSError, match="No space left"):
            save_drafter(folder, dfly(target, block_size=3), record)
    assert load_drafter(folder).drafter.num_draft_tokens == 4
    assert load_file(folder / "model.safetensors").keys() == before.keys()
    save_drafter(folder, dfly(target, block_size=3), record)
    assert load_drafter(folder).drafter.num_draft_tokens == 2
    assert sorted(path.name for path in folder.parent.iterdir()) == ["export"]


def test_another_target_is_refused_naming_both(
    record: dict[str, Any], new_target: Callable[..., Path], tmp_path: Path, target: Target
) -> None:
    other = Target.load(TargetConfig(path=str(new_target(tmp_path / "other", seed=1))), device="cpu")
    check_fingerprint(record, target)
    with pytest.raises(ValueError) as error:
        check_fingerprint(record, other)
    for part in (record["target"]["path"], target.fingerprint, other.config.path, other.fingerprint):
        assert part in str(error.value)


def test_a_record_must_be_whole(target: Target, record: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="lacks chat_template"):
        describe(dfly(target), {key: value for key, value in record.items() if key != "chat_template"})
