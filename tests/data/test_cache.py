"""The cache of target states: the same bits as online, whole or not at all, and never two caches in one folder."""

from __future__ import annotations

import errno
import hashlib
import json
import shutil
from collections import namedtuple
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from draftsmith.data import cache
from draftsmith.data.batch import Document
from draftsmith.data.cache import CachedStates, CacheManifest, OnlineStates, StatesConfig, build_cache, choose_folder
from draftsmith.models.target import Target, TargetConfig

LAYERS = (0, 1, 3)
RENDERING = {"max_length": 64, "thinking": None}


def load(path: Path, **settings: Any) -> Target:
    return Target.load(TargetConfig(path=str(path), **settings), device="cpu")


@pytest.fixture(scope="module")
def target(target_path: Path) -> Target:
    return load(target_path)


@pytest.fixture(scope="module")
def documents() -> list[Document]:
    generator = torch.Generator().manual_seed(0)
    made = []
    for length in (12, 30, 5, 20, 17, 9, 26, 3):
        tokens = torch.randint(0, 300, (length,), generator=generator)
        content = hashlib.sha256(tokens.numpy().tobytes()).hexdigest()[:16]
        supervised = torch.arange(length) > 2
        made.append(Document(tokens=tokens, supervised=supervised, domain="chat", id=f"{0:016x}-{content}"))
    return made


def manifest_of(documents: list[Document], target: Target, layer_ids: tuple[int, ...] = LAYERS) -> CacheManifest:
    return CacheManifest.of(documents, target, layer_ids, rendering=RENDERING, shard_tokens=40)


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def build(documents: list[Document], target: Target, folder: Path, **ranks: int) -> CacheManifest:
    manifest = manifest_of(documents, target)
    build_cache(documents, target, manifest, folder, **ranks)
    return manifest


