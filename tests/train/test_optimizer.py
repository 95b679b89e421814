from __future__ import annotations

import math
import shutil
import subprocess

import pytest
import torch
from torch import nn

from draftsmith.train.optimizer import OptimizerConfig, build_optimizer, learning_rate


def test_the_learning_rate_warms_up_then_follows_a_cosine_to_its_end() -> None:
    config = OptimizerConfig(lr=1.0, warmup=4, final_lr_fraction=0.1)
    rates = [learning_rate(config, step, 10) for step in range(10)]
    assert rates[:5] == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0])
    assert rates[5:] == pytest.approx([0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * k / 5)) for k in range(1, 6)])
    assert rates[-1] == pytest.approx(0.1)


def test_a_fraction_of_all_steps_is_a_number_of_warm_up_steps() -> None:
    assert OptimizerConfig(warmup=0.04).warmup_steps(500) == 20
    assert OptimizerConfig(warmup=20).warmup_steps(500) == 20
    assert OptimizerConfig(warmup=0).warmup_steps(500) == 0
    assert learning_rate(OptimizerConfig(lr=2.0, warmup=0), 0, 1) == 2.0


def test_norms_have_no_weight_decay_and_every_parameter_is_updated_once() -> None:
    module = nn.Sequential(nn.Linear(3, 2), nn.LayerNorm(2))
    optimizer = build_optimizer(OptimizerConfig(weight_decay=0.3), module)
    decays = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert [decays[id(p)] for p in module.parameters()] == [0.3, 0.0, 0.0, 0.0]
    assert len(decays) == sum(len(group["params"]) for group in optimizer.param_groups)


def test_frozen_parameters_are_left_out() -> None:
    module = nn.Linear(3, 2).requires_grad_(False)
    module.bias.requires_grad_(True)
    optimizer = build_optimizer(OptimizerConfig(name="sgd"), module)
    assert [p is module.bias for group in optimizer.param_groups for p in group["params"]] == [True]


def test_the_optimizer_is_torchs_own_and_needs_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert shutil.which("gcc") is None
    with pytest.raises(OSError):
        subprocess.run(["gcc", "--version"], check=True)
    module = nn.Linear(2, 2)
    optimizer = build_optimizer(OptimizerConfig(), module)
    assert type(optimizer) is torch.optim.AdamW
    module(torch.ones(1, 2)).sum().backward()
    optimizer.step()


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"name": "adam"}, "optimizer.name=adam is unknown; choose from adamw, sgd"),
        ({"lr": 0.0}, "optimizer.lr=0.0 must be positive"),
        ({"betas": [0.9]}, "must be two numbers"),
        ({"warmup": 1.5}, "a fraction of all steps below 1, or a whole number of steps"),
        ({"final_lr_fraction": 2.0}, r"must be in \[0, 1\]"),
        ({"gradient_clipping": -1.0}, r"at least 0 \(0: off\)"),
    ],
)
def test_settings_that_mean_nothing_are_refused(setting: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        OptimizerConfig(**setting)  # type: ignore[arg-type]
