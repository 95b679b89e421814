"""One optimizer step, exact for any division of its rows into ranks and micro-batches.

The valid predictions of the whole step are counted first, over all ranks and micro-batches: the grids are known before
any forward. Every micro-batch then backpropagates its local sum over the global count.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from deepspeed import DeepSpeedEngine
from torch import Tensor, nn

from draftsmith.data.batch import Batch
from draftsmith.models.drafter import Drafter
from draftsmith.models.grid import Grid
from draftsmith.models.head import Head, TokenStats
from draftsmith.train.objectives import Ratio, by_domain, proxies
from draftsmith.train.stages import Schedule
from draftsmith.train.world import World

# The statistics that gradients flow through.
DIFFERENTIABLE = ("ce", "target_ce", "kl", "reverse_kl", "tv", "lk", "log_acceptance", "confidence_logit")


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """What the whole optimizer step holds, over all ranks and micro-batches."""

    slots: float
    chains: float
    tokens: float

    def of(self, unit: str) -> float:
        """The denominator of a term."""
        return self.slots if unit == "slot" else self.chains


class FiniteCheck:
    """Which of a step's named tensors held a value that is not finite, in the order in which a step computes them.

    Gradients are watched by hooks, before DeepSpeed reduces or shards them.
    """

    def __init__(self, drafter: nn.Module, terms: list[str], device: torch.device) -> None:
        parameters = [(name, p) for name, p in drafter.named_parameters() if p.requires_grad]
        self.names = [
            "the target's states of the captured layers",
            "the target's final states",
            *(f"the statistic {name}" for name in DIFFERENTIABLE),
            *(f"the loss term {label}" for label in terms),
            *(f"the gradient of {name}" for name, _ in reversed(parameters)),
        ]
        self._place = {name: index for index, name in enumerate(self.names)}
        self.found = torch.zeros(len(self.names), dtype=torch.float64, device=device)
        for name, parameter in parameters:
            parameter.register_hook(partial(self.look, f"the gradient of {name}"))

    def look(self, name: str, tensor: Tensor) -> None:
        """Notes whether a tensor has a value that is not finite; no synchronisation with the device."""
        self.found[self._place[name]] += (~torch.isfinite(tensor.detach())).any()

    def look_at_inputs(self, batch: Batch, stats: TokenStats) -> None:
        """Looks at the target's states and at the drafter's statistics."""
        if batch.states is not None:
            self.look(self.names[0], batch.states.layers)
            self.look(self.names[1], batch.states.final)
        values = (stats.ce, stats.target_ce, stats.kl, stats.reverse_kl, stats.tv, stats.lk, stats.log_acceptance)
        for name, value in zip(DIFFERENTIABLE, (*values, stats.confidence_logit), strict=True):
            if value is not None:
                self.look(f"the statistic {name}", value)

    def first(self, found: Tensor) -> str | None:
        """The first bad tensor of a step, given `found` summed over ranks."""
        bad = found.nonzero()
        return None if len(bad) == 0 else self.names[int(bad[0])]


class DrafterWithObjective(nn.Module):
    """What DeepSpeed wraps: all parameters are used inside this forward, as ZeRO-3 needs. The target is no part of it.

    Args:
        domains: the data's domains, reported apart where there are several.
        top_k: the teacher's support, which names the acceptance proxies.
    """

    def __init__(
        self,
        drafter: Drafter[Any],
        schedule: Schedule,
        domains: tuple[str, ...],
        top_k: int | None,
        device: torch.device,
    ) -> None:
        super().__init__()
        assert not list(drafter.parameters(recurse=False)), "see forward"
        self.drafter = drafter
        self.schedule = schedule
        self.domains = domains
        self.top_k = top_k
        self.finite = FiniteCheck(drafter, list(schedule.terms), device)

    def forward(
        self, batch: Batch, grid: Grid, target_head: Head, step: int, counts: Counts
    ) -> tuple[Tensor, dict[str, Ratio]]:
        """This micro-batch's part of the loss, and what it measured as sums with their counts."""
        # Not through __call__: ZeRO-3's hook on a module reads its output's __dict__, and TokenStats has slots. The
        # drafter owns no parameter itself; the hooks of its parts gather theirs.
        stats = self.drafter.forward(batch, grid, target_head, self.schedule.want(step)).masked(grid.valid)
        self.finite.look_at_inputs(batch, stats)
        measured: dict[str, Ratio] = {}
        loss = torch.zeros((), device=grid.valid.device)
        for label, weight in self.schedule.weights(step).items():
            term = self.schedule.terms[label]
            total = term(stats, grid.valid)
            self.finite.look(f"the loss term {label}", total)
            loss = loss + weight * total / counts.of(term.unit)
            count = grid.num_slots if term.unit == "slot" else grid.num_chains
            measured[f"terms/{label}"] = Ratio(numerator=total.detach(), denominator=count)
            if term.position is not None:
                measured[f"position_weights/{label}"] = term.mean_position_weight(stats, grid.valid)
        measured["loss"] = Ratio(numerator=loss.detach(), denominator=torch.zeros((), device=loss.device))
        if stats.acceptance is not None:
            measured.update(proxies(stats, grid.valid, top_k=self.top_k))
            if batch.domain_ids is not None:
                domain_ids = batch.domain_ids.gather(1, grid.anchor_index)
                measured.update(by_domain(stats, grid.valid, domain_ids, self.domains, top_k=self.top_k))
        return loss, measured


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What an optimizer step did.

    Attributes:
        loss: of the whole step, over all ranks; None: there was nothing to predict and no update.
        grad_norm: of the whole gradient before clipping.
        measured: means over the whole step.
        drafter: the drafter's own measures, see `Drafter.measures`.
    """

    loss: float | None
    grad_norm: float | None
    counts: Counts
    measured: dict[str, Ratio]
    drafter: dict[str, float]


def run_step(
    engine: DeepSpeedEngine,
    micro_batches: list[Batch],
    target_head: Head,
    *,
    step: int,
    epoch: int,
    seed: int,
    lr: float,
    world: World,
) -> StepResult:
    """One optimizer step; every rank must call it with equally many micro-batches.

    Args:
        micro_batches: this rank's, on the CPU.

    Raises:
        ValueError: something was not finite; no weight has been changed.
    """
    module: DrafterWithObjective = engine.module
    static = world.device.type == "cuda"  # compiled attention wants one shape
    grids = [module.drafter.grid(batch, seed=seed, epoch=epoch, static=static) for batch in micro_batches]
    sequence = module.drafter.sequence
    counts = count_predictions(micro_batches, grids, world, row_copies=1 if sequence is None else sequence.degree)
    if counts.slots == 0:
        return StepResult(loss=None, grad_norm=None, counts=counts, measured={}, drafter={})

    module.finite.found.zero_()
    measured: list[dict[str, Ratio]] = []
    for index, (batch, grid) in enumerate(zip(micro_batches, grids, strict=True)):
        loss, sums = engine(batch.to(world.device), grid.to(world.device), target_head, step, counts)
        # DeepSpeed averages over ranks; the loss is already divided by the count of all of them.
        engine.backward(world.size * loss, scale_wrt_gas=False)
        measured.append(sums)
        if index < len(micro_batches) - 1:
            engine.step()  # only counts the micro-batch

    totals, bad = sum_over_ranks(measured, module.finite, world)
    if bad is not None:
        raise ValueError(
            f"step {step}: {bad} is not finite; this step changed no weight. Look at the data of this step, or start "
            "again with a lower optimizer.lr or optimizer.gradient_clipping"
        )
    for group in engine.optimizer.param_groups:
        group["lr"] = lr
    grad_norm = gradient_norm(engine)
    engine.step()
    grad_norm = grad_norm if grad_norm is not None else float(engine.get_global_grad_norm())
    return StepResult(
        loss=float(totals.pop("loss").numerator),
        grad_norm=grad_norm,
        counts=counts,
        measured=totals,
        drafter=module.drafter.measures(world.sum),
    )


def count_predictions(batches: list[Batch], grids: list[Grid], world: World, *, row_copies: int) -> Counts:
    """Counts the whole optimizer step, over this rank's micro-batches and all ranks.

    Args:
        row_copies: how many ranks have each row; a prediction is in the grid of one of them.
    """
    own = torch.stack(
        (
            torch.stack([grid.num_slots for grid in grids]).sum(),
            torch.stack([grid.num_chains for grid in grids]).sum(),
            torch.stack([(batch.document_ids >= 0).sum() for batch in batches]).sum().cpu(),
        )
    )
    slots, chains, tokens = world.sum(own.double()).tolist()
    return Counts(slots=slots, chains=chains, tokens=tokens / row_copies)


def sum_over_ranks(
    measured: list[dict[str, Ratio]], finite: FiniteCheck, world: World
) -> tuple[dict[str, Ratio], str | None]:
    """Adds up what all micro-batches of all ranks measured, and names the first tensor that was not finite."""
    names = sorted({name for sums in measured for name in sums})
    parts = [part for name in names for part in _sum([sums[name] for sums in measured])]
    flat = world.sum(torch.cat((torch.stack(parts).to(world.device), finite.found))).cpu()
    totals = {
        name: Ratio(numerator=flat[2 * index], denominator=flat[2 * index + 1]) for index, name in enumerate(names)
    }
    return totals, finite.first(flat[2 * len(names) :])


def _sum(ratios: list[Ratio]) -> tuple[Tensor, Tensor]:
    return (
        torch.stack([ratio.numerator.double() for ratio in ratios]).sum(),
        torch.stack([ratio.denominator.double() for ratio in ratios]).sum(),
    )


def gradient_norm(engine: DeepSpeedEngine) -> float | None:
    """The norm of the whole gradient without ZeRO, where the module holds it; None under ZeRO, which knows it later."""
    if engine.zero_optimization_stage() > 0:
        return None
    gradients = [p.grad for p in engine.module.parameters() if p.grad is not None]
    return float(torch.nn.utils.get_total_norm(gradients))
