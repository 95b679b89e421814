"""Terms of the loss: an objective by name or by dotted path, with the weights of its steps."""

from __future__ import annotations

import importlib
import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from draftsmith.models.head import STATISTICS, TokenStats
from draftsmith.train.objectives import (
    Ratio,
    confidence_bce,
    decay_weights,
    dpace_weights,
    e2e_tv,
    geometric_weights,
    given,
    lk_alpha,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """A loss before it is weighted and summed.

    Attributes:
        unit: "slot": one value for each step; "chain": one for each anchor.
        wants: the statistics that it needs; `confidence_logit` is the drafter's own, the others the target head's.
        loss: (stats on the grid, valid) -> (..., step) or, for a chain, (...).
    """

    unit: str
    wants: tuple[str, ...]
    loss: Callable[[TokenStats, Tensor], Tensor]


OBJECTIVES: dict[str, Objective] = {
    # -log q(x), x the token of the data.
    "ce": Objective(unit="slot", wants=("ce",), loss=lambda s, _: given(s.ce, "ce")),
    # -log q(argmax p): the token that greedy verification would accept.
    "target_ce": Objective(unit="slot", wants=("target_ce",), loss=lambda s, _: given(s.target_ce, "target_ce")),
    # KL(p || q), distillation (arXiv 1503.02531, 2310.08461).
    "kl": Objective(unit="slot", wants=("kl",), loss=lambda s, _: given(s.kl, "kl")),
    # KL(q || p) (arXiv 2306.08543).
    "reverse_kl": Objective(unit="slot", wants=("reverse_kl",), loss=lambda s, _: given(s.reverse_kl, "reverse_kl")),
    # TV(p, q) = 1 - acceptance probability (arXiv 2211.17192, corollary 3.6).
    "tv": Objective(unit="slot", wants=("tv",), loss=lambda s, _: given(s.tv, "tv")),
    # `lk_hybrid`, blended inside the vocabulary pass so that it needs one gradient row and not two.
    "lk": Objective(unit="slot", wants=("lk",), loss=lambda s, _: given(s.lk, "lk")),
    "lk_alpha": Objective(
        unit="slot", wants=("log_acceptance",), loss=lambda s, _: lk_alpha(given(s.log_acceptance, "log_acceptance"))
    ),
    "e2e_tv": Objective(unit="chain", wants=("tv",), loss=lambda s, valid: e2e_tv(given(s.tv, "tv"), valid)[0]),
    "confidence": Objective(
        unit="slot",
        wants=("acceptance", "confidence_logit"),
        loss=lambda s, _: confidence_bce(
            given(s.confidence_logit, "confidence_logit"), given(s.acceptance, "acceptance")
        ),
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Term:
    """One summand of the loss: an objective and the weights of its steps.

    Attributes:
        label: its name in the log.
        unit: "slot" or "chain": which count divides its sum.
        wants: the statistics that it needs.
        loss: see `Objective`.
        position: (stats, valid) -> weights that broadcast to (..., step); None: uniform. They multiply the loss and
            stay out of the denominator.
    """

    label: str
    unit: str
    wants: tuple[str, ...]
    loss: Callable[[TokenStats, Tensor], Tensor]
    position: Callable[[TokenStats, Tensor], Tensor] | None = None

    def __call__(self, stats: TokenStats, valid: Tensor) -> Tensor:
        """The sum over all valid slots (or chains), differentiable; 0 with zero gradients where none is valid.

        Args:
            stats: each (..., step); what stands at invalid entries is never read.
            valid: (..., step) bool.

        Raises:
            ValueError: a statistic is missing, or the objective's result has the wrong shape.
        """
        stats = stats.masked(valid)
        values = self.loss(stats, valid)
        counted = valid if self.unit == "slot" else valid[..., 0]
        if values.shape != counted.shape:
            raise ValueError(
                f"{self.label} gave a loss of shape {tuple(values.shape)}; a {self.unit} objective gives "
                f"{tuple(counted.shape)}"
            )
        if self.position is not None:
            values = values * self.position(stats, valid)
        return torch.where(counted, values, 0).sum()

    def mean_position_weight(self, stats: TokenStats, valid: Tensor) -> Ratio:
        """The mean weight of the valid slots: 1 for uniform weights, half a perfect block's length for D-PACE."""
        weights = torch.ones_like(valid, dtype=torch.float32)
        if self.position is not None:
            weights = weights * self.position(stats.masked(valid), valid)
        return Ratio(numerator=torch.where(valid, weights, 0).sum(), denominator=valid.sum())


# Not frozen: OmegaConf locks the elements of a list of a frozen class, and `loss.stages.0...=` could not override them.
@dataclass(slots=True, kw_only=True)
class TermConfig:
    """One summand of a stage's loss.

    Attributes:
        objective: a key of `draftsmith.train.objectives.OBJECTIVES`, or the dotted path of your own function
            `(stats, valid) -> Tensor`, which then also needs `want` and `unit`.
        weight: what its mean is multiplied with.
        position: weights of the steps of a chain: uniform, exponential (`decay`), geometric (`beta`), dpace (`rho`).
        decay: exponential: e-folding length in steps; 7 in DFlash, 4 in DSpark.
        beta: geometric: the factor from step to step.
        rho: dpace: the floor of each factor; None: 0.5.
        label: its name in the log; None: made from objective and position.
        want: for your own function: the statistics that it reads.
        unit: for your own function: slot (a value for each step) or chain (one for each anchor).
    """

    objective: str
    weight: float = 1.0
    position: str = "uniform"
    decay: float | None = None
    beta: float | None = None
    rho: float | None = None
    label: str | None = None
    want: list[str] | None = None
    unit: str | None = None

    @property
    def name(self) -> str:
        """The label."""
        objective = self.objective.rpartition(".")[2]
        return self.label or (objective if self.position == "uniform" else f"{objective}_{self.position}")

    def build(self) -> Term:
        """The term.

        Raises:
            ValueError: an unknown or unusable objective, or a setting that would be ignored.
        """
        objective = self._own() if "." in self.objective else self._named()
        position = self._position()
        if objective.unit == "chain" and position is not None:
            raise ValueError(
                f"loss term {self.name}: position={self.position} would be ignored, {self.objective} has one value for "
                "a chain, not one for each step; remove position"
            )
        return Term(label=self.name, unit=objective.unit, wants=objective.wants, loss=objective.loss, position=position)

    def _named(self) -> Objective:
        if self.objective not in OBJECTIVES:
            raise ValueError(
                f"loss term objective={self.objective}: choose one of {', '.join(OBJECTIVES)}, or the dotted path of a "
                "function (stats, valid) -> Tensor"
            )
        if self.want is not None or self.unit is not None:
            raise ValueError(
                f"loss term {self.name}: want and unit are for your own functions; {self.objective} has its own"
            )
        return OBJECTIVES[self.objective]

    def _own(self) -> Objective:
        function = import_function(self.objective)
        parameters = list(inspect.signature(function).parameters)
        if parameters != ["stats", "valid"]:
            raise ValueError(
                f"{self.objective}({', '.join(parameters)}): an objective takes exactly (stats, valid), a TokenStats "
                "and a bool tensor (..., step)"
            )
        known = (*STATISTICS, "confidence_logit")
        unknown = sorted(set(self.want or ()) - set(known))
        if self.want is None or unknown:
            raise ValueError(
                f"loss term {self.name}: want={self.want}; list the statistics that {self.objective} reads, out of "
                f"{', '.join(known)}"
            )
        if self.unit not in ("slot", "chain"):
            raise ValueError(
                f"loss term {self.name}: unit={self.unit}; say slot (one value for each step) or chain (one for each "
                "anchor)"
            )
        return Objective(unit=self.unit, wants=tuple(self.want), loss=function)

    def _position(self) -> Callable[[TokenStats, Tensor], Tensor] | None:
        settings = {"exponential": "decay", "geometric": "beta", "dpace": "rho"}
        values = {"decay": self.decay, "beta": self.beta, "rho": 0.5 if self.position == "dpace" else None}
        if self.rho is not None:
            values["rho"] = self.rho
        if self.position not in ("uniform", *settings):
            raise ValueError(
                f"loss term {self.name}: position={self.position}; choose one of uniform, {', '.join(settings)}"
            )
        own = settings.get(self.position)
        for setting, value in values.items():
            if setting != own and value is not None:
                raise ValueError(
                    f"loss term {self.name}: {setting}={value} would be ignored with position={self.position}"
                )
        if own is None:
            return None
        value = values[own]
        upper = 1.0 if own in ("beta", "rho") else math.inf
        if value is None or not 0 < value <= upper:
            raise ValueError(
                f"loss term {self.name}: position={self.position} needs {own} above 0"
                + ("" if own == "decay" else " and at most 1")
                + f", not {value}"
            )
        return _weigh(self.position, value)


def _weigh(position: str, value: float) -> Callable[[TokenStats, Tensor], Tensor]:
    if position == "exponential":
        return lambda _, valid: decay_weights(valid.shape[-1], value, device=valid.device)
    if position == "geometric":
        return lambda _, valid: geometric_weights(valid.shape[-1], value, device=valid.device)
    return lambda stats, valid: dpace_weights(given(stats.label_prob, "label_prob"), valid, value)


def import_function(path: str) -> Callable[..., Any]:
    """The function at a dotted path.

    Raises:
        ValueError: no such module or function.
    """
    module_name, _, name = path.rpartition(".")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise ValueError(f"loss term objective={path}: {error}; is its folder on PYTHONPATH?") from error
    function = vars(module).get(name)
    if not inspect.isfunction(function):
        raise ValueError(f"loss term objective={path}: {module_name} has no function {name}")
    return function
