"""What a training run is made of, and the schemas that type its configuration groups."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from draftsmith.configs.schema import register
from draftsmith.data.cache import StatesConfig
from draftsmith.data.conversations import DataConfig
from draftsmith.decode.evaluate import HELD_OUT
from draftsmith.models.dfly import DFlyConfig
from draftsmith.models.drafter import DrafterConfig
from draftsmith.models.mtp import MTPConfig
from draftsmith.models.target import TargetConfig
from draftsmith.train.optimizer import OptimizerConfig
from draftsmith.train.stages import LossConfig

DTYPES = ("float32", "bfloat16")
WANDB_MODES = ("disabled", "offline", "online")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerConfig:
    """How a run steps through its data.

    Of rows_per_step, rows_per_micro_batch and accumulation_steps give two; the third follows from the number of ranks,
    where ranks that share their rows count as one.

    Attributes:
        steps: optimizer steps of the whole run; or
        epochs: passes over the rows. Give exactly one of the two.
        rows_per_step: rows of one optimizer step, over all ranks and micro-batches.
        rows_per_micro_batch: rows that one rank runs at once.
        accumulation_steps: micro-batches of each rank in one optimizer step.
        sequence_parallel: how many neighbouring ranks share each row, for rows too long for one (drafter=mtp only). It
            divides the number of ranks and the drafter's query heads. Weights are those of 1, to rounding.
        dtype: what the drafter computes in, float32 or bfloat16; its master weights are float32 in either case.
        log_every_steps: how often a line goes to metrics.jsonl.
        checkpoint_every_steps: how often a checkpoint is written; None: only at the end.
        keep_checkpoints: how many of the latest checkpoints stay on disk.
    """

    steps: int | None = None
    epochs: int | None = 1
    rows_per_step: int | None = 8
    rows_per_micro_batch: int | None = 1
    accumulation_steps: int | None = None
    sequence_parallel: int = 1
    dtype: str = "float32"
    log_every_steps: int = 1
    checkpoint_every_steps: int | None = None
    keep_checkpoints: int = 2

    def __post_init__(self) -> None:
        if (self.steps is None) == (self.epochs is None):
            given = f"trainer.steps={self.steps}, trainer.epochs={self.epochs}"
            advice = "trainer.epochs=1" if self.steps is None else "trainer.epochs=null"
            raise ValueError(f"{given}: give exactly one of the two; add {advice}")
        counts = {
            "steps": self.steps,
            "epochs": self.epochs,
            "rows_per_step": self.rows_per_step,
            "rows_per_micro_batch": self.rows_per_micro_batch,
            "accumulation_steps": self.accumulation_steps,
            "sequence_parallel": self.sequence_parallel,
            "log_every_steps": self.log_every_steps,
            "checkpoint_every_steps": self.checkpoint_every_steps,
            "keep_checkpoints": self.keep_checkpoints,
        }
        for name, value in counts.items():
            if value is not None and value < 1:
                raise ValueError(f"trainer.{name}={value} must be at least 1")
        if self.dtype not in DTYPES:
            raise ValueError(
                f"trainer.dtype={self.dtype}: choose from {', '.join(DTYPES)} (float16 would need loss scaling, and a "
                "GPU; bfloat16 needs neither)"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationConfig:
    """Real decoding at every checkpoint; the best one by acceptance length is kept beside the latest.

    Attributes:
        num_prompts: at most how many; 0: checkpoints are not evaluated.
        prompts: held_out (conversations kept from training), or a JSONL file of prompts.
        max_new_tokens: of each output; decoding is greedy.
        batch_size: how many prompts are decoded together.
    """

    num_prompts: int = 0
    prompts: str = HELD_OUT
    max_new_tokens: int = 64
    batch_size: int = 16

    def __post_init__(self) -> None:
        for name, value, least in (
            ("num_prompts", self.num_prompts, 0),
            ("max_new_tokens", self.max_new_tokens, 2),  # one round
            ("batch_size", self.batch_size, 1),
        ):
            if value < least:
                raise ValueError(f"evaluation.{name}={value} must be at least {least}")


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepSpeedConfig:
    """What DeepSpeed shards between ranks.

    Attributes:
        zero_stage: 0 nothing, 1 optimizer states, 2 and gradients, 3 and weights.
        extra: further keys of DeepSpeed's own configuration file, merged over those that the trainer writes.
    """

    zero_stage: int = 1
    extra: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.zero_stage not in (0, 1, 2, 3):
            raise ValueError(f"deepspeed.zero_stage={self.zero_stage}: choose 0, 1, 2 or 3")


@dataclass(frozen=True, slots=True, kw_only=True)
class WandbConfig:
    """Weights & Biases, which gets what metrics.jsonl gets.

    Attributes:
        mode: disabled, offline (files in the run folder, for `wandb sync`), or online.
        project: where the run appears.
        entity: user or team; None: your default.
    """

    mode: str = "disabled"
    project: str = "draftsmith"
    entity: str | None = None

    def __post_init__(self) -> None:
        if self.mode not in WANDB_MODES:
            raise ValueError(f"wandb.mode={self.mode}: choose from {', '.join(WANDB_MODES)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """The root of train.yaml, cache.yaml and preview.yaml.

    Attributes:
        run_name: name of the run folder; None: the time and a random suffix.
        output_dir: where run folders lie, relative to where you stand.
        resume: None: a new run; auto: go on with the run of this name, or start it where there is none; a path: go on
            from that run folder or checkpoint.
        seed: decides initial weights, order of rows and drawn anchors.
    """

    target: TargetConfig = field(default_factory=TargetConfig)
    drafter: DrafterConfig = field(default_factory=DrafterConfig)
    data: DataConfig = field(default_factory=DataConfig)
    states: StatesConfig = field(default_factory=StatesConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    deepspeed: DeepSpeedConfig = field(default_factory=DeepSpeedConfig)
    wandb: WandbConfig = field(default_factory=WandbConfig)
    run_name: str | None = None
    output_dir: str = "outputs"
    resume: str | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.trainer.dtype == "bfloat16" and self.deepspeed.zero_stage == 0:
            raise ValueError(
                "trainer.dtype=bfloat16 with deepspeed=zero0: DeepSpeed would add up micro-batches in bfloat16 there; "
                "choose deepspeed=zero1, which adds them up in float32"
            )


register("train_schema", TrainConfig)
register("target_schema", TargetConfig, "target")
register("dfly_schema", DFlyConfig, "drafter")
register("mtp_schema", MTPConfig, "drafter")
register("data_schema", DataConfig, "data")
register("loss_schema", LossConfig, "loss")
register("deepspeed_schema", DeepSpeedConfig, "deepspeed")
