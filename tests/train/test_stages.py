"""The schedule: a pure function of the step, printed before the run, and honest about what acts."""

from __future__ import annotations

import re

import pytest
from hydra import compose, initialize_config_module
from rich.console import Console

from draftsmith.configs.schema import parse
from draftsmith.train.config import TrainConfig
from draftsmith.train.stages import LossConfig, Row, Schedule, StageConfig
from draftsmith.train.terms import TermConfig

LK, E2E, CE = TermConfig(objective="lk", position="dpace"), TermConfig(objective="e2e_tv"), TermConfig(objective="ce")


def stage(name, *terms, **settings):
    return StageConfig(name=name, terms=list(terms), **settings)


def build(*stages, total_steps=10, **settings):
    return Schedule.build(LossConfig(stages=list(stages), **settings), total_steps)


def test_two_stages_with_a_cross_fade():
    ce = TermConfig(objective="ce", weight=0.1)
    schedule = build(stage("cold", LK, ce, steps=6, fade=0.5), stage("e2e", E2E))
    assert [schedule.stage(step) for step in range(10)] == ["cold"] * 6 + ["e2e"] * 4
    assert schedule.weights(2) == {"lk_dpace": 1.0, "ce": 0.1}
    assert schedule.weights(3) == pytest.approx({"lk_dpace": 0.75, "ce": 0.075, "e2e_tv": 0.25})
    assert schedule.weights(5) == pytest.approx({"lk_dpace": 0.25, "ce": 0.025, "e2e_tv": 0.75})
    assert schedule.weights(6) == {"e2e_tv": 1.0}
    assert [schedule.want(step) for step in (0, 4, 9)] == [("ce", "lk"), ("ce", "tv", "lk"), ("tv",)]
    assert schedule.table() == [
        Row(stage="cold", first=0, last=2, term="lk_dpace", weight="1"),
        Row(stage="cold", first=0, last=2, term="ce", weight="0.1"),
        Row(stage="cold", first=3, last=5, term="lk_dpace", weight="0.75 -> 0.25"),
        Row(stage="cold", first=3, last=5, term="ce", weight="0.075 -> 0.025"),
        Row(stage="cold", first=3, last=5, term="e2e_tv", weight="0.25 -> 0.75"),
        Row(stage="e2e", first=6, last=9, term="e2e_tv", weight="1"),
    ]


def test_a_term_of_both_stages_fades_between_its_weights():
    schedule = build(
        stage("one", LK, TermConfig(objective="ce", weight=1.0), fraction=0.4, fade=0.75),
        stage("two", TermConfig(objective="ce", weight=0.2)),
    )
    assert [schedule.weights(step)["ce"] for step in range(5)] == pytest.approx([1.0, 0.8, 0.6, 0.4, 0.2])


def test_weights_do_not_depend_on_what_was_asked_before():
    one = build(stage("cold", LK, fraction=0.6, fade=0.5), stage("e2e", E2E))
    two = build(stage("cold", LK, fraction=0.6, fade=0.5), stage("e2e", E2E))
    for step in range(9, -1, -1):
        one.weights(step)
    assert [one.weights(step) for step in range(10)] == [two.weights(step) for step in range(10)]


def test_lengths():
    def last_steps(schedule):
        return [each.last for each in schedule.stages]

    assert last_steps(build(stage("a", LK, fraction=0.6), stage("b", E2E))) == [5, 9]
    assert last_steps(build(stage("a", LK, steps=3), stage("b", CE, fraction=0.25), stage("c", E2E))) == [2, 4, 9]
    thirds = build(stage("a", LK, fraction=1 / 3), stage("b", CE, fraction=1 / 3), stage("c", E2E, fraction=1 / 3))
    assert last_steps(thirds) == [2, 5, 9]


def test_learning_rate_continues_or_warms_again():
    schedule = build(stage("a", LK, steps=4), stage("b", E2E, rewarm_steps=3))
    assert [schedule.lr_scale(step) for step in range(10)] == pytest.approx([1] * 4 + [1 / 3, 2 / 3] + [1] * 4)
    assert build(stage("a", LK, steps=4), stage("b", E2E)).lr_scale(4) == 1


