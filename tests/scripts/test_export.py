"""draftsmith export says which checkpoint it exports, and exports none that is torn."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from draftsmith.scripts.export import ExportConfig, choose_checkpoint


def checkpoint(run: Path, name: str, *, torn: bool = False) -> Path:
    folder = run / "checkpoints" / name
    (folder / "drafter").mkdir(parents=True)
    (folder / "drafter" / "config.json").write_text("{}")
    size = 3 if torn else 2
    files = {"drafter/config.json": size}
    (folder / "complete.json").write_text(json.dumps({"step": int(name[5:]), "files": files}))
    return folder


def choose(run: Path, name: str = "last") -> tuple[Path, str]:
    console = Console(file=io.StringIO(), width=200)
    return choose_checkpoint(ExportConfig(run=str(run), checkpoint=name), console), console.file.getvalue()  # type: ignore[attr-defined]


def test_last_is_the_last_whole_one(tmp_path: Path) -> None:
    whole = checkpoint(tmp_path, "step_000002")
    checkpoint(tmp_path, "step_000001")
    assert choose(tmp_path) == (whole, "")
    checkpoint(tmp_path, "step_000010", torn=True)
    chosen, warning = choose(tmp_path)
    assert chosen == whole
    assert "step_000010 is torn" in warning
    assert choose(tmp_path, "step_000001")[0].name == "step_000001"


def test_best_is_the_one_that_decoded_best(tmp_path: Path) -> None:
    for name, length in (("step_000001", 1.2), ("step_000002", 1.4), ("step_000003", 1.3), ("step_000004", None)):
        report = {"acceptance_length": length}
        (checkpoint(tmp_path, name) / "evaluation.json").write_text(json.dumps(report))
    checkpoint(tmp_path, "step_000005")
    assert choose(tmp_path, "best")[0].name == "step_000002"
    (tmp_path / "checkpoints" / "step_000002" / "drafter" / "config.json").unlink()
    assert choose(tmp_path, "best")[0].name == "step_000003"


def test_best_needs_an_evaluation(tmp_path: Path) -> None:
    checkpoint(tmp_path, "step_000001")
    with pytest.raises(ValueError, match=r"no checkpoint of .* was evaluated; choose checkpoint=last, or train with"):
        choose(tmp_path, "best")


def test_a_torn_checkpoint_is_refused_by_name(tmp_path: Path) -> None:
    checkpoint(tmp_path, "step_000001", torn=True)
    with pytest.raises(ValueError, match=r"step_000001 cannot be loaded: drafter/config\.json has 2 bytes, not 3"):
        choose(tmp_path, "step_000001")
    with pytest.raises(ValueError, match="no whole checkpoint"):
        choose(tmp_path)


def test_what_does_not_exist_is_refused_with_what_does(tmp_path: Path) -> None:
    checkpoint(tmp_path, "step_000001")
    with pytest.raises(ValueError, match="has step_000001; choose one of them, last or best"):
        choose(tmp_path, "step_000002")
    with pytest.raises(ValueError, match="give a run folder"):
        choose(tmp_path / "absent")
    with pytest.raises(ValueError, match="which run"):
        ExportConfig()
