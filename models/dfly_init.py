"""Starting a block-diffusion drafter from the target's own layers.

Draft layer i takes the weights of the target's layer l + 1, where l is a captured layer: what that layer reads at a
context position is then exactly what it reads in the target. The target's input norm is folded into the projections,
so the drafter's own norms before them start at 1; the context is set to h_l alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from draftsmith.models.layers import RMSNorm, RotaryEmbedding, apply_rotary
from draftsmith.models.target import Target

if TYPE_CHECKING:
    from draftsmith.models.dfly import DFly

# Fusion logits at the start: +FUSION_PEAK on the layer's own l, -FUSION_PEAK elsewhere. A left-over mass of about 2e-5
# gives the context to about 2e-3 and keeps the row's gradient alive.
FUSION_PEAK = 6.0

LAYER_PARTS = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}


def initialise(drafter: DFly, target: Target) -> str:
    """Sets a drafter's starting weights as its configuration says.

    Returns:
        One sentence that says what was done.

    Raises:
        ValueError: another target than the drafter was built for; or init=target_layers where the target's layers
            cannot be copied, naming the reason.
    """
    if (target.spec.hidden_size, target.spec.num_layers) != (drafter.spec.hidden_size, drafter.spec.num_layers):
        raise ValueError(
            f"the drafter was built for a target with hidden {drafter.spec.hidden_size} and {drafter.spec.num_layers} "
            f"layers, this one has {target.spec.hidden_size} and {target.spec.num_layers}: build it from target.spec"
        )
    if drafter.config.init == "random":
        return "draft layers start from random weights"
    reason = why_not(drafter, target)
    if reason is None:
        sources = copy_target_layers(drafter, target)
        return f"draft layers start from the target's layers {', '.join(map(str, sources))}"
    if drafter.config.init == "target_layers":
        raise ValueError(f"drafter.init=target_layers is not possible: {reason}; choose drafter.init=random")
    return f"draft layers start from random weights, not from the target's layers: {reason}"


def source_layers(drafter: DFly) -> list[int]:
    """The captured layers l whose next layers are copied, one for each draft layer, the last ones that have a next."""
    usable = [i for i in drafter.target_layer_ids if i + 1 < drafter.spec.num_layers]
    return usable[-drafter.config.num_layers :]


def why_not(drafter: DFly, target: Target) -> str | None:
    """Why the target's layers cannot be copied into this drafter; None where they can."""
    shape, spec = drafter.shape, drafter.spec
    sources = source_layers(drafter)
    if len(sources) < drafter.config.num_layers:
        return (
            f"drafter.num_layers={drafter.config.num_layers}, but only {len(sources)} of the captured layers "
            f"{list(drafter.target_layer_ids)} have a layer after them"
        )
    for name, own, theirs in (
        ("num_heads", shape.num_heads, spec.num_heads),
        ("num_kv_heads", shape.num_kv_heads, spec.num_kv_heads),
        ("head_dim", shape.head_dim, spec.head_dim),
        ("intermediate_size", shape.intermediate_size, spec.intermediate_size),
        ("qk_norm", shape.qk_norm, spec.qk_norm),
        ("qkv_bias", shape.qkv_bias, spec.qkv_bias),
    ):
        if own != theirs:
            return f"drafter.{name}={own} differs from the target's {theirs}"
    for index in sources:
        reason = _why_not_layer(drafter, target, index + 1)
        if reason is not None:
            return f"the target's layer {index + 1} {reason}"
    if norm_scale(target.final_norm, spec.hidden_size, spec.rms_norm_eps) is None:
        return f"the target's final norm is {type(target.final_norm).__name__}, no RMSNorm"
    return None


def _why_not_layer(drafter: DFly, target: Target, index: int) -> str | None:
    """Why one target layer is not a plain pre-norm decoder layer with full rotary attention and a SwiGLU MLP."""
    spec, layer = target.spec, target.decoder_layer(index)
    # The layer and its configuration are transformers': attributes that a model family lacks are absent.
    config = target.model.config.get_text_config(decoder=True)
    parts = {name for name, _ in layer.named_children()}
    if parts != LAYER_PARTS:
        return f"is no plain pre-norm layer: its parts are {', '.join(sorted(parts))}"
    attention: Any = layer.self_attn
    mlp: Any = layer.mlp
    activation = getattr(config, "hidden_act", None)
    no_rope, layer_types = getattr(config, "no_rope_layers", None), getattr(config, "layer_types", None)
    scaling = getattr(attention, "scaling", spec.head_dim**-0.5)
    for found, complaint in (
        (layer_types and layer_types[index] != "full_attention", f"has {layer_types and layer_types[index]}"),
        (getattr(attention, "sliding_window", None), "has sliding-window attention"),
        (no_rope and not no_rope[index], "has no rotary embedding"),
        (getattr(config, "attn_logit_softcapping", None), "caps its attention scores"),
        (abs(scaling - spec.head_dim**-0.5) > 1e-6, f"scales scores by {scaling}, not by 1 / sqrt(head_dim)"),
        (getattr(config, "residual_multiplier", 1.0) != 1.0, "scales its residual branches"),
        (activation != "silu", f"has the activation {activation} in its MLP, not silu"),
    ):
        if found:
            return complaint
    own: Any = drafter.backbone.layers[0]
    for name, theirs, ours in (("attention", attention, own.self_attn), ("MLP", mlp, own.mlp)):
        mine = {key: value.shape for key, value in ours.named_parameters() if not key.startswith("context_")}
        differing = mine.items() ^ {(key, value.shape) for key, value in theirs.named_parameters()}
        if differing:
            return f"has another {name} than the drafter's: {', '.join(sorted({key for key, _ in differing}))}"
    norms = [(layer.get_submodule(n), spec.hidden_size) for n in ("input_layernorm", "post_attention_layernorm")]
    norms += [(attention.get_submodule(n), spec.head_dim) for n in ("q_norm", "k_norm") if spec.qk_norm]
    for norm, width in norms:
        if norm_scale(norm, width, spec.rms_norm_eps) is None:
            return f"has {type(norm).__name__}, no RMSNorm"
    return None if _keys_equal(drafter, target, index) else "rotates or projects its keys in another way"


