"""Starting weights of the MTP block: the target's last decoder layer, or the MTP layer of the target's checkpoint."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from huggingface_hub import snapshot_download
from safetensors import safe_open
from torch import Tensor

from draftsmith.data.batch import Document
from draftsmith.models.mtp_block import Columns, MTPBlock

if TYPE_CHECKING:
    from draftsmith.models.target import Target

NUM_PROBE_TOKENS = 12

# The fusion is fitted on at most so many tokens for each of its inputs, with a ridge of this fraction of each input's
# own square: on SmolLM2, fewer tokens start worse and more hardly better.
FITTED_TOKENS_PER_INPUT = 8
RIDGE = 0.03

# Names of a decoder layer's tensors, in memory and in checkpoints of the families below, as the block names them.
LAYER_NAMES = (
    (r"(input_layernorm|post_attention_layernorm)\.weight", r"\1.weight"),
    (r"self_attn\.([qkvo]_proj)\.(weight|bias)", r"\1.\2"),
    (r"self_attn\.([qk]_norm)\.weight", r"\1.weight"),
    (r"mlp\.(gate|up|down)_proj\.weight", r"mlp.\1_proj.weight"),
    (r"mlp\.(router\.)?gate\.weight", r"mlp.router.weight"),
    (r"mlp\.((gate\.)?e_score_correction_bias|expert_bias)", r"mlp.router.expert_bias"),
    (r"mlp\.experts\.(gate_up_proj|down_proj)", r"mlp.experts.\1"),
    (
        r"mlp\.(shared_experts|shared_expert|shared_mlp)\.(gate|up|down)_proj\.weight",
        r"mlp.shared_expert.\2_proj.weight",
    ),
    (r"mlp\.shared_expert_gate\.weight", r"mlp.shared_expert_gate.weight"),
)
FUSION = ("enorm.weight", "hnorm.weight", "eh_proj.weight")


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Where a family's checkpoint keeps its MTP layer, and which block it is.

    Attributes:
        prefix: of all its tensors; {layer} is the number of decoder layers.
        layer_prefix: of the decoder layer's tensors, after prefix.
        names: the other tensors, as the block names them.
        settings: the drafter's options that the family fixes.
        shared: tensors that repeat the target's embedding or lm_head.
    """

    prefix: str
    names: Mapping[str, str]
    settings: Mapping[str, Any]
    layer_prefix: str = ""
    shared: Mapping[str, str] = field(default_factory=dict)


_EH = {"enorm.weight": "enorm.weight", "hnorm.weight": "hnorm.weight", "eh_proj.weight": "eh_proj.weight"}
_SHARED = {"embed_tokens.weight": "embedding", "shared_head.head.weight": "lm_head"}
_PLAIN = {
    "qk_norm": False,
    "qkv_bias": False,
    "attention_output_gate": False,
    "norm_plus_one": False,
    "zero_first_embedding": True,
    "fuse_order": "embedding_hidden",
    "feedback": "post_norm",
}

HY3 = Layout(
    prefix="model.layers.{layer}.",
    names={**_EH, "final_layernorm.weight": "final_layernorm.weight"},
    settings={**_PLAIN, "qk_norm": True},
    shared=_SHARED,
)
QWEN = Layout(
    prefix="mtp.",
    layer_prefix="layers.0.",
    names={
        "pre_fc_norm_embedding.weight": "enorm.weight",
        "pre_fc_norm_hidden.weight": "hnorm.weight",
        "fc.weight": "eh_proj.weight",
        "norm.weight": "final_layernorm.weight",
    },
    settings={
        **_PLAIN,
        "qk_norm": True,
        "attention_output_gate": True,
        "norm_plus_one": True,
        "zero_first_embedding": False,
    },
)
MIMO = Layout(
    prefix="model.mtp_layers.0.",
    names={
        "token_layernorm.weight": "enorm.weight",
        "hidden_layernorm.weight": "hnorm.weight",
        "input_proj.weight": "eh_proj.weight",
        "final_layernorm.weight": "final_layernorm.weight",
    },
    settings={**_PLAIN, "qkv_bias": True, "fuse_order": "hidden_embedding"},
)
GLM = Layout(
    prefix="model.layers.{layer}.",
    names={**_EH, "shared_head.norm.weight": "final_layernorm.weight"},
    settings={**_PLAIN, "feedback": "pre_norm"},
    shared=_SHARED,
)
LAYOUTS = {
    "hy_v3": HY3,
    "qwen3_next": QWEN,
    "qwen3_5_text": QWEN,
    "qwen3_5_moe_text": QWEN,
    "mimo": MIMO,
    "glm4_moe": GLM,
}


