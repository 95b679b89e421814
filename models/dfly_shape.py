"""From a block-diffusion drafter's configuration and its target's shape to sizes that are all known and legal."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from draftsmith.models.target import TargetSpec

if TYPE_CHECKING:
    from draftsmith.models.dfly import DFlyConfig

Value = TypeVar("Value")

CONTEXTS = ("shared", "fused", "hybrid")
HEADS = ("none", "correction", "markov")
INITS = ("auto", "random", "target_layers")


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A drafter's parts and sizes, all known.

    Attributes:
        context: shared, fused or hybrid.
        num_layers: draft layers.
        target_layer_ids: layers of the target that it reads.
        qk_norm: an RMSNorm on each head's queries and keys before the rotary embedding.
        qkv_bias: biases of the query, key and value projections.
    """

    context: str
    num_layers: int
    target_layer_ids: tuple[int, ...]
    hidden: int
    norm_eps: float
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    qk_norm: bool
    qkv_bias: bool


def check(config: DFlyConfig, spec: TargetSpec) -> None:
    """Refuses settings out of their range, or that would have no effect.

    Raises:
        ValueError: see above, with a legal choice.
    """
    for name, value, choices in (
        ("context", config.context, CONTEXTS),
        ("head", config.head, HEADS),
        ("init", config.init, INITS),
    ):
        if value not in choices:
            raise ValueError(f"drafter.{name}={value}: choose one of {', '.join(choices)}")
    for name, number, least in (
        ("block_size", config.block_size, 2),
        ("num_layers", config.num_layers, 1),
        ("num_target_layers", config.num_target_layers, 1),
        ("markov_rank", config.markov_rank, 1),
        ("sliding_window", config.sliding_window, 1),
        ("intermediate_size", config.intermediate_size, 1),
        ("num_heads", config.num_heads, 1),
        ("num_kv_heads", config.num_kv_heads, 1),
        ("head_dim", config.head_dim, 2 * len(spec.rope_inv_freq)),
        ("base_loss_weight", config.base_loss_weight, 0),
        ("own_token_rate", config.own_token_rate, 0),
    ):
        if number is not None and number < least:
            raise ValueError(f"drafter.{name}={number}: it must be at least {least}")
    if config.own_token_rate > 1:
        raise ValueError(f"drafter.own_token_rate={config.own_token_rate}: it is a probability, at most 1")
    for name, inert in (
        ("own_token_rate", config.own_token_rate > 0 and config.head == "none"),
        ("base_loss_weight", config.base_loss_weight > 0 and config.head == "none"),
        ("own_token_agreeing", config.own_token_agreeing and config.own_token_rate == 0),
    ):
        if inert:
            advice = "own_token_rate=0.5" if name == "own_token_agreeing" else "head=correction"
            raise ValueError(f"drafter.{name} has no effect here; leave it out or set drafter.{advice}")
    if spec.mask_token_id is None:
        raise ValueError(
            "the target has no embedding row to spare for the mask token; name one that its text never contains: "
            "target.mask_token_id=<row>"
        )


def shape_of(config: DFlyConfig, spec: TargetSpec) -> Shape:
    """Every size, with the defaults filled in from the target.

    Raises:
        ValueError: sizes that do not fit each other or the target, with a legal choice.
    """

    def given(value: Value | None, default: Value) -> Value:
        return default if value is None else value

    heads, kv_heads = given(config.num_heads, spec.num_heads), given(config.num_kv_heads, spec.num_kv_heads)
    if heads % kv_heads:
        raise ValueError(f"drafter.num_heads={heads} is no multiple of num_kv_heads={kv_heads}; set both")
    return Shape(
        context=config.context,
        num_layers=config.num_layers,
        target_layer_ids=tuple(choose_target_layers(config, spec.num_layers)),
        hidden=spec.hidden_size,
        norm_eps=spec.rms_norm_eps,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=given(config.head_dim, spec.head_dim),
        intermediate_size=given(config.intermediate_size, spec.intermediate_size),
        qk_norm=given(config.qk_norm, spec.qk_norm),
        qkv_bias=given(config.qkv_bias, spec.qkv_bias),
    )


def spread_layers(num_layers: int, count: int) -> list[int]:
    """Which `count` of a target's layers are captured: layer_k = round(1 + k (N - 4) / (T - 1)); N // 2 for one."""
    if count == 1:
        return [num_layers // 2]
    return [round(1 + k * (num_layers - 4) / (count - 1)) for k in range(count)]


def choose_target_layers(config: DFlyConfig, num_layers: int) -> list[int]:
    """The captured layers of a target with num_layers layers.

    Raises:
        ValueError: they are not distinct, ascending and inside the target.
    """
    ids, count = config.target_layer_ids, config.num_target_layers
    if ids is None:
        if num_layers < 4:
            raise ValueError(
                f"the target has {num_layers} layers; with fewer than 4 the captured ones must be given, such as "
                f"drafter.target_layer_ids={list(range(num_layers))}"
            )
        ids = spread_layers(num_layers, count or min(5, num_layers - 3))
    elif count not in (None, len(ids)):
        raise ValueError(f"drafter.num_target_layers={count}, but target_layer_ids has {len(ids)}; leave one out")
    if not ids or sorted(set(ids)) != ids or ids[0] < 0 or ids[-1] >= num_layers:
        legal = spread_layers(num_layers, min(len(ids) or 1, num_layers - 3)) if num_layers > 3 else [num_layers - 1]
        raise ValueError(
            f"captured layers {ids} must be distinct, ascending and inside 0..{num_layers - 1}; "
            f"a legal choice is drafter.target_layer_ids={legal}"
        )
    return ids
