"""Mixture-of-experts MLP of the Hy3 and DeepSeek kind: top-k routed experts plus an always-on shared one."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from draftsmith.models.layers import SwiGLU

TINY = 1e-20  # guards the renormalisation, as in Hy3 and GLM-4.5


@dataclass(frozen=True, slots=True, kw_only=True)
class MoEConfig:
    """Routing and sizes.

    Attributes:
        num_experts: routed experts; 0: no mixture, the block's MLP is dense.
        experts_per_token: k, how many of them a token takes.
        expert_intermediate_size: width of a routed expert.
        shared_intermediate_size: width of the shared expert; 0: none.
        scores: sigmoid (Hy3, DeepSeek, GLM-4.5) or softmax (Qwen) of the router's logits.
        expert_bias: a bias per expert that is added for the choice only (Hy3, DeepSeek, GLM-4.5). It is loaded, not
            trained.
        scaling: what the routed sum is multiplied with (2.826 for Hy3).
        shared_expert_gate: the shared expert times a sigmoid gate of one output (Qwen3-Next, Qwen3.5).
    """

    num_experts: int = 0
    experts_per_token: int = 2
    expert_intermediate_size: int = 512
    shared_intermediate_size: int = 512
    scores: str = "sigmoid"
    expert_bias: bool = True
    scaling: float = 1.0
    shared_expert_gate: bool = False


class Router(nn.Module):
    """Chooses experts by biased scores and weighs them by unbiased ones, in float32 whatever the training type."""

    expert_bias: Tensor

    def __init__(self, hidden: int, config: MoEConfig) -> None:
        super().__init__()
        if config.scores not in ("sigmoid", "softmax"):
            raise ValueError(f"moe.scores is {config.scores!r}; it must be one of: sigmoid, softmax")
        if not 1 <= config.experts_per_token <= config.num_experts:
            raise ValueError(
                f"moe.experts_per_token is {config.experts_per_token}; "
                f"it must be in 1..{config.num_experts} (moe.num_experts)"
            )
        self.config = config
        self.weight = nn.Parameter(torch.empty(config.num_experts, hidden))
        bias = torch.zeros(config.num_experts, dtype=torch.float32)
        self.register_buffer("expert_bias", bias, persistent=config.expert_bias)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x: (token, hidden) -> weights and experts, each (token, experts_per_token)."""
        wide = torch.promote_types(x.dtype, torch.float32)
        logits = F.linear(x.to(wide), self.weight.to(wide))
        scores = logits.sigmoid() if self.config.scores == "sigmoid" else logits.softmax(-1)
        experts = (scores + self.expert_bias.to(wide)).topk(self.config.experts_per_token, dim=-1).indices
        weights = scores.gather(-1, experts)
        weights = weights / (weights.sum(-1, keepdim=True) + TINY)
        return weights * self.config.scaling, experts


class Experts(nn.Module):
    """SwiGLU experts with stacked weights, applied to tokens sorted by expert: one grouped product per matrix.

    Attributes:
        load: (expert,) int64, how many tokens of the last call each expert took.
    """

    def __init__(self, hidden: int, num_experts: int, intermediate: int) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.empty(num_experts, 2 * intermediate, hidden))
        self.down_proj = nn.Parameter(torch.empty(num_experts, hidden, intermediate))
        self.load = torch.zeros(num_experts, dtype=torch.int64)

    def forward(self, x: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        """x: (token, hidden); weights, experts: (token, k) -> (token, hidden), summed in float32."""
        num_experts = len(self.gate_up_proj)
        chosen = experts.flatten()
        order = chosen.argsort(stable=True)
        token = order // experts.shape[1]
        self.load = torch.bincount(chosen, minlength=num_experts)
        ends = self.load.cumsum(0).to(torch.int32)
        gate, up = F.grouped_mm(x[token], self.gate_up_proj.mT, offs=ends).chunk(2, -1)
        out = F.grouped_mm(F.silu(gate) * up, self.down_proj.mT, offs=ends)
        out = out.to(weights.dtype) * weights.flatten()[order, None]
        return out.new_zeros(x.shape).index_add(0, token, out)


class MoE(nn.Module):
    """scaling * sum of the chosen experts, weighted, plus the shared expert."""

    def __init__(self, hidden: int, config: MoEConfig) -> None:
        super().__init__()
        self.router = Router(hidden, config)
        self.experts = Experts(hidden, config.num_experts, config.expert_intermediate_size)
        self.shared_expert = (
            SwiGLU(hidden, config.shared_intermediate_size) if config.shared_intermediate_size else None
        )
        if config.shared_expert_gate and self.shared_expert is None:
            raise ValueError("moe.shared_expert_gate needs a shared expert; set moe.shared_intermediate_size")
        self.shared_expert_gate = nn.Linear(hidden, 1, bias=False) if config.shared_expert_gate else None

    def forward(self, x: Tensor) -> Tensor:
        """x: (..., hidden) -> (..., hidden); routed and shared parts are added in float32."""
        flat = x.flatten(0, -2)
        total = self.experts(flat, *self.router(flat))
        if self.shared_expert is not None:
            shared = self.shared_expert(flat)
            if self.shared_expert_gate is not None:
                shared = shared * self.shared_expert_gate(flat).sigmoid()
            total = total + shared
        return total.to(x.dtype).view_as(x)


def load_balance(load: Tensor) -> dict[str, float]:
    """How evenly tokens fall on experts.

    Args:
        load: (expert,), how many tokens each took.

    Returns:
        expert_max_load: the busiest expert's load over the mean load, 1 where all are equal (1 + MaxVio of arXiv
            2408.15664).
        experts_unused: how many took no token.
    """
    shares = load.double() / load.sum().clamp(min=1)
    return {"expert_max_load": len(load) * float(shares.max()), "experts_unused": float((load == 0).sum())}
