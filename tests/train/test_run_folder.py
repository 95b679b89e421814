from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from tiny_run import tiny_config

from draftsmith.train.config import TrainConfig, WandbConfig
from draftsmith.train.run_folder import RunFolder, choose_run_folder, refuse_changed_facts, write_records

FACTS = {"total_steps": 10, "world_size": 1}


@pytest.fixture
def config(tmp_path: Path) -> TrainConfig:
    return tiny_config(tmp_path / "target", tmp_path / "data.jsonl", tmp_path / "outputs")


def begun(config: TrainConfig) -> Path:
    """A run folder with its records and one whole checkpoint."""
    folder = choose_run_folder(config)
    write_records(folder, config, FACTS)
    step = folder.path / "checkpoints" / "step_000005"
    step.mkdir(parents=True)
    (step / "complete.json").write_text('{"step": 5, "files": {}}')
    return folder.path


def test_two_runs_of_one_second_have_two_folders(config: TrainConfig) -> None:
    unnamed = replace(config, run_name=None)
    folders = {choose_run_folder(unnamed).path for _ in range(20)}
    assert len(folders) == 20


def test_a_folder_is_made_only_once_nothing_can_be_refused_any_more(config: TrainConfig) -> None:
    for resume in (None, "auto"):
        folder = choose_run_folder(replace(config, resume=resume))
        assert not folder.path.exists()
    write_records(folder, config, FACTS)
    assert sorted(path.name for path in folder.path.iterdir()) == ["config.yaml", "run.json"]


def test_a_name_that_leaves_the_output_folder_and_a_place_that_cannot_be_written_are_refused(
    config: TrainConfig, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=r"run_name=a/\.\./b is no plain folder name"):
        choose_run_folder(replace(config, run_name="a/../b"))
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"output_dir=.*file/outputs cannot be made .*choose another output_dir"):
        choose_run_folder(replace(config, output_dir=str(tmp_path / "file" / "outputs")))


def test_a_folder_lies_where_the_user_stands(
    config: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert choose_run_folder(replace(config, output_dir="here")).path == tmp_path / "here" / "tiny"


def test_a_folder_that_is_not_empty_is_refused(config: TrainConfig) -> None:
    begun(config)
    with pytest.raises(ValueError, match="is not empty; go on with that run by resume=auto"):
        choose_run_folder(config)


def test_records_are_written_once(config: TrainConfig) -> None:
    path = begun(config)
    before = {name: (path / name).read_bytes() for name in ("config.yaml", "run.json")}
    record = json.loads(before["run.json"])
    assert {"argv", "git_commit", "versions", "seeds", "facts"} <= record.keys()
    assert record["facts"] == FACTS
    assert set(record["versions"]) >= {"python", "torch", "deepspeed", "transformers"}
    again = replace(config, resume="auto")
    write_records(choose_run_folder(again), again, FACTS)
    assert before == {name: (path / name).read_bytes() for name in before}


def test_auto_starts_anew_only_where_nothing_is_and_says_so(config: TrainConfig) -> None:
    auto = replace(config, resume="auto")
    folder = choose_run_folder(auto)
    assert folder.checkpoint is None
    assert folder.notes == (f"resume=auto: no checkpoint in {folder.path}, starting anew",)
    torn = folder.path / "checkpoints" / "step_000001"
    torn.mkdir(parents=True)
    with pytest.raises(ValueError, match=r"no whole checkpoint in .* \(1 torn\)"):
        choose_run_folder(auto)
    with pytest.raises(ValueError, match=r"resume=auto finds a run by its name; add run_name="):
        choose_run_folder(replace(auto, run_name=None))


def test_a_run_is_found_by_name_by_folder_and_by_checkpoint(config: TrainConfig) -> None:
    path = begun(config)
    expected = RunFolder(path=path, checkpoint=path / "checkpoints" / "step_000005")
    for resume in ("auto", str(path), str(expected.checkpoint)):
        assert choose_run_folder(replace(config, resume=resume)) == expected
    assert choose_run_folder(replace(config, resume=str(path), run_name=None)) == expected


def test_an_explicit_path_that_cannot_be_loaded_is_an_error(config: TrainConfig) -> None:
    path = begun(config)
    with pytest.raises(ValueError, match="no such folder; name a run folder or one of its checkpoints"):
        choose_run_folder(replace(config, resume=str(path / "nowhere")))
    empty = path.parent / "empty"
    empty.mkdir()
    with pytest.raises(ValueError, match="no whole checkpoint"):
        choose_run_folder(replace(config, resume=str(empty), run_name=None))
    with pytest.raises(ValueError, match="lies in run tiny, not run_name=other"):
        choose_run_folder(replace(config, resume=str(path), run_name="other"))
    torn = path / "checkpoints" / "step_000006"
    torn.mkdir()
    with pytest.raises(ValueError, match=r"step_000006 cannot be loaded: complete\.json is missing"):
        choose_run_folder(replace(config, resume=str(torn)))
    # The whole run still falls back to its last good checkpoint, loudly, and clears the torn one away.
    folder = choose_run_folder(replace(config, resume=str(path)))
    assert folder.checkpoint == path / "checkpoints" / "step_000005"
    assert "WARNING" in folder.notes[0]
    assert not torn.exists()


def test_a_changed_field_that_decides_results_is_refused_with_both_values(config: TrainConfig) -> None:
    begun(config)
    longer = replace(config, resume="auto", trainer=replace(config.trainer, epochs=4))
    with pytest.raises(ValueError, match=r"trainer\.epochs was 2 .* and is 4 now, which decides results"):
        choose_run_folder(longer)
    other = replace(config, resume="auto", optimizer=replace(config.optimizer, lr=2e-2))
    with pytest.raises(ValueError, match=r"optimizer\.lr was 0\.01 .* and is 0\.02 now"):
        choose_run_folder(other)


def test_a_changed_fact_is_refused_with_both_values(config: TrainConfig) -> None:
    begun(config)
    again = replace(config, resume="auto")
    with pytest.raises(ValueError, match=r"world_size was 1 .* and is 2 now"):
        refuse_changed_facts(choose_run_folder(again), {**FACTS, "world_size": 2})


def test_what_changes_no_weight_may_change(config: TrainConfig) -> None:
    begun(config)
    changed = replace(
        config,
        resume="auto",
        wandb=WandbConfig(mode="offline"),
        trainer=replace(config.trainer, log_every_steps=3, checkpoint_every_steps=None, keep_checkpoints=1),
    )
    assert choose_run_folder(changed).checkpoint is not None
