"""An ablation goes on cell by cell, and its table is what the cells' own files say."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hydra import compose, initialize_config_module
from rich.console import Console

from draftsmith.configs.schema import parse
from draftsmith.train import ablation
from draftsmith.train.ablation import AblateConfig, ablate, compose_cells
from draftsmith.train.config import TrainConfig
from draftsmith.train.world import World


class Interrupted(BaseException):
    """Stands for a killed process."""


@pytest.fixture(autouse=True)
def hydra() -> Iterator[None]:
    """What a command begins with."""
    with initialize_config_module("draftsmith.configs", version_base="1.3"):
        yield


@pytest.fixture
def overrides(target_path: Path, conversations: Path, tmp_path: Path) -> list[str]:
    """Two cells of three steps each, on the tiny target."""
    questions = tmp_path / "questions.jsonl"
    questions.write_text("".join(json.dumps({"prompt": f"How many are {i} foxes?"}) + "\n" for i in range(4)))
    return [
        "target=hf",
        f"target.path={target_path}",
        f"data.sources=[{{path: {conversations}}}]",
        "data.max_length=64",
        "data.row_tokens=64",
        "data.held_out_fraction=0.3",
        "states.mode=online",
        "drafter=dflash",
        "drafter.block_size=4",
        "drafter.num_layers=1",
        "drafter.target_layer_ids=[0,2]",
        "trainer.steps=3",
        "trainer.epochs=null",
        "trainer.rows_per_step=2",
        f"output_dir={tmp_path / 'outputs'}",
        "run_name=compared",
        "+ablation.cells.plain=[]",
        '+ablation.cells.corrected=["drafter.head=correction","optimizer.lr=2e-3"]',
        "ablation.seeds=[0]",
        f"+ablation.prompts.code={questions}",
        "+ablation.prompts.chat=held_out",
        "ablation.num_prompts=3",
        "ablation.max_new_tokens=12",
    ]


def start(world: World, overrides: list[str]) -> tuple[dict[str, Any], str]:
    console = Console(file=io.StringIO(), width=200)
    config = parse(compose("ablate", overrides), AblateConfig)
    report = ablate(config, overrides, world, console)
    assert isinstance(console.file, io.StringIO)
    return report, console.file.getvalue()


def read(path: Path) -> Any:
    return json.loads(path.read_text())


def test_a_finished_cell_is_not_run_again_and_the_table_is_of_the_cells_files(
    world: World, overrides: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[TrainConfig] = []
    honest, stop_at = ablation.train, [2]

    def watched(config: TrainConfig, world: World) -> Path:
        begun.append(config)
        if len(begun) == stop_at[0]:
            raise Interrupted
        return honest(config, world)

    monkeypatch.setattr(ablation, "train", watched)
    with pytest.raises(Interrupted):
        start(world, overrides)
    folder = tmp_path / "outputs" / "compared"
    first, second = folder / "plain_seed0" / "result.json", folder / "corrected_seed0" / "result.json"
    partial = read(folder / "ablation.json")
    assert (partial["finished"], partial["planned"]) == (1, 2)
    assert [cell["seeds"] for cell in partial["cells"].values()] == [[0], []]
    assert not second.exists()
    before, plain = first.read_bytes(), (folder / "plain.json").read_bytes()

    stop_at[0] = 0
    report, shown = start(world, overrides)
    assert [config.run_name for config in begun] == ["plain_seed0", "corrected_seed0", "corrected_seed0"]
    assert begun[-1].optimizer.lr == 2e-3
    assert begun[0].optimizer.lr == 5e-4
    assert (first.read_bytes(), (folder / "plain.json").read_bytes()) == (before, plain)
    assert json.loads(json.dumps(report)) == read(folder / "ablation.json")
    assert report["finished"] == 2
    assert "10 of 10 outputs identical" in shown
    for name, path in (("plain", first), ("corrected", second)):
        cell, prompts = report["cells"][name], read(path)["prompts"]
        assert [prompt["tokens"] for prompt in prompts] == [one["tokens"] for one in json.loads(plain)["outputs"]]
        assert (cell["outputs"], cell["outputs_identical_to_target"]) == (len(prompts), len(prompts))
        for domain in ("code", "chat"):
            rounds = [count for prompt in prompts if prompt["domain"] == domain for count in prompt["accepted"]]
            figures = cell["domains"][domain]
            assert figures["num_rounds"] == len(rounds) > 0
            assert figures["acceptance_length"] == pytest.approx(1 + np.mean(rounds))
            assert figures["cumulative"] == pytest.approx([np.mean(np.array(rounds) >= step) for step in (1, 2, 3)])
            low, high = figures["acceptance_length_interval"]
            value = f"{figures['acceptance_length']:.2f} [{low:.2f}, {high:.2f}]"
            assert value in shown
            row = next(
                line for line in (folder / "ablation.md").read_text().splitlines() if line.startswith(f"| {name} ")
            )
            assert value in row

    start(world, [*overrides, "ablation.batch_size=1"])  # decides no figure
    assert len(begun) == 3


def test_seeds_are_pooled_by_prompt() -> None:
    """Two seeds and two prompts give two things to resample, one with all of the rounds that accept."""

    def result(seed: int, accepted: list[int]) -> dict[str, Any]:
        records = [("a", accepted), ("b", [0, 0])]
        prompts = [{"domain": "chat", "hash": h, "tokens": [], "accepted": x, "divergence": None} for h, x in records]
        return {"cell": "one", "seed": seed, "num_draft_tokens": 2, "prompts": prompts}

    summary = ablation.summarise({"one": ["x=1"], "two": []}, ["chat"], [result(0, [2, 1]), result(1, [2, 2])])
    assert (summary["one"]["seeds"], summary["two"]["seeds"]) == ([0, 1], [])
    figures = summary["one"]["domains"]["chat"]
    assert figures["acceptance_length"] == 1 + 7 / 8
    assert figures["cumulative"] == [4 / 8, 3 / 8]
    assert figures["acceptance_length_interval"] == pytest.approx((1.0, 1 + 7 / 4))
    assert summary["two"]["domains"]["chat"]["acceptance_length"] is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("optimizer.lr=3e-3", r"optimizer\.lr was 0\.0005 in .*plain_seed0.* and is 0\.003 now"),
        ("ablation.max_new_tokens=6", r"ablation\.max_new_tokens was 12 in .* and is 6 now"),
        ("ablation.num_prompts=2", r"ablation\.prompts\..* \(hashes\) was"),
    ],
)
def test_results_of_other_settings_are_refused(
    world: World, overrides: list[str], monkeypatch: pytest.MonkeyPatch, change: str, message: str
) -> None:
    start(world, [*overrides, "~ablation.cells.corrected"])
    with pytest.raises(ValueError, match=message):
        start(world, [*overrides, "~ablation.cells.corrected", change])


def test_every_training_option_reaches_the_cell(overrides: list[str]) -> None:
    changed = {
        "seed": 7,
        "resume": "auto",
        "run_name": "plain_seed7",
        "output_dir": str(Path(overrides[14].partition("=")[2]) / "compared"),
        "wandb.mode": "offline",
        "deepspeed.zero_stage": 2,
        "loss.lk_eta": 2.0,
        "states.shard_tokens": 5,
        "optimizer.lr": 1.0,
    }
    own = [f"{key}={value}" for key, value in changed.items() if "." in key]
    config = parse(compose("ablate", [*overrides, *own]), AblateConfig)
    made = compose_cells(config, [*overrides, *own])["plain"].training("plain", 7)
    kept = [line for line in overrides if "ablation." not in line and not line.startswith(("output_dir", "run_name"))]
    assert made == parse(compose("train", [*kept, *(f"{k}={v}" for k, v in changed.items())]), TrainConfig)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("~ablation.cells", "choose what to compare"),
        ("ablation.seeds=[1,1]", "each once"),
        ("+ablation.prompts.math=''", r"ablation\.prompts\.math is not given"),
        ("seed=3", r"ablation\.seeds"),
        ("resume=auto", "remove resume"),
        ("run_name=null", "add run_name"),
        ("ablation.num_prompts=0", "at least 1"),
        ("ablation.max_new_tokens=1", "at least 2"),
        ("ablation.batch_size=0", "ablation.batch_size=0 must be at least 1"),
        ("+ablation.cells={a/b: []}", "becomes a folder"),
        ('+ablation.cells.bad=["run_name=x"]', "the same for all"),
        ('+ablation.cells.bad=["drafter.hed=none"]', r"ablation\.cells\.bad.*hed"),
        ('+ablation.cells.bad=["trainer.steps=0"]', r"ablation\.cells\.bad.*trainer\.steps=0"),
    ],
)
def test_what_cannot_be_compared_is_refused_before_any_work(overrides: list[str], change: str, message: str) -> None:
    changed = [*overrides, change]
    if change == "~ablation.cells":
        changed = [line for line in overrides if "ablation.cells" not in line]
    with pytest.raises(ValueError, match=message):
        compose_cells(parse(compose("ablate", changed), AblateConfig), changed)


@pytest.mark.parametrize("experiment", ["ablation_dfly", "ablation_mtp"])
def test_the_experiments_compose(experiment: str) -> None:
    overrides = [f"experiment={experiment}", "ablation.prompts.code=c.jsonl", "ablation.prompts.math=m.jsonl"]
    config = parse(compose("ablate", overrides), AblateConfig)
    cells = compose_cells(config, overrides)
    assert config.run_name == experiment
    assert len({repr(cell) for cell in cells.values()}) == len(cells)
    for cell in cells.values():  # an equal budget
        assert (cell.data, cell.optimizer, cell.trainer) == (config.data, config.optimizer, config.trainer)
