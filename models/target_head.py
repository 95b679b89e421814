"""The target's vocabulary head: found from its configuration, then held against the target's own numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from draftsmith.models.head import Head

if TYPE_CHECKING:
    from draftsmith.models.target import TargetSpec

NUM_PROBE_TOKENS = 8


def build_head(model: Any, decoder: Any) -> Head:
    """The head of a transformers model; `check_head` shows whether nothing was overlooked.

    Raises:
        ValueError: the model has no lm_head.
    """
    config = model.config.get_text_config(decoder=True)
    embedding, lm_head = decoder.get_input_embeddings(), model.get_output_embeddings()
    if lm_head is None:
        raise ValueError(f"{type(model).__name__} has no lm_head: it is not a causal language model")
    bias = lm_head.bias  # None in most
    weight = embedding.weight.data
    # Absent attributes mean "no such factor": Gemma's embedding module scales by sqrt(hidden) rounded to the weights'
    # dtype, Granite multiplies embeddings and divides logits, Cohere and Falcon-H1 multiply logits.
    embed_scale = getattr(embedding, "embed_scale", None)
    embedding_scale = 1.0 if embed_scale is None else float(torch.as_tensor(embed_scale).to(weight.dtype))
    embedding_scale *= getattr(config, "embedding_multiplier", None) or 1.0
    logit_scale = getattr(config, "logit_scale", None) or getattr(config, "lm_head_multiplier", None) or 1.0
    logit_scale /= getattr(config, "logits_scaling", None) or 1.0
    return Head(
        weight,
        weight if lm_head.weight is embedding.weight else lm_head.weight.data,
        lm_head_bias=None if bias is None else bias.data,
        embedding_scale=float(embedding_scale),
        logit_scale=float(logit_scale),
        logit_softcap=getattr(config, "final_logit_softcapping", None),
    )


@torch.no_grad()
def check_head(model: Any, decoder: Any, layers: nn.ModuleList, head: Head, spec: TargetSpec) -> nn.Module | None:
    """Compares the head and the RoPE frequencies with what the model itself computes on a few tokens.

    Returns:
        The final norm: the decoder's own module whose output is its last hidden state. None where there is none.

    Raises:
        ValueError: the embedding that enters the first decoder layer, the logits or the frequencies differ, or the
            shapes of configuration and weights do.
    """
    name = type(model).__name__
    if head.embedding.shape != (spec.vocab_size, spec.hidden_size) or head.lm_head.shape != head.embedding.shape:
        raise ValueError(
            f"{name}: embedding {tuple(head.embedding.shape)} and lm_head {tuple(head.lm_head.shape)} should both be "
            f"(vocab, hidden) = ({spec.vocab_size}, {spec.hidden_size})"
        )
    _check_frequencies(decoder, spec, name)
    ids = torch.arange(1, NUM_PROBE_TOKENS + 1, device=head.embedding.device) * spec.vocab_size // 10
    entered, outputs, final = _probe(decoder, layers, ids[None])
    _expect(head.embed(ids[None]), entered, f"{name}: the embedding that enters decoder layer 0")
    own_logits = model(input_ids=ids[None], use_cache=False).logits
    _expect(head.logits(final), own_logits, f"{name}: the logits of its final hidden state")
    return next((module for module, output in outputs if output is final or torch.equal(output, final)), None)


def _probe(decoder: Any, layers: nn.ModuleList, ids: Tensor) -> tuple[Tensor, list[tuple[nn.Module, Tensor]], Tensor]:
    """What enters layer 0, what the decoder's direct children return, and its last hidden state."""
    entered: list[Tensor] = []
    outputs: list[tuple[nn.Module, Tensor]] = []

    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        entered.append(args[0] if args else kwargs["hidden_states"])

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        if isinstance(output, Tensor) and output.shape[:2] == ids.shape:
            outputs.append((module, output))

    hooks = [layers[0].register_forward_pre_hook(enter, with_kwargs=True)]
    hooks += [child.register_forward_hook(leave) for child in decoder.children() if child is not layers]
    try:
        final: Tensor = decoder(input_ids=ids, use_cache=False).last_hidden_state
    finally:
        for hook in hooks:
            hook.remove()
    return entered[0], outputs, final


def _expect(ours: Tensor, theirs: Tensor, what: str) -> None:
    """Equal to 1e-4, or to the rounding of the weights' dtype at that magnitude where that is coarser."""
    bound = max(1e-4, 4 * torch.finfo(ours.dtype).eps * float(theirs.abs().max()))
    difference = float((ours.float() - theirs.float()).abs().max()) if ours.shape == theirs.shape else float("inf")
    if not difference <= bound:
        raise ValueError(
            f"{what} differs by {difference:.3g} (bound {bound:.3g}) from embedding, lm_head, their scales and "
            "soft-cap as the configuration gives them; drafters would learn another distribution, so this target is "
            "refused"
        )


def _check_frequencies(decoder: Any, spec: TargetSpec, name: str) -> None:
    """Holds the spec's inverse frequencies against the model's own rotary module, where it has one."""
    ours = torch.tensor(spec.rope_inv_freq)
    for buffer_name, buffer in decoder.named_buffers():
        if buffer_name not in ("rotary_emb.inv_freq", "rotary_emb.full_attention_inv_freq"):
            continue
        theirs = buffer.float().cpu()
        rtol = max(1e-6, torch.finfo(buffer.dtype).eps)
        if theirs.shape != ours.shape or not torch.allclose(ours, theirs, rtol=rtol, atol=0):
            raise ValueError(
                f"{name}: its rotary frequencies {theirs.tolist()[:3]}... ({theirs.numel()}) are not those of its "
                f"configuration {ours.tolist()[:3]}... ({ours.numel()}); this target is refused"
            )
