"""Layers that every drafter shares."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from draftsmith.models.layers import RotaryEmbedding
from draftsmith.models.target import Target, TargetConfig


def test_casting_a_drafter_leaves_its_rotary_frequencies_exact(target_path: Path) -> None:
    spec = Target.load(TargetConfig(path=str(target_path)), device="cpu").spec
    module = nn.ModuleList([RotaryEmbedding(spec), nn.Linear(2, 2)]).bfloat16()
    assert module[1].weight.dtype == torch.bfloat16
    assert module[0].inv_freq.dtype == torch.float32
    assert module[0].inv_freq.tolist() == list(spec.rope_inv_freq)
    cos, _ = module[0](torch.tensor([301]))
    assert torch.allclose(cos[0, :4], torch.cos(301 * torch.tensor(spec.rope_inv_freq)))
