from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tiny_run import write_conversations

from draftsmith.models.target import Target, TargetConfig
from draftsmith.train.world import World


@pytest.fixture(scope="session")
def world() -> World:
    """A process group of this process alone, for all tests of the session."""
    return World.join()


@pytest.fixture(scope="session")
def target(target_path: Path) -> Target:
    return Target.load(TargetConfig(path=str(target_path)), device="cpu")


@pytest.fixture(scope="session")
def conversations(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_conversations(tmp_path_factory.mktemp("data") / "conversations.jsonl")


@pytest.fixture(autouse=True)
def plain_linear() -> Iterator[None]:
    """DeepSpeed's ZeRO-3 replaces this function for the whole process, and so for every test after it."""
    linear = torch.nn.functional.linear
    yield
    torch.nn.functional.linear = linear