@pytest.fixture(scope="module")
def clean(documents: list[Document], target: Target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("clean")
    build(documents, target, folder)
    return folder


def test_cached_equals_online_bit_for_bit(documents: list[Document], target: Target, clean: Path) -> None:
    online, cached = OnlineStates(target, LAYERS), CachedStates(clean, manifest_of(documents, target))
    for document in reversed(documents):
        made, read = online(document), cached(document)
        assert made.layers.shape == (1, len(document), 3, 32)
        assert torch.equal(read.layers, made.layers)
        assert torch.equal(read.final, made.final)


def test_logits_rebuilt_from_the_cache_are_the_live_targets(
    documents: list[Document], target: Target, clean: Path
) -> None:
    cached = CachedStates(clean, manifest_of(documents, target))
    for document in documents:
        with torch.no_grad():
            live = target.model(document.tokens[None]).logits
        rebuilt = target.head.logits(cached(document).final)
        torch.testing.assert_close(rebuilt, live, atol=1e-4, rtol=0)
        assert torch.equal(rebuilt.argmax(-1), live.argmax(-1))
    assert json.loads((clean / "manifest.json").read_text())["final"] == "post_norm"


def test_layout_and_size(documents: list[Document], target: Target, clean: Path) -> None:
    # Lengths 12+30, 5+20+17, 9+26+3: the second of the last three does not reach 40 tokens, the third ends the data.
    assert sorted(contents(clean)) == ["manifest.json", *(f"shard_{i:05d}.safetensors" for i in range(3))]
    manifest = manifest_of(documents, target)
    assert manifest.bytes_per_token == (3 + 1) * 32 * 4 + 8 + 1
    assert manifest.num_bytes == 122 * manifest.bytes_per_token
    stored = [value for file in clean.glob("*.safetensors") for value in load_file(file).values()]
    assert sum(value.numel() * value.itemsize for value in stored) == manifest.num_bytes


def test_two_ranks_build_the_same_bytes(documents: list[Document], target: Target, clean: Path, tmp_path: Path) -> None:
    build(documents, target, tmp_path, rank=1, world_size=2)
    assert sorted(contents(tmp_path)) == ["manifest.json", "shard_00001.safetensors"]
    with pytest.raises(ValueError, match=r"unfinished, 2 of 3 files are missing \(first: shard_00000\.safetensors\)"):
        CachedStates(tmp_path, manifest_of(documents, target))
    build(documents, target, tmp_path, rank=0, world_size=2)
    assert contents(tmp_path) == contents(clean)


@pytest.mark.parametrize("failing_shard", [0, 2])
def test_full_disk_leaves_no_half_file_and_a_resume_gives_the_same_bytes(
    failing_shard: int, documents: list[Document], target: Target, clean: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    def full_disk(tensors: dict[str, torch.Tensor], file: Path, metadata: dict[str, str]) -> None:
        if f"shard_{failing_shard:05d}" in file.name:
            file.write_bytes(b"half a file")
            raise OSError(errno.ENOSPC, "No space left on device")
        save_file(tensors, file, metadata)

    with monkeypatch.context() as patch:
        patch.setattr(cache, "save_file", full_disk)
        with pytest.raises(ValueError, match=r"No space left on device.*run the same command again"):
            build(documents, target, tmp_path)
    done = [f"shard_{i:05d}.safetensors" for i in range(failing_shard)]
    assert sorted(contents(tmp_path)) == ["manifest.json", *done]  # the manifest came before the first shard
    with pytest.raises(ValueError, match="the cache is unfinished"):
        CachedStates(tmp_path, manifest_of(documents, target))
    stamps = {name: (tmp_path / name).stat().st_mtime_ns for name in done}
    (tmp_path / f".shard_{failing_shard:05d}.safetensors.999.part").write_bytes(b"left by a killed process")
    build(documents, target, tmp_path)
    assert contents(tmp_path) == contents(clean)
    assert {name: (tmp_path / name).stat().st_mtime_ns for name in done} == stamps


def test_too_little_room_is_said_before_the_first_token(
    documents: list[Document], target: Target, tmp_path: Path, monkeypatch: Any
) -> None:
    usage = namedtuple("usage", "total used free")
    manifest = manifest_of(documents, target)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(0, 0, manifest.num_bytes - 1))
    with pytest.raises(
        ValueError, match=r"still needs .* GiB \(521 bytes for each token\), the disk has .*states\.mode"
    ):
        build(documents, target, tmp_path)
    assert list(contents(tmp_path)) == ["manifest.json"]
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(0, 0, manifest.num_bytes))
    build(documents, target, tmp_path)


@pytest.fixture(scope="module")
def changes(
    documents: list[Document], target: Target, new_target: Callable[..., Path], tmp_path_factory: Any
) -> dict[str, tuple[list[Document], Target, CacheManifest, str]]:
    """By name: what to build from instead, and what the refusal must say."""
    other = load(new_target(tmp_path_factory.mktemp("other"), seed=1))  # same shapes, other weights
    path = tmp_path_factory.mktemp("bfloat16")
    half = load(new_target(path), dtype="bfloat16")
    template = path / "template.jinja"
    template.write_text("{{ messages[0]['content'] }}")
    templated = load(path, chat_template=str(template))
    base = manifest_of(documents, target)
    longer = replace(base, rendering={**RENDERING, "max_length": 128})
    thinking = replace(base, rendering={**RENDERING, "thinking": True})
    before = "in the cache, "
    return {
        "weights": (documents, other, manifest_of(documents, other), f"target is {target.fingerprint} {before}"),
        "dtype": (documents, half, manifest_of(documents, half), f"dtype is float32 {before}bfloat16 here"),
        "template": (documents, templated, manifest_of(documents, templated), "chat_template is "),
        "layers": (
            documents,
            target,
            manifest_of(documents, target, (0, 2)),
            r"layer_ids is (0, 1, 3) in the cache, (0, 2)",
        ),
        "max_length": (documents, target, longer, f"rendering.max_length is 64 {before}128 here"),
        "thinking": (documents, target, thinking, f"rendering.thinking is None {before}True here"),
        "final": (documents, target, replace(base, final="pre_norm"), f"final is post_norm {before}pre_norm here"),
        "data": (
            documents[:4],
            target,
            manifest_of(documents[:4], target),
            "not the same from number 4 on (8 in the cache, 4",
        ),
        "order": (documents[::-1], target, manifest_of(documents[::-1], target), "not the same from number 0 on (8 in"),
    }