@torch.no_grad()
def from_last_layer(block: MTPBlock, target: Target, documents: Sequence[Document]) -> str:
    """Copies the target's last decoder layer and final norm, and fits the fusion to what that layer reads.

    Raises:
        ValueError: the block, with those weights, is not that layer: a tensor that one of the two lacks, or another
            output; or no document to fit the fusion on.
    """
    index = target.spec.num_layers - 1
    tensors = layer_tensors(target.decoder_layer(index).state_dict())
    tensors["final_layernorm.weight"] = target.final_norm.state_dict()["weight"]
    what = f"drafter.init=last_layer: the target's layer {index}"
    copy_tensors(block, tensors, what, skip=FUSION)
    check_layer(block, target, what)
    for norm in (block.enorm, block.hnorm):
        norm.weight.fill_(0.0 if norm.plus_one else 1.0)
    count = fit_fusion(block, target, documents)
    return f"MTP block: the target's layer {index} and final norm; fusion fitted on {count:,} tokens of the data"


@torch.no_grad()
def fit_fusion(block: MTPBlock, target: Target, documents: Sequence[Document]) -> int:
    """Sets eh_proj to the linear map that best foretells what the target's last layer reads, one position ahead.

    From the token at j + 1 and the target's final state at j to the input of its last layer at j + 1. Where the map is
    exact, a block that is that layer gives the target's own final state at j + 1 from the target's own keys and values,
    and hands it to the next depth, which reads such states. Ridge regression on the documents, evenly spread over
    their list; errors count relative to the size of what is foretold, since a norm comes first in the layer.

    Returns:
        The number of positions fitted.

    Raises:
        ValueError: no document has two tokens.
    """
    num_inputs = block.eh_proj.in_features
    num_tokens = sum(len(document) for document in documents)
    every = max(1, math.ceil(num_tokens / (FITTED_TOKENS_PER_INPUT * num_inputs)))
    options = {"dtype": torch.float64, "device": target.device}
    gram = torch.zeros(num_inputs, num_inputs, **options)
    moment = torch.zeros(num_inputs, block.eh_proj.out_features, **options)
    count = 0
    for document in documents[::every]:
        ids = document.tokens.to(target.device)
        entering, final = last_layer_states(target, ids)
        embedding = target.head.embed(ids[1:])
        if block.config.zero_first_embedding:
            embedding[:1] = 0
        own = block.eh_proj.weight
        inputs = block.fusion_inputs(embedding.to(own), final[:-1].to(own)).to(gram)
        expected = entering[1:].to(gram)
        weight = expected.square().mean(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny).reciprocal()
        gram += inputs.T @ (weight * inputs)
        moment += inputs.T @ (weight * expected)
        count += len(inputs)
    if count == 0:
        raise ValueError("drafter.init=last_layer: there is no document of two tokens to fit the fusion on")
    squares = gram.diagonal()
    ridge = RIDGE * squares.clamp(min=1e-6 * float(squares.mean()))  # an input may be zero everywhere
    block.eh_proj.weight.copy_(torch.linalg.solve(gram + ridge.diag(), moment).T)
    return count


def last_layer_states(target: Target, ids: Tensor) -> tuple[Tensor, Tensor]:
    """What the target's last layer reads, and the target's final states; ids: (seq,), both (seq, hidden)."""
    last = target.spec.num_layers - 1
    states = target.states(ids[None], (last - 1,) if last > 0 else ())
    return (states.layers[0, :, 0] if last > 0 else target.head.embed(ids)), states.final[0]


@torch.no_grad()
def from_target_mtp(block: MTPBlock, target: Target) -> str:
    """Copies the MTP layer that the target's checkpoint brings (transformers leaves it out when it loads the target).

    Raises:
        ValueError: a family whose layout is not known, a checkpoint without such a layer, settings that make another
            block, or any tensor that is missing, unknown or of another shape.
    """
    config = target.model.config.get_text_config(decoder=True)
    layout = LAYOUTS.get(config.model_type)
    if layout is None:
        raise ValueError(
            f"drafter.init=target_mtp: the MTP layer of {config.model_type} is not supported; supported: "
            f"{', '.join(LAYOUTS)}. Use drafter.init=last_layer or random"
        )
    check_settings(block, layout, config)
    prefix = layout.prefix.format(layer=target.spec.num_layers)
    stored = read_tensors(checkpoint_folder(target), prefix)
    what = f"drafter.init=target_mtp: {target.config.path}, tensors {prefix}*"
    if not stored:
        raise ValueError(f"{what}: there are none; this checkpoint brings no MTP layer. Use drafter.init=last_layer")
    for name, part in layout.shared.items():
        own = target.head.embedding if part == "embedding" else target.head.lm_head
        if name in stored and not torch.equal(stored.pop(name).to(own), own):
            raise ValueError(f"{what}: {name} is not the target's own {part}, which is the one that drafters use")
    layer = {name[len(layout.layer_prefix) :]: stored.pop(name) for name in list(stored) if _in_layer(name, layout)}
    tensors = layer_tensors(layer)
    tensors.update({layout.names.get(name, name): tensor for name, tensor in stored.items()})
    copy_tensors(block, tensors, what)
    return f"MTP block: the target's own MTP layer, {len(layer) + len(stored)} tensors at {prefix}*"


def _in_layer(name: str, layout: Layout) -> bool:
    return name.startswith(layout.layer_prefix) and name not in layout.names


