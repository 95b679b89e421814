"""Tiny training runs: a configuration, documents of known supervision, and one update by DeepSpeed and by hand."""

from __future__ import annotations

import copy
import hashlib
import json
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from draftsmith.data.batch import Document
from draftsmith.data.cache import OnlineStates, StatesConfig
from draftsmith.data.conversations import DataConfig, Documents, Report, SourceConfig
from draftsmith.data.packing import Loader
from draftsmith.models.dfly import DFly, DFlyConfig
from draftsmith.models.drafter import Drafter
from draftsmith.models.moe import MoEConfig
from draftsmith.models.mtp import MTP, MTPConfig
from draftsmith.models.target import Target, TargetConfig
from draftsmith.train.checkpoint import full_weights
from draftsmith.train.config import DeepSpeedConfig, TrainConfig, TrainerConfig
from draftsmith.train.loop import start_engine
from draftsmith.train.objectives import e2e_tv
from draftsmith.train.optimizer import OptimizerConfig
from draftsmith.train.plan import BatchShape
from draftsmith.train.stages import LossConfig, Schedule, StageConfig
from draftsmith.train.step import DrafterWithObjective, StepResult, run_step
from draftsmith.train.terms import TermConfig
from draftsmith.train.world import World

ROW_TOKENS = 24
LR = 0.1


def write_conversations(path: Path, count: int = 10) -> Path:
    """JSON Lines of short conversations, each about as long as a row, so that a row holds one document."""
    records = [
        {
            "messages": [
                {"role": "user", "content": f"Tell me about fox number {i}."},
                {"role": "assistant", "content": f"Once upon a time fox {i} jumped over the lazy dog {i * i} times."},
            ]
        }
        for i in range(count)
    ]
    path.write_text("\n".join(map(json.dumps, records)) + "\n")
    return path


def tiny_config(target: Path, data: Path, output_dir: Path, **changes: Any) -> TrainConfig:
    """A run of a one-layer DFly drafter: 10 rows, 2 in a step, 2 epochs: 10 steps; the stages cross-fade in 3 and 4."""
    settings: dict[str, Any] = {
        "target": TargetConfig(path=str(target)),
        "drafter": DFlyConfig(block_size=4, num_layers=1, target_layer_ids=[0, 2], anchors_per_document=8),
        "data": DataConfig(sources=[SourceConfig(path=str(data))], max_length=64, row_tokens=64, held_out_fraction=0.0),
        "states": StatesConfig(mode="online"),
        "loss": LossConfig(
            stages=[
                StageConfig(name="lk", fraction=0.5, fade=0.4, terms=[TermConfig(objective="lk", position="dpace")]),
                StageConfig(name="e2e_tv", terms=[TermConfig(objective="e2e_tv")], rewarm_steps=2),
            ]
        ),
        "optimizer": OptimizerConfig(lr=1e-2, warmup=4),
        "trainer": TrainerConfig(epochs=2, rows_per_step=2, checkpoint_every_steps=1, keep_checkpoints=20),
        "output_dir": str(output_dir),
        "run_name": "tiny",
    }
    return TrainConfig(**{**settings, **changes})


def document(prompt: int, answer: int, *, length: int = ROW_TOKENS) -> Document:
    """A document of `prompt` unsupervised tokens, `answer` supervised ones, and unsupervised ones up to `length`."""
    generator = torch.Generator().manual_seed(100 * prompt + answer)
    tokens = torch.randint(20, 200, (length,), generator=generator)
    supervised = torch.zeros(length, dtype=torch.bool)
    supervised[prompt : prompt + answer] = True
    content = hashlib.blake2b(tokens.numpy().tobytes() + supervised.numpy().tobytes(), digest_size=16).hexdigest()
    return Document(tokens=tokens, supervised=supervised, domain="chat", id=f"{content[:16]}-{content}")


def documents_of(*documents: Document) -> Documents:
    return Documents(documents=list(documents), domains=("chat",), report=Report())


def random_drafter(target: Target, **settings: Any) -> DFly:
    """A DFly drafter with random weights."""
    config = DFlyConfig(
        **{"block_size": 4, "num_layers": 1, "target_layer_ids": [0, 2], "anchors_per_document": None, **settings}
    )
    return with_random_weights(config.build(target.spec))


AnyDrafter = TypeVar("AnyDrafter", bound=Drafter[Any])


