"""The process group: who we are among the ranks, and the few collectives that training uses."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor
from torch import distributed as dist
from torch._C._distributed_c10d import HashStore

Value = TypeVar("Value")

LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
STEP_TIMEOUT = timedelta(minutes=30)
# Loading and caching may keep one rank busy for hours while the others wait.
PREPARATION_TIMEOUT = timedelta(days=2)


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """This rank's place among all ranks.

    Attributes:
        rank: 0 .. size - 1.
        local_rank: the rank within its machine.
        size: the number of ranks.
        device: where this rank computes.
        patient: a gloo group over all ranks whose timeout is days, for preparation.
    """

    rank: int
    local_rank: int
    size: int
    device: torch.device
    patient: Any

    @classmethod
    def join(cls) -> World:
        """Joins the launcher's process group, or starts a group of one where there is no launcher.

        Raises:
            ValueError: only some of the launcher's variables are set.
        """
        present = [name for name in LAUNCHER_VARIABLES if name in os.environ]
        if present and len(present) < len(LAUNCHER_VARIABLES):
            missing = ", ".join(name for name in LAUNCHER_VARIABLES if name not in os.environ)
            raise ValueError(f"{', '.join(present)} set but not {missing}: start with deepspeed, torchrun, or neither")
        logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
        on_cuda = get_accelerator().device_name() == "cuda"
        local_rank = int(os.environ.setdefault("LOCAL_RANK", "0"))  # DeepSpeed's engine insists on the variable
        device = torch.device("cuda", local_rank) if on_cuda else torch.device("cpu")
        if on_cuda:
            torch.cuda.set_device(device)
        else:
            # DeepSpeed would try a compiler on all of its ops, and compile collectives of its own; gloo's own do.
            deepspeed.ops.__compatible_ops__ = {}
        if not dist.is_initialized():
            backend = "nccl" if on_cuda else "gloo"
            if present:
                dist.init_process_group(backend, timeout=STEP_TIMEOUT)
            else:  # a store in memory: no port to find, none to clash over
                dist.init_process_group(backend, timeout=STEP_TIMEOUT, store=HashStore(), rank=0, world_size=1)
        deepspeed.init_distributed(dist_backend=dist.get_backend(), auto_mpi_discovery=False)
        return cls(
            rank=dist.get_rank(),
            local_rank=local_rank,
            size=dist.get_world_size(),
            device=device,
            patient=dist.new_group(backend="gloo", timeout=PREPARATION_TIMEOUT),
        )

    def leave(self) -> None:
        """Ends the process group."""
        dist.destroy_process_group()

    def sum(self, values: Tensor) -> Tensor:
        """The sum of a tensor over all ranks, on every rank."""
        total = values.to(self.device, copy=True)
        dist.all_reduce(total)
        return total

    def wait(self) -> None:
        """Waits, for days if need be, until every rank is here."""
        dist.barrier(group=self.patient)

    def decided_by_rank_zero(self, decide: Callable[[], Value]) -> Value:
        """What `decide` returns on rank 0, on every rank; where it raises ValueError, every rank does."""
        answer: list[Any] = [None, None]
        if self.rank == 0:
            try:
                answer[0] = decide()
            except ValueError as error:
                answer[1] = str(error)
        dist.broadcast_object_list(answer, src=0, group=self.patient)
        if answer[1] is not None:
            raise ValueError(answer[1])
        return answer[0]

    def first_on_each_machine(self, load: Callable[[], Value]) -> Value:
        """Runs `load` on local rank 0 of each machine, then on the others, which find its downloads done.

        Where it raises ValueError on one, every rank does, so that none is left waiting.
        """
        value, error = None, None
        if self.local_rank == 0:
            try:
                value = load()
            except ValueError as refusal:
                error = str(refusal)
        errors: list[str | None] = [None] * self.size
        dist.all_gather_object(errors, error, group=self.patient)
        for refusal_anywhere in errors:
            if refusal_anywhere is not None:
                raise ValueError(refusal_anywhere)
        return load() if value is None else value