def check_settings(block: MTPBlock, layout: Layout, config: Any) -> None:
    """Refuses a block of other conventions than the family's; config: the target's transformers configuration."""
    own = asdict(block.config)
    family = dict(layout.settings)
    values = config.to_dict()
    if config.model_type == "glm4_moe":
        family.update(qk_norm=values["use_qk_norm"], qkv_bias=values["attention_bias"])
        if values["n_group"] != 1:
            raise ValueError(f"drafter.init=target_mtp: grouped top-k (n_group={values['n_group']}) is not supported")
    if not values.get("norm_topk_prob", True):
        raise ValueError("drafter.init=target_mtp: routing weights that are not renormalised are not supported")
    moe = block.config.moe
    if moe.num_experts > 0:
        own.update(
            {"moe.scores": moe.scores, "moe.scaling": moe.scaling, "moe.experts_per_token": moe.experts_per_token}
        )
        family["moe.scores"] = "softmax" if layout is QWEN else "sigmoid"
        family["moe.scaling"] = values.get("router_scaling_factor", values.get("routed_scaling_factor", 1.0))
        family["moe.experts_per_token"] = values["num_experts_per_tok"]
    wrong = [name for name in family if own[name] != family[name]]
    if wrong:
        lines = " ".join(f"drafter.{name}={str(family[name]).lower()}" for name in wrong)
        raise ValueError(f"drafter.init=target_mtp: the MTP layer of {config.model_type} is another block; set {lines}")


def layer_tensors(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A decoder layer's tensors under the block's names, experts stacked; names that no rule knows stay as they are."""
    tensors: dict[str, Tensor] = {}
    experts: dict[str, dict[int, Tensor]] = {}
    for name, tensor in state.items():
        expert = re.fullmatch(r"mlp\.experts\.(\d+)\.(gate|up|down)_proj\.weight", name)
        if expert:
            experts.setdefault(expert[2], {})[int(expert[1])] = tensor
            continue
        new = next((re.sub(old, new, name) for old, new in LAYER_NAMES if re.fullmatch(old, name)), name)
        tensors[new] = tensor
    if experts:
        gate, up, down = (
            torch.stack([tensor for _, tensor in sorted(experts[part].items())]) for part in ("gate", "up", "down")
        )
        tensors["mlp.experts.gate_up_proj"] = torch.cat([gate, up], 1)
        tensors["mlp.experts.down_proj"] = down
    return tensors


def copy_tensors(block: MTPBlock, tensors: Mapping[str, Tensor], what: str, skip: tuple[str, ...] = ()) -> None:
    """Writes tensors into the block; all of the block's (but `skip`) and no others, in the block's shapes.

    Raises:
        ValueError: naming each tensor that is missing, unknown or of another shape.
    """
    own = {name: tensor for name, tensor in block.state_dict().items() if name not in skip}
    faults = [f"the block has no {name}" for name in tensors if name not in own]
    faults += [f"{name} is missing" for name in own if name not in tensors]
    faults += [
        f"{name} is {tuple(tensors[name].shape)}, the block's {tuple(own[name].shape)}"
        for name in own
        if name in tensors and tensors[name].shape != own[name].shape
    ]
    if faults:
        shown = "; ".join(faults[:6]) + ("; ..." if len(faults) > 6 else "")
        raise ValueError(f"{what} does not fit the block: {shown}. Set the drafter's sizes and options to the target's")
    for name, tensor in own.items():
        tensor.copy_(tensors[name])


def check_layer(block: MTPBlock, target: Target, what: str) -> None:
    """Runs the copied layer on what the target's last layer reads, and expects the target's own outputs.

    This covers what no list of tensors shows: norms, activation, RoPE, score scale, windows, soft-caps.
    """
    ids = torch.arange(1, NUM_PROBE_TOKENS + 1, device=target.device) * target.spec.vocab_size // 20
    entering, final = last_layer_states(target, ids)
    entering = entering.to(block.eh_proj.weight)
    position_ids = torch.arange(NUM_PROBE_TOKENS, device=entering.device)
    columns = Columns(first=torch.zeros_like(position_ids), last=position_ids, position_ids=position_ids)
    state, _, _ = block.layer(entering, 0, columns, block.layer_entries(entering, position_ids), ())
    expected = final.to(state)
    bound = max(1e-4, 16 * torch.finfo(final.dtype).eps) * float(expected.abs().max())
    difference = float((state - expected).abs().max())
    if not difference <= bound:
        raise ValueError(
            f"{what}: with the same weights the block's output differs by {difference:.3g} (bound {bound:.3g}); "
            "that layer is of another kind (norm_plus_one, activation, window, soft-cap, score scale). "
            "Use drafter.init=random"
        )


def checkpoint_folder(target: Target) -> Path:
    """The folder with the target's files, which loading it has put there."""
    path = Path(target.config.path).expanduser()
    if path.is_dir():
        return path
    return Path(snapshot_download(target.config.path, revision=target.config.revision, local_files_only=True))


def read_tensors(folder: Path, prefix: str) -> dict[str, Tensor]:
    """All tensors of a folder's safetensors files whose names begin with prefix, under the rest of their names."""
    tensors = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 -- safe_open is no dict
                if name.startswith(prefix):
                    tensors[name.removeprefix(prefix)] = opened.get_tensor(name)
    return tensors