def with_random_weights(drafter: AnyDrafter) -> AnyDrafter:
    """Every parameter drawn at random, none at its zero or one initialisation."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator) + (parameter.dim() == 1))
    return drafter


LOSS = LossConfig(
    stages=[
        StageConfig(name="both", terms=[TermConfig(objective="ce"), TermConfig(objective="e2e_tv", weight=0.5)]),
    ]
)


def mixture(target: Target) -> MTP:
    """An MTP drafter with a mixture of experts that reads sampled tokens, with random weights."""
    moe = MoEConfig(num_experts=6, experts_per_token=2, expert_intermediate_size=16, shared_intermediate_size=16)
    return with_random_weights(MTPConfig(tokens="sampled", moe=moe, checkpoint_depths=True).build(target.spec))


def load_by_hand(target: Target, drafter: MTP, documents: Documents) -> list[int]:
    """How many choices fell on each expert, with all rows at once."""
    drafter = copy.deepcopy(drafter)
    chosen: list[Tensor] = []
    drafter.block.mlp.router.register_forward_hook(lambda module, args, out: chosen.append(out[1].flatten()))
    loader = Loader(documents, row_tokens=ROW_TOKENS, seed=0, states=OnlineStates(target, ()))
    batch = loader.batch(list(range(loader.num_rows)))
    with torch.no_grad():
        drafter(batch, drafter.grid(batch, seed=0, epoch=0), target.head, ("ce",))
    return [int((torch.cat(chosen) == expert).sum()) for expert in range(6)]


def update_by_hand(
    target: Target,
    drafter: Drafter[Any],
    documents: Documents,
    *,
    steps: int = 1,
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] | None = None,
    clip: float = math.inf,
) -> tuple[dict[str, Tensor], float, float]:
    """The weights after steps on all rows at once, the first loss and gradient norm; plain PyTorch, SGD by default."""
    drafter = copy.deepcopy(drafter)
    loader = Loader(documents, row_tokens=ROW_TOKENS, seed=0, states=OnlineStates(target, drafter.target_layer_ids))
    batch = loader.batch(list(range(loader.num_rows)))
    grid = drafter.grid(batch, seed=0, epoch=0)
    chosen = torch.optim.SGD(drafter.parameters(), lr=LR) if optimizer is None else optimizer(drafter.parameters())
    losses, norms = [], []
    for _ in range(steps):
        stats = drafter(batch, grid, target.head, ("ce", "tv"))
        assert stats.ce is not None
        assert stats.tv is not None
        chain_loss, chain_valid = e2e_tv(stats.tv, grid.valid)
        loss = stats.ce[grid.valid].sum() / grid.valid.sum() + 0.5 * chain_loss[chain_valid].sum() / chain_valid.sum()
        loss.backward()
        losses.append(float(loss.detach()))
        norms.append(float(torch.nn.utils.clip_grad_norm_(drafter.parameters(), clip)))
        chosen.step()
        chosen.zero_grad()
    return drafter.state_dict(), losses[0], norms[0]


def update_by_trainer(
    world: World,
    target: Target,
    drafter: Drafter[Any],
    documents: Documents,
    *,
    zero_stage: int = 0,
    rows_per_micro_batch: int = 1,
    accumulation_steps: int = 1,
    sequence_parallel: int = 1,
    dtype: str = "float32",
    steps: int = 1,
    optimizer: OptimizerConfig | None = None,
) -> tuple[dict[str, Tensor], list[StepResult]]:
    """The weights after optimizer steps on the epoch's rows, and what the steps said."""
    drafter = copy.deepcopy(drafter)
    config = TrainConfig(
        loss=LOSS,
        optimizer=optimizer or OptimizerConfig(name="sgd", lr=LR, gradient_clipping=0.0),
        trainer=TrainerConfig(
            steps=steps,
            epochs=None,
            rows_per_step=None,
            rows_per_micro_batch=rows_per_micro_batch,
            accumulation_steps=accumulation_steps,
            sequence_parallel=sequence_parallel,
            dtype=dtype,
        ),
        deepspeed=DeepSpeedConfig(zero_stage=zero_stage),
    )
    batch = BatchShape.derive(config.trainer, world.size)
    module = DrafterWithObjective(drafter, Schedule.build(LOSS, steps), ("chat",), None, world.device)
    engine = start_engine(config, module, batch)
    loader = Loader(documents, row_tokens=ROW_TOKENS, seed=0, states=OnlineStates(target, drafter.target_layer_ids))
    rows: list[int | None] = [row if row < loader.num_rows else None for row in range(batch.rows_per_step)]
    micro_batches = [loader.batch(own) for own in batch.own_rows(rows, world.rank)]
    results = [
        run_step(engine, micro_batches, target.head, step=step, epoch=0, seed=0, lr=config.optimizer.lr, world=world)
        for step in range(steps)
    ]
    return full_weights(drafter), results


def largest_difference(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    """The largest difference of any weight."""
    assert ours.keys() == theirs.keys()
    return max(float((ours[name].double() - theirs[name].double()).abs().max()) for name in ours)
