"""The training run, top to bottom."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import deepspeed
from deepspeed import DeepSpeedEngine
from rich.console import Console

from draftsmith.data.packing import Loader
from draftsmith.models.export import new_record
from draftsmith.models.sequence_parallel import SequenceParallel
from draftsmith.train.checkpoint import CHECKPOINTS, TrainState, keep_checkpoints, load_checkpoint, save_checkpoint
from draftsmith.train.config import TrainConfig
from draftsmith.train.evaluation import CheckpointEvaluation
from draftsmith.train.metrics import MetricsLog
from draftsmith.train.optimizer import build_optimizer, learning_rate
from draftsmith.train.plan import BatchShape, prepare
from draftsmith.train.run_folder import choose_run_folder, refuse_changed_facts, write_records
from draftsmith.train.states import open_states
from draftsmith.train.step import DrafterWithObjective, run_step
from draftsmith.train.world import World


def train(config: TrainConfig, world: World) -> Path:
    """Trains a drafter as one rank of `world`; returns the run folder.

    Raises:
        ValueError: anything that the configuration, the data or the target make impossible; a loss or gradient that is
            not finite.
    """
    console = Console(quiet=world.rank != 0)
    folder = world.decided_by_rank_zero(lambda: choose_run_folder(config))
    for note in folder.notes:
        console.print(note, soft_wrap=True)

    prepared = prepare(config, world, console)
    plan, drafter, documents = prepared.plan, prepared.drafter, prepared.documents
    facts = plan.facts(prepared.target.fingerprint)
    world.decided_by_rank_zero(lambda: refuse_changed_facts(folder, facts))
    evaluation = CheckpointEvaluation(config, prepared.target, drafter.num_draft_tokens, world, console)
    states = open_states(config, prepared, world, console)
    world.decided_by_rank_zero(lambda: write_records(folder, config, facts))
    loader = Loader(documents, row_tokens=plan.row_tokens, seed=config.seed, states=states)
    target_head = prepared.target.head.with_options(config.loss.options())
    record = new_record(prepared.target, config.data, run=folder.path.name)
    del prepared  # with cached states only the target's head is needed from here on

    module = DrafterWithObjective(drafter, plan.schedule, documents.domains, config.loss.top_k, world.device)
    engine = start_engine(config, module, plan.batch)
    state = TrainState.start(world.device)
    if folder.checkpoint is not None:
        state = load_checkpoint(engine, folder.checkpoint, world)
        console.print(f"resumed {folder.checkpoint} at step {state.step} of {plan.total_steps}", soft_wrap=True)

    every = config.trainer.checkpoint_every_steps
    with MetricsLog(folder.path, config, plan.schedule, state, console, writes=world.rank == 0) as log:
        if folder.checkpoint is not None:
            log.evaluated(state.step, evaluation.measure(folder.checkpoint))
        while state.step < plan.total_steps:
            step, epoch = state.step, state.epoch
            rows = loader.rows(epoch, state.next_row, plan.batch.rows_per_step)
            micro_batches = [loader.batch(own) for own in plan.batch.own_rows(rows, world.rank)]
            lr = learning_rate(config.optimizer, step, plan.total_steps) * plan.schedule.lr_scale(step)
            result = run_step(
                engine, micro_batches, target_head, step=step, epoch=epoch, seed=config.seed, lr=lr, world=world
            )
            state.advance(plan.batch.rows_per_step, loader.num_rows, int(result.counts.tokens))
            log.step_done(step, epoch, lr, result, state)
            if state.step == plan.total_steps or (every is not None and state.step % every == 0):
                checkpoint = save_checkpoint(engine, drafter, state, folder.path / CHECKPOINTS, record, world)
                log.evaluated(state.step, evaluation.measure(checkpoint))
                if world.rank == 0:
                    keep_checkpoints(folder.path / CHECKPOINTS, config.trainer.keep_checkpoints)
    engine.destroy()  # its hooks would keep weights and moments alive, run after run of an ablation
    console.print(f"done: {plan.total_steps} steps; run folder {folder.path}", soft_wrap=True)
    return folder.path


def start_engine(config: TrainConfig, module: DrafterWithObjective, batch: BatchShape) -> DeepSpeedEngine:
    """DeepSpeed's engine around the module, with a plain torch optimizer; ranks that share rows find each other.

    Raises:
        ValueError: deepspeed.extra sets a key that the trainer derives.
    """
    settings: dict[str, Any] = {
        # DeepSpeed takes every rank's rows for its own.
        "train_batch_size": batch.rows_per_step * batch.sequence_parallel,
        "train_micro_batch_size_per_gpu": batch.rows_per_micro_batch,
        "gradient_accumulation_steps": batch.accumulation_steps,
        "gradient_clipping": config.optimizer.gradient_clipping,  # DeepSpeed clips at 1.0 where its settings are silent
        "bf16": {"enabled": config.trainer.dtype == "bfloat16"},
        "zero_optimization": {"stage": config.deepspeed.zero_stage},
        "zero_allow_untested_optimizer": True,  # SGD
        "steps_per_print": 10**9,
    }
    if config.trainer.dtype == "bfloat16":
        settings["data_types"] = {"grad_accum_dtype": "fp32"}
    for key, value in config.deepspeed.extra.items():
        if isinstance(value, dict) and key == "zero_optimization" and "stage" not in value:
            settings[key].update(value)
        elif key in settings or key in ("optimizer", "scheduler", "fp16", "sequence_parallel_size"):
            raise ValueError(
                f"deepspeed.extra.{key} is set by the trainer, from trainer, optimizer and deepspeed.zero_stage; "
                f"change it there and remove deepspeed.extra.{key}"
            )
        else:
            settings[key] = value
    optimizer = build_optimizer(config.optimizer, module)
    if batch.sequence_parallel > 1:
        module.drafter.sequence = SequenceParallel.join(batch.sequence_parallel)
    engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=settings)
    return engine
