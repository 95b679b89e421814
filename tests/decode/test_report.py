"""Every figure of evaluation.json follows from its `prompts`."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from toy_drafters import RandomDrafter, TableDrafter

from draftsmith.decode.comparison import Divergence, Outcome
from draftsmith.decode.prompts import Prompt
from draftsmith.decode.report import check_writable, circumstances, read_report, summarise, table, write_report
from draftsmith.decode.speculative import DecodingConfig, Generation
from draftsmith.models.target import Target, TargetConfig


@pytest.fixture(scope="module")
def target(target_path: Path) -> Target:
    return Target.load(TargetConfig(path=str(target_path)), device="cpu")


def outcome(
    accepted: list[int],
    *,
    tokens: list[int],
    plain: list[int] | None = None,
    acceptance: list[list[float]] | None = None,
    divergence: Divergence | None = None,
) -> Outcome:
    plain = tokens if plain is None else plain
    rows = [[1.0] * 5] * len(accepted) if acceptance is None else acceptance
    return Outcome(
        prompt=Prompt(id="a:1", tokens=torch.tensor([1, 2]), domain="chat"),
        plain=Generation(tokens=plain, accepted=[], acceptance=[], seconds=2.0),
        speculative=Generation(tokens=tokens, accepted=accepted, acceptance=rows, seconds=0.5),
        divergence=divergence,
    )


def printed(report: dict[str, Any]) -> str:
    console = Console(file=io.StringIO(), width=120)
    console.print(table(report))
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_figures(target: Target) -> None:
    drafter = RandomDrafter(5, target.spec.vocab_size)
    tokens = [7, 7, 8, 9, 7, 7, 8, 9, 7, 7, 8, 9]
    report = summarise([outcome([3, 0, 5], tokens=tokens)], target, drafter, DecodingConfig())
    assert report["acceptance_length"] == pytest.approx(3.667, abs=1e-3)
    assert report["acceptance_length_without_bonus"] == pytest.approx(2.667, abs=1e-3)
    assert report["acceptance_length_mean_over_prompts"] == pytest.approx(3.667, abs=1e-3)
    assert report["cumulative"] == pytest.approx([2 / 3, 2 / 3, 2 / 3, 1 / 3, 1 / 3])
    assert report["conditional"] == pytest.approx([2 / 3, 1, 1, 0.5, 1])
    assert report["tokens_per_second"] == 24.0
    assert report["baseline_tokens_per_second"] == 6.0
    assert report["speedup"] == 4.0
    assert report["identical_to_target"] is True
    assert report["distinct_token_share"] == 0.25
    assert (report["num_prompts"], report["num_rounds"], report["num_draft_tokens"]) == (1, 3, 5)
    assert (report["temperature"], report["verification"], report["draft_sampling"]) == (0.0, "greedy", "greedy")
    assert (report["dtype"], report["batch"], report["max_new_tokens"]) == ("float32", 1, 128)
    assert report["target"] == target.config.path
    assert report["analytic_acceptance"] is None
    assert "threads" in report["hardware"]
    text = printed(report)
    lines = {
        line.split("\u2502")[1].strip(): line.split("\u2502")[2].strip()
        for line in text.splitlines()
        if "\u2502" in line
    }
    assert lines["acceptance length with bonus, pooled"] == "3.667"
    assert lines["acceptance length without bonus"] == "2.667"
    assert lines["cumulative acceptance by step"] == "0.67 0.67 0.67 0.33 0.33"
    assert lines["conditional acceptance by step"] == "0.67 1.00 1.00 0.50 1.00"


def test_sampled_outputs_are_not_compared_token_by_token(target: Target) -> None:
    config = DecodingConfig(temperature=1.0, top_p=0.9)
    drafter = TableDrafter(2, torch.zeros(4, 4))
    sampled = outcome([1, 0], tokens=[1, 2], plain=[3], acceptance=[[0.5, 0.2], [0.3, 0.1]])
    report = summarise([sampled], target, drafter, config)
    assert report["identical_to_target"] is None
    assert report["analytic_acceptance"] == pytest.approx([0.4, 0.2])
    assert report["prompts"][0]["acceptance"] == [[0.5, 0.2], [0.3, 0.1]]
    assert (report["verification"], report["draft_sampling"]) == ("speculative_sampling", "sampled")
    assert "not defined for sampled outputs" in printed(report)


def test_a_difference_is_shown(target: Target) -> None:
    divergence = Divergence(position=1, token=2, speculative_token=3, top2_gap=1e-6)
    different = outcome([0], tokens=[1, 3], plain=[1, 2], divergence=divergence)
    report = summarise([different, outcome([0], tokens=[1])], target, RandomDrafter(5, 4), DecodingConfig())
    assert report["identical_to_target"] is False
    assert report["prompts"][0]["divergence"] == {
        "position": 1,
        "token": 2,
        "speculative_token": 3,
        "top2_gap": 1e-6,
    }
    assert "FALSE" in printed(report)


def test_outputs_without_rounds_divide_nothing(target: Target) -> None:
    report = summarise([outcome([], tokens=[4])], target, RandomDrafter(2, 4), DecodingConfig())
    assert report["acceptance_length"] is None
    assert report["num_rounds"] == 0
    assert "-" in printed(report)
    json.dumps(report, allow_nan=False)


def test_the_file_is_written_whole(target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = summarise([outcome([3, 0, 5], tokens=[1])], target, RandomDrafter(5, 4), DecodingConfig())
    path = tmp_path / "new" / "evaluation.json"
    write_report(path, report)
    before = path.read_text()
    assert json.loads(before) == json.loads(json.dumps(report))
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_report(path, {**report, "acceptance_length": float("nan")})
    assert path.read_text() == before
    assert [entry.name for entry in path.parent.iterdir()] == ["evaluation.json"]


def test_a_report_that_can_be_written_leaves_nothing_but_its_folder(tmp_path: Path) -> None:
    check_writable(tmp_path / "new" / "deeper" / "evaluation.json")
    assert list((tmp_path / "new" / "deeper").iterdir()) == []
    with pytest.raises(ValueError, match=r"cannot be written \(File name too long"):
        check_writable(tmp_path / ("e" * 300))


def test_the_circumstances_of_a_figure_stand_beside_it(target: Target) -> None:
    drafter = RandomDrafter(5, target.spec.vocab_size)
    config = DecodingConfig(temperature=0.7, top_p=0.9, max_new_tokens=40)
    report = summarise([outcome([3, 0, 5], tokens=[7] * 12)], target, drafter, config)
    said = circumstances({**report, "prompt_set": "held_out", "thinking": None})
    assert f"target {target.config.path}, float32; 5 drafts a round, drawn sampled; temperature 0.7, top-p 0.9" in said
    assert "speculative_sampling; prompts held_out, at most 40 new tokens, thinking: the template's default" in said


def test_a_report_is_read_again_and_other_files_are_refused(tmp_path: Path, target: Target) -> None:
    report = summarise(
        [outcome([3], tokens=[7] * 4)], target, RandomDrafter(5, target.spec.vocab_size), DecodingConfig()
    )
    write_report(tmp_path / "evaluation.json", report)
    assert read_report(tmp_path / "evaluation.json")["acceptance_length"] == 4
    for name, text, message in (
        ("absent.json", None, "does not exist; measure a drafter with: draftsmith evaluate"),
        ("torn.json", '{"acceptance_length": 4', "is not valid JSON"),
        ("other.json", "{}", "is not the report of an evaluation"),
    ):
        if text is not None:
            (tmp_path / name).write_text(text)
        with pytest.raises(ValueError, match=message):
            read_report(tmp_path / name)