@pytest.mark.parametrize(
    ("stages", "settings", "message"),
    [
        ([], {}, "loss.stages is empty: choose loss=lk_then_e2e_tv"),
        ([stage("a")], {}, "loss stage a has no terms"),
        ([stage("a", TermConfig(objective="ce", weight=0.0), LK)], {}, "loss term ce is inert: its weight is 0"),
        ([stage("a", TermConfig(objective="ce", weight=-1.0))], {}, "weight=-1.0; it must be finite and not negative"),
        ([stage("a", CE, TermConfig(objective="ce", weight=0.5))], {}, "two terms are called ce and one would shadow"),
        (
            [stage("a", LK, steps=5), stage("b", TermConfig(objective="lk", position="dpace", rho=0.9))],
            {},
            "loss term lk_dpace means different things in two stages; give one of them a label",
        ),
        ([stage("a", LK), stage("b", E2E)], {}, "loss stage a has no length"),
        ([stage("a", LK, steps=3, fraction=0.3), stage("b", E2E)], {}, "give steps or fraction, not both"),
        ([stage("a", LK, fraction=1.5), stage("b", E2E)], {}, "fraction=1.5; it must be above 0 and at most 1"),
        ([stage("a", LK, steps=10), stage("b", E2E)], {}, "loss stage b is inert: 0 of the run's 10 steps are left"),
        ([stage("a", LK, fraction=0.01), stage("b", E2E)], {}, "loss stage a is inert"),
        ([stage("a", LK, steps=5), stage("b", E2E, steps=4)], {}, "the loss stages cover 9 of 10 steps"),
        ([stage("a", LK, fraction=0.2), stage("b", E2E, fraction=0.3)], {}, "the loss stages cover 5 of 10 steps"),
        ([stage("a", LK, fade=0.5)], {}, "fade=0.5 is inert, there is no next stage"),
        ([stage("a", LK, steps=5, fade=1.5), stage("b", E2E)], {}, "fade=1.5; it is a share of the stage's steps"),
        ([stage("a", LK, steps=5, fade=0.05), stage("b", E2E)], {}, "fade=0.05 of 5 steps rounds to no step"),
        ([stage("a", LK, rewarm_steps=3)], {}, "the optimizer's own warm-up is meant for that"),
        ([stage("a", LK, steps=5), stage("b", E2E, rewarm_steps=6)], {}, "rewarm_steps=6; the stage has 5 steps"),
        ([stage("a", E2E)], {"lk_eta": 2.0}, "loss.lk_eta=2.0 is inert: no stage has an lk term"),
        ([stage("a", CE)], {"temperature": 0.5}, "loss.temperature=0.5 is inert"),
        ([stage("a", LK)], {"temperature": 0.0}, "temperature=0.0 must be above 0"),
        ([stage("a", CE)], {"top_k": 100}, "loss.top_k=100 is inert"),
    ],
)
def test_what_would_not_act_is_refused(stages, settings, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        build(*stages, **settings)


def test_a_term_that_lacks_its_teacher_is_refused():
    with pytest.raises(ValueError, match="loss term lk_dpace is inert: it needs lk and there are no target states"):
        Schedule.build(LossConfig(stages=[stage("a", LK)]), 10, has_teacher=False)
    assert Schedule.build(LossConfig(stages=[stage("a", CE)]), 10, has_teacher=False).want(0) == ("ce",)


def test_steps_outside_the_run():
    schedule = build(stage("a", LK))
    for step in (-1, 10):
        with pytest.raises(ValueError, match=f"step {step} is outside the run of 10 steps"):
            schedule.weights(step)


def test_the_table_is_printed():
    console = Console(width=100, record=True)
    build(stage("cold", LK, fraction=0.6, fade=0.5), stage("e2e", E2E)).print(console)
    text = console.export_text()
    assert re.search(r"cold\D+3\D+5\D+e2e_tv\D+0.25 -> 0.75", text)
    assert re.search(r"e2e\D+6\D+9\D+e2e_tv\D+1\D", text)


RECIPES = {
    "lk_then_e2e_tv": [("lk",), ("tv",)],
    "lk": [("lk",)] * 2,
    "ce": [("ce",)] * 2,
    "kl": [("kl",)] * 2,
    "tv": [("tv",)] * 2,
    "lk_alpha": [("log_acceptance",)] * 2,
    "e2e_tv": [("tv",)] * 2,
    "dspark": [("ce", "tv", "acceptance")] * 2,
}


@pytest.mark.parametrize("name", RECIPES)
def test_recipes(name):
    with initialize_config_module("draftsmith.configs", version_base="1.3"):
        config = parse(compose("train", overrides=[f"loss={name}"]), TrainConfig)
    schedule = Schedule.build(config.loss, 100)
    assert [schedule.want(0), schedule.want(99)] == RECIPES[name]


def test_recipes_take_overrides():
    overrides = ["loss=lk_then_e2e_tv", "loss.stages.0.fraction=0.3", "loss.stages.0.fade=0.5", "loss.lk_eta=5"]
    with initialize_config_module("draftsmith.configs", version_base="1.3"):
        config = parse(compose("train", overrides=overrides), TrainConfig)
    schedule = Schedule.build(config.loss, 100)
    assert (schedule.stages[0].last, schedule.stages[0].fade_steps) == (29, 15)
    assert config.loss.options().lk_eta == 5


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("optimizer.lr=nan", "optimizer.lr=nan must be a finite number"),
        ("optimizer.betas=[0.9,inf]", "optimizer.betas.1=inf must be a finite number"),
        ("loss.stages.0.terms.0.weight=-inf", "loss.stages.0.terms.0.weight=-inf must be a finite number"),
    ],
)
def test_a_setting_that_is_not_finite_is_refused_by_name(override, message):
    with initialize_config_module("draftsmith.configs", version_base="1.3"):
        node = compose("train", overrides=[override])
    with pytest.raises(ValueError, match=f"^{message}$"):
        parse(node, TrainConfig)


def test_the_compiled_kernel_is_asked_for_in_the_loss():
    with initialize_config_module("draftsmith.configs", version_base="1.3"):
        config = parse(compose("train", overrides=["loss=e2e_tv", "loss.compile=true"]), TrainConfig)
    assert config.loss.options().compile
    assert not LossConfig().options().compile