@pytest.mark.parametrize(
    "name", ["weights", "dtype", "template", "layers", "max_length", "thinking", "final", "data", "order"]
)
def test_other_settings_are_refused_by_name(name: str, changes: dict[str, Any], clean: Path) -> None:
    documents, target, manifest, message = changes[name]
    before = contents(clean)
    with pytest.raises(ValueError, match="was made with other settings") as refusal:
        build_cache(documents, target, manifest, clean)
    assert message in str(refusal.value)
    with pytest.raises(ValueError, match="was made with other settings"):
        CachedStates(clean, manifest)
    assert contents(clean) == before


def test_a_missing_row_names_document_file_and_counts(
    documents: list[Document], target: Target, clean: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(clean, tmp_path / "copy")
    file = folder / "shard_00001.safetensors"
    tensors = load_file(file)
    name = f"{documents[3].id}.final"
    tensors[name] = tensors[name][:-1].clone()
    save_file(tensors, file)
    with pytest.raises(ValueError, match=rf"shard_00001.*{documents[3].id} has 19 rows of final for 20 tokens"):
        CachedStates(folder, manifest_of(documents, target))
    del tensors[name]
    save_file(tensors, file)
    with pytest.raises(ValueError, match=rf"{documents[3].id} has 0 rows of final for 20 tokens"):
        CachedStates(folder, manifest_of(documents, target))


def test_a_truncated_file_is_refused_by_reading_and_made_anew_by_building(
    documents: list[Document], target: Target, clean: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = shutil.copytree(clean, tmp_path / "copy")
    file = folder / "shard_00001.safetensors"
    half = file.stat().st_size // 2
    file.write_bytes(file.read_bytes()[:half])
    needed = 42 * manifest_of(documents, target).bytes_per_token
    with pytest.raises(ValueError, match=rf"shard_00001\.safetensors is damaged: {half} bytes, .*need {needed} "):
        CachedStates(folder, manifest_of(documents, target))
    build(documents, target, folder)
    assert contents(folder) == contents(clean)
    assert "made anew" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("part", ["tokens", "layer_1", "final"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_flipped_byte_is_noticed_when_its_document_is_read(
    part: str, dtype: str, documents: list[Document], target_path: Path, tmp_path: Path
) -> None:
    target = load(target_path, dtype=dtype)
    manifest = build(documents, target, tmp_path)
    before = contents(tmp_path)
    file, damaged = tmp_path / "shard_00001.safetensors", documents[3]
    raw = bytearray(file.read_bytes())
    header = int.from_bytes(raw[:8], "little")
    begin, end = json.loads(raw[8 : 8 + header])[f"{damaged.id}.{part}"]["data_offsets"]
    raw[8 + header + (begin + end) // 2] ^= 1
    file.write_bytes(raw)
    cached = CachedStates(tmp_path, manifest)
    for document in documents:
        if document is not damaged:
            assert cached(document).final.shape == (1, len(document), 32)
    message = rf"shard_00001\.safetensors: document {damaged.id} is damaged, its {part} does not match.*delete"
    for _ in range(2):
        with pytest.raises(ValueError, match=message):
            cached(damaged)
    # Whoever does not need the damaged layer is not disturbed by it.
    final_only = CachedStates(tmp_path, manifest_of(documents, target, ()))
    if part == "layer_1":
        assert torch.equal(final_only(damaged).final, OnlineStates(target, ())(damaged).final)
    else:
        with pytest.raises(ValueError, match=message):
            final_only(damaged)
    file.unlink()
    build(documents, target, tmp_path)
    assert contents(tmp_path) == before


def test_states_that_overflow_are_refused_by_document(
    documents: list[Document], new_target: Callable[..., Path], tmp_path: Path
) -> None:
    path = new_target(tmp_path)
    weights = load_file(path / "model.safetensors")
    weights["model.embed_tokens.weight"][documents[0].tokens[5]] = 65000.0  # float16 ends at 65504
    weights["model.layers.1.mlp.down_proj.weight"] *= 1000.0
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    assert float(load(path).states(documents[0].tokens[None], [1]).layers.abs().max()) > 65504
    half = load(path, dtype="float16")
    with pytest.raises(ValueError, match=rf"{documents[0].id}: \d+ of 384 states of layer 1 are not finite in float16"):
        OnlineStates(half, LAYERS)(documents[0])
    with pytest.raises(ValueError, match="are not finite in float16; load the target with"):
        build(documents, half, tmp_path / "cache")
    assert list(contents(tmp_path / "cache")) == ["manifest.json"]


def test_no_cache_unknown_document_and_other_tokens(
    documents: list[Document], target: Target, clean: Path, tmp_path: Path
) -> None:
    manifest = manifest_of(documents, target)
    with pytest.raises(ValueError, match=r"there is no cache of target states here; make it with `draftsmith cache`"):
        CachedStates(tmp_path, manifest)
    cached = CachedStates(clean, manifest)
    with pytest.raises(ValueError, match="document a-b is not in the cache"):
        cached(replace(documents[0], id="a-b"))
    with pytest.raises(ValueError, match="with other tokens"):
        cached(replace(documents[0], tokens=documents[0].tokens + 1))
    with pytest.raises(ValueError, match=rf"document {documents[0].id} is there 2 times"):
        manifest_of([*documents, documents[0]], target)
    with pytest.raises(ValueError, match=r"0-based decoder layers in 0\.\.3"):
        manifest_of(documents, target, (1, 4))
    (tmp_path / "manifest.json").write_text('{"format": 0}')
    with pytest.raises(ValueError, match=r"manifest\.json is not a manifest that this version reads"):
        CachedStates(tmp_path, manifest)


def test_default_folder_is_named_by_content_and_layout_is_kept(
    documents: list[Document], target: Target, clean: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    manifest = manifest_of(documents, target)
    folder, _ = choose_folder(StatesConfig(), manifest)
    assert folder == tmp_path / "draftsmith" / "states" / f"{manifest.digest}_0_1_3"
    relaid = replace(manifest, shard_tokens=7)
    assert choose_folder(StatesConfig(), relaid) == (folder, [])
    assert choose_folder(StatesConfig(), manifest_of(documents[:-1], target))[0] != folder
    assert choose_folder(StatesConfig(path="here"), manifest) == (Path("here"), [])
    before = contents(clean)
    build_cache(documents, target, relaid, clean)
    assert contents(clean) == before
    assert CachedStates(clean, relaid)(documents[0]).final.shape == (1, 12, 32)


@pytest.mark.parametrize("layer_ids", [(), (1,), (0, 3), LAYERS])
def test_a_cache_serves_whoever_needs_fewer_layers_with_the_bits_of_their_own(
    layer_ids: tuple[int, ...], documents: list[Document], target: Target, clean: Path, tmp_path: Path
) -> None:
    asked = manifest_of(documents, target, layer_ids)
    build_cache(documents, target, asked, tmp_path)
    before = contents(clean)
    stored, num_made = build_cache(documents, target, asked, clean)
    assert (stored.layer_ids, num_made) == (LAYERS, 0)
    assert contents(clean) == before
    shared, own, online = CachedStates(clean, asked), CachedStates(tmp_path, asked), OnlineStates(target, layer_ids)
    for document in documents:
        read = shared(document)
        assert read.layers.shape == (1, len(document), len(layer_ids), 32)
        for same in (own(document), online(document)):
            assert torch.equal(read.layers, same.layers)
            assert torch.equal(read.final, same.final)


def test_only_wanted_tensors_are_read(
    documents: list[Document], target: Target, clean: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []

    class Recorded:
        def __init__(self, file: Path, framework: str) -> None:
            self.opened = safe_open(file, framework)

        def __enter__(self) -> Any:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def metadata(self) -> dict[str, str]:
            return self.opened.metadata()

        def get_tensor(self, name: str) -> torch.Tensor:
            read.append(name)
            return self.opened.get_tensor(name)

    final_only = CachedStates(clean, manifest_of(documents, target, ()))
    one_layer = CachedStates(clean, manifest_of(documents, target, (1,)))
    monkeypatch.setattr(cache, "safe_open", Recorded)
    final_only(documents[2])
    assert read == [f"{documents[2].id}.{part}" for part in ("tokens", "final")]
    read.clear()
    one_layer(documents[2])
    assert read == [f"{documents[2].id}.{part}" for part in ("tokens", "layer_1", "final")]


def test_a_finished_cache_with_more_layers_is_found_by_default(
    documents: list[Document], target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    wide, narrow = manifest_of(documents, target), manifest_of(documents, target, ())
    folder, _ = choose_folder(StatesConfig(), wide)
    own = folder.with_name(narrow.digest)
    assert wide.digest == narrow.digest
    build_cache(documents, target, wide, folder, rank=1, world_size=2)
    chosen, faults = choose_folder(StatesConfig(), narrow)
    assert chosen == own
    assert len(faults) == 1
    assert "the cache is unfinished, 2 of 3 files are missing" in faults[0]
    build_cache(documents, target, wide, folder)
    assert choose_folder(StatesConfig(), narrow) == (folder, [])
    # Neither fewer layers, nor others, nor other documents serve.
    lacking = manifest_of(documents, target, (0, 2))
    assert choose_folder(StatesConfig(), lacking) == (folder.with_name(f"{wide.digest}_0_2"), [])
    fewer = manifest_of(documents[:4], target, ())
    assert choose_folder(StatesConfig(), fewer) == (folder.with_name(fewer.digest), [])
    # A damaged one is named and left alone; what was begun for exactly these layers comes first.
    file = folder / "shard_00001.safetensors"
    file.write_bytes(file.read_bytes()[:100])
    chosen, (fault,) = choose_folder(StatesConfig(), narrow)
    assert chosen == own
    assert "shard_00001.safetensors is damaged: 100 bytes" in fault
    build_cache(documents, target, wide, folder)
    build_cache(documents, target, narrow, own, rank=1, world_size=2)
    assert choose_folder(StatesConfig(), narrow) == (own, [])


def test_a_given_cache_is_finished_with_the_layers_it_was_begun_with(
    documents: list[Document], target: Target, clean: Path, tmp_path: Path
) -> None:
    build(documents, target, tmp_path, rank=1, world_size=2)
    assert choose_folder(StatesConfig(path=str(tmp_path)), manifest_of(documents, target, ())) == (tmp_path, [])
    stored, num_made = build_cache(documents, target, manifest_of(documents, target, ()), tmp_path)
    assert (stored.layer_ids, num_made) == (LAYERS, 12 + 30 + 9 + 26 + 3)
    assert contents(tmp_path) == contents(clean)


def test_a_cache_of_an_earlier_layout_is_refused(
    documents: list[Document], target: Target, clean: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(clean, tmp_path / "copy")
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(manifest | {"format": 1}))
    for use in (CachedStates, lambda *asked: build_cache(documents, target, asked[1], asked[0])):
        with pytest.raises(ValueError, match=r"other settings: format is 1 in the cache, 2 here\. Give another"):
            use(folder, manifest_of(documents, target))


def test_config_refuses_what_it_does_not_know() -> None:
    with pytest.raises(ValueError, match=r"states\.mode=disk: choose one of cached, online"):
        StatesConfig(mode="disk")
    with pytest.raises(ValueError, match=r"states\.shard_tokens=0 must be at least 1"):
        StatesConfig(shard_tokens=0)