@torch.no_grad()
def _keys_equal(drafter: DFly, target: Target, index: int) -> bool:
    """Whether our rotary embedding on a layer's own projections gives the keys that the layer itself caches.

    Families that rotate interleaved pairs have the same parts and names as those that rotate halves.
    """
    layer: Any = target.decoder_layer(index)
    ids = torch.arange(8, device=target.device)[None] % target.spec.vocab_size
    kv_cache = target.new_kv_cache(1)
    read = target.extend(ids, kv_cache, (index - 1,)).layers[:, :, 0]
    theirs = kv_cache.layers.layers[index].keys.transpose(1, 2)
    keys = layer.self_attn.k_proj(layer.input_layernorm(read)).unflatten(-1, (-1, target.spec.head_dim))
    if target.spec.qk_norm:
        keys = layer.self_attn.k_norm(keys)
    rotary = RotaryEmbedding(target.spec).to(target.device)
    ours = apply_rotary(keys, *rotary(torch.arange(8, device=target.device)))
    tolerance = 1e-4 if keys.dtype == torch.float32 else 2e-2
    return torch.allclose(ours.float(), theirs.float(), rtol=tolerance, atol=tolerance * float(theirs.abs().max()))


@torch.no_grad()
def norm_scale(norm: nn.Module, width: int, eps: float) -> Tensor | None:
    """What an RMSNorm multiplies by, measured: the weight, or 1 + weight where the family stores it so.

    Returns:
        (width,) float32; None where the module is no RMSNorm of this eps.
    """
    weight = next(norm.parameters())
    if weight.shape != (width,):
        return None
    # Two probes that a centring or biased norm cannot pass together.
    ones = torch.ones(width, dtype=weight.dtype, device=weight.device)
    ramp = torch.linspace(0.5, 2, width, dtype=weight.dtype, device=weight.device)
    scale = norm(ones).float() * (1 + eps) ** 0.5
    expected = ramp.float() * torch.rsqrt(ramp.float().square().mean() + eps) * scale
    tolerance = 1e-5 if weight.dtype == torch.float32 else 2e-2
    matches = torch.allclose(norm(ramp).float(), expected, rtol=tolerance, atol=tolerance * float(scale.abs().max()))
    return scale if matches and float(scale.abs().max()) > 0 else None


@torch.no_grad()
def copy_target_layers(drafter: DFly, target: Target, fusion_peak: float = FUSION_PEAK) -> list[int]:
    """Copies the target's layers; `why_not` must have found no reason against it.

    Returns:
        The target layers that were copied.
    """
    sources = source_layers(drafter)
    for draft_layer, index in zip(drafter.backbone.layers, sources, strict=True):
        _copy_layer(draft_layer, target.decoder_layer(index + 1))
    places = [drafter.target_layer_ids.index(index) for index in sources]
    context = drafter.backbone.context
    if context.projection is not None:
        context.projection.weight.zero_()
    if context.fusion is not None:
        context.fusion.fill_(-fusion_peak)
        context.fusion[torch.arange(len(places)), places] = fusion_peak
    elif context.projection is not None:
        hidden = drafter.spec.hidden_size
        context.projection.weight[:, places[-1] * hidden : (places[-1] + 1) * hidden] = torch.eye(hidden)
    drafter.backbone.norm.weight.copy_(_scale(target.final_norm, drafter.backbone.norm))
    return [index + 1 for index in sources]


def _copy_layer(draft_layer: Any, layer: Any) -> None:
    draft_layer.input_layernorm.weight.fill_(1)
    draft_layer.post_attention_layernorm.weight.copy_(
        _scale(layer.post_attention_layernorm, draft_layer.post_attention_layernorm)
    )
    draft_layer.mlp.load_state_dict(layer.mlp.state_dict())
    own, theirs = draft_layer.self_attn, layer.self_attn
    own.load_state_dict({**own.state_dict(), **theirs.state_dict()})
    input_scale = _scale(layer.input_layernorm, draft_layer.input_layernorm)
    for projection in (own.q_proj, own.k_proj, own.v_proj):
        projection.weight.mul_(input_scale)
    if own.q_norm is not None:
        own.q_norm.weight.copy_(_scale(theirs.q_norm, own.q_norm))
        own.k_norm.weight.copy_(_scale(theirs.k_norm, own.k_norm))
    if own.context_k_proj is not None:
        own.context_k_proj.load_state_dict(own.k_proj.state_dict())
        own.context_v_proj.load_state_dict(own.v_proj.state_dict())


def _scale(norm: nn.Module, own: RMSNorm) -> Tensor:
    scale = norm_scale(norm, own.weight.numel(), own.eps)
    assert scale is not None
    return scale
