"""What a training run is made of."""

from __future__ import annotations

from dataclasses import dataclass, field

from draftsmith.models.drafter import DrafterConfig
from draftsmith.models.target import TargetConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """The root of train.yaml, cache.yaml and preview.yaml."""

    target: TargetConfig = field(default_factory=TargetConfig)
    drafter: DrafterConfig = field(default_factory=DrafterConfig)
