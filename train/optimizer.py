"""The optimizer, and the learning rate as a pure function of the step."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import nn

OPTIMIZERS = ("adamw", "sgd")


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerConfig:
    """How weights are updated.

    Attributes:
        name: adamw, or sgd (no momentum, no decay: exactness checks, where Adam would hide a constant factor).
        lr: the learning rate after warm-up.
        betas: AdamW's two decay rates.
        eps: AdamW's epsilon.
        weight_decay: AdamW's decay, on matrices only: norms and other one-dimensional parameters have none.
        warmup: linear warm-up; below 1 a fraction of all steps, else a number of steps.
        final_lr_fraction: the fraction of lr at which the cosine ends, on the last step.
        gradient_clipping: largest norm of the whole gradient; 0: no clipping.
    """

    name: str = "adamw"
    lr: float = 5e-4
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    eps: float = 1e-8
    weight_decay: float = 0.1
    warmup: float = 0.04
    final_lr_fraction: float = 0.1
    gradient_clipping: float = 1.0

    def __post_init__(self) -> None:
        if self.name not in OPTIMIZERS:
            raise ValueError(f"optimizer.name={self.name} is unknown; choose from {', '.join(OPTIMIZERS)}")
        if self.lr <= 0:
            raise ValueError(f"optimizer.lr={self.lr} must be positive")
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"optimizer.betas={self.betas} must be two numbers in [0, 1)")
        if self.weight_decay < 0 or self.gradient_clipping < 0:
            raise ValueError("optimizer.weight_decay and optimizer.gradient_clipping must be at least 0 (0: off)")
        if self.warmup < 0 or (self.warmup >= 1 and self.warmup != int(self.warmup)):
            raise ValueError(
                f"optimizer.warmup={self.warmup} must be a fraction of all steps below 1, or a whole number of steps"
            )
        if not 0 <= self.final_lr_fraction <= 1:
            raise ValueError(f"optimizer.final_lr_fraction={self.final_lr_fraction} must be in [0, 1]")

    def warmup_steps(self, total_steps: int) -> int:
        """The number of steps before the full learning rate is reached."""
        return round(self.warmup * total_steps) if self.warmup < 1 else int(self.warmup)


def build_optimizer(config: OptimizerConfig, module: nn.Module) -> torch.optim.Optimizer:
    """A plain torch optimizer over the module's trainable parameters; it needs no compiled kernel."""
    parameters = [p for p in module.parameters() if p.requires_grad]
    if config.name == "sgd":
        return torch.optim.SGD(parameters, lr=config.lr)
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    beta1, beta2 = config.betas
    return torch.optim.AdamW([g for g in groups if g["params"]], lr=config.lr, betas=(beta1, beta2), eps=config.eps)


def learning_rate(config: OptimizerConfig, step: int, total_steps: int) -> float:
    """The learning rate of the update at `step` (0-based): linear warm-up, then a cosine that ends on the last step."""
    warmup = config.warmup_steps(total_steps)
    if step < warmup:
        return config.lr * (step + 1) / warmup
    progress = (step - warmup) / max(1, total_steps - 1 - warmup)
    cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
    return config.lr * (config.final_lr_fraction + (1 - config.final_lr_fraction) * cosine)
