"""The target's rotary frequencies, through transformers' own initialisers."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

# "dynamic" and "longrope" change with the sequence's length. Frequencies that are split over the axes of an image
# (mrope_section) are the plain ones for text, whose position is the same on all axes.
SUPPORTED = ("default", "linear", "yarn", "llama3", "proportional")


def rope_frequencies(text_config: Any) -> tuple[dict[str, Any], tuple[float, ...], float]:
    """RoPE of the target's full-attention layers.

    Args:
        text_config: a transformers configuration, with RoPE in the spelling of transformers 5 (`rope_parameters`, flat
            or by layer type) or the older one (`rope_theta`, `rope_scaling`).

    Returns:
        The parameters in the new spelling; the inverse frequencies, (rotary_dim / 2,); the factor on cos and sin.

    Raises:
        ValueError: no RoPE, or a kind that drafters do not support.
    """
    config = copy.deepcopy(text_config)  # standardising writes to it
    config.standardize_rope_params()
    parameters = getattr(config, "rope_parameters", None)
    layer_type = None
    if parameters and config.nested_rope_parameter_keys(parameters):
        layer_type = "full_attention"
        parameters = parameters.get(layer_type)
    if not parameters or parameters.get("rope_theta") is None:
        raise ValueError(f"{config.model_type}: its full-attention layers have no RoPE, which every drafter here needs")
    kind = parameters["rope_type"]
    if kind not in SUPPORTED:
        raise ValueError(f"{config.model_type}: rope_type={kind} is not supported; supported: {', '.join(SUPPORTED)}")
    if kind == "default":
        inv_freq, scaling = _default_frequencies(config, parameters), 1.0
    else:
        inv_freq, scaling = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"), layer_type=layer_type)
    return dict(parameters), tuple(inv_freq.tolist()), float(scaling)


def _default_frequencies(config: Any, parameters: dict[str, Any]) -> Tensor:
    """theta^(-2i / rotary_dim): transformers keeps this formula in each model's file instead of its table."""
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rotary_dim = int(head_dim * parameters.get("partial_rotary_factor", 1.0))
    return 1.0 / (parameters["rope_theta"] ** (torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim))
