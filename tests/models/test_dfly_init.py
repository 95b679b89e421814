"""A block-diffusion drafter that starts from the target's layers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn
from transformers import (
    Ernie4_5Config,
    Ernie4_5ForCausalLM,
    GemmaConfig,
    GemmaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from draftsmith.models.dfly import DFly, DFlyConfig
from draftsmith.models.dfly_init import copy_target_layers, norm_scale, why_not
from draftsmith.models.target import Target, TargetConfig, TargetSpec

SMALL = {
    "vocab_size": 60,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "initializer_range": 0.2,
}
FAMILIES = {"qwen2": (Qwen2Config, Qwen2ForCausalLM), "qwen3": (Qwen3Config, Qwen3ForCausalLM)}


def build_target(config_class, model_class, **overrides) -> Target:
    torch.manual_seed(0)
    config = config_class(**{**SMALL, **overrides})
    model = model_class(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                weight.copy_(torch.rand_like(weight) + 0.5)
    return Target(
        config=TargetConfig(path="tiny"), spec=TargetSpec.of(config, mask_token_id=59), tokenizer=None, model=model
    )


@pytest.fixture(scope="module")
def llama(tmp_path_factory, new_target) -> Target:
    path = new_target(tmp_path_factory.mktemp("llama"), num_hidden_layers=8)
    return Target.load(TargetConfig(path=str(path)), device="cpu")


@pytest.fixture(scope="module", params=["llama", "qwen2", "qwen3"])
def target(request, llama) -> Target:
    return llama if request.param == "llama" else build_target(*FAMILIES[request.param])


def copied(target: Target, *, fusion_peak: float, **settings) -> DFly:
    torch.manual_seed(1)
    drafter = DFlyConfig(**settings).build(target.spec)
    assert why_not(drafter, target) is None
    assert copy_target_layers(drafter, target, fusion_peak) == [5, 6][-drafter.config.num_layers :]
    return drafter


@pytest.mark.parametrize(
    ("settings", "exact_layers"),
    [
        ({"context": "hybrid"}, (0, 1)),
        ({"context": "fused", "head": "none"}, (0, 1)),
        ({"context": "shared", "head": "none"}, (1,)),  # one projection can be the identity of one layer only
    ],
)
@torch.no_grad()
def test_context_keys_and_values_equal_the_targets_own(target, settings, exact_layers):
    drafter = copied(target, fusion_peak=20.0, **settings)  # a gap of 40
    assert drafter.target_layer_ids == (1, 2, 3, 4, 5)
    ids = torch.randint(0, 50, (1, 12))
    past = target.model(ids, use_cache=True).past_key_values
    states = target.states(ids, drafter.target_layer_ids)
    contexts = drafter.backbone.project_context(states.layers, torch.arange(12)[None])
    for layer in exact_layers:
        keys, values = contexts[layer]
        theirs = past.layers[5 + layer]
        for own, reference in ((keys, theirs.keys), (values, theirs.values)):
            reference = reference.transpose(1, 2)
            assert float((own - reference).abs().max() / reference.abs().max()) < 1e-5


def test_the_default_peak_keeps_the_context_to_a_few_thousandths_and_the_gradient_alive(llama):
    drafter = copied(llama, fusion_peak=6.0)
    exact = copied(llama, fusion_peak=20.0)
    states = llama.states(torch.randint(0, 50, (1, 12)), drafter.target_layer_ids)
    contexts = drafter.backbone.context(states.layers)
    sum(c.pow(3).sum() for c in contexts).backward()
    for own, reference in zip(contexts, exact.backbone.context(states.layers), strict=True):
        assert 0 < float((own - reference).detach().norm() / reference.detach().norm()) < 5e-3
    assert drafter.backbone.context.fusion.grad.abs().max() > 1e-5


@torch.no_grad()
def test_a_draft_layer_computes_what_the_targets_layer_computes(target):
    """A block of one slot on exact context is the target's layer at that position, MLP and all."""
    drafter = copied(target, fusion_peak=20.0, block_size=2, num_layers=1)
    assert drafter.target_layer_ids[-1] == 5
    ids = torch.randint(0, 50, (1, 9))
    states = target.states(ids, (5, 6))
    layer, rotary = drafter.backbone.layers[0], drafter.backbone.rotary
    captured = target.states(ids, drafter.target_layer_ids)
    context = drafter.backbone.project_context(captured.layers[:, :8], torch.arange(8)[None])[0]

    def attend(q, k, v, context_k, context_v):
        keys = torch.cat((context_k, k[:, 0]), dim=1).repeat_interleave(2, dim=2)
        values = torch.cat((context_v, v[:, 0]), dim=1).repeat_interleave(2, dim=2)
        weights = torch.einsum("bhd,bkhd->bhk", q[:, 0, 0], keys).div(8**0.5).softmax(-1)
        return torch.einsum("bhk,bkhd->bhd", weights, values)[:, None, None]

    out = layer(states.layers[:, 8:, 0][:, None], rotary(torch.tensor([[[8]]])), context, attend)
    reference = states.layers[0, 8, 1]
    assert float((out[0, 0, 0] - reference).abs().max() / reference.abs().max()) < 1e-4
    x = torch.randn(3, 32)
    torch.testing.assert_close(drafter.backbone.norm(x), target.final_norm(x), rtol=1e-5, atol=1e-5)


def test_the_fusion_row_peaks_on_its_own_layer(llama):
    drafter = copied(llama, fusion_peak=6.0)
    assert drafter.backbone.context.fusion.tolist() == [[-6, -6, -6, 6, -6], [-6, -6, -6, -6, 6]]
    assert drafter.backbone.context.projection.weight.eq(0).all()
    shared = copied(llama, fusion_peak=6.0, context="shared", head="none")
    expected = torch.zeros(32, 160)
    expected[:, 128:] = torch.eye(32)
    assert torch.equal(shared.backbone.context.projection.weight, expected)


def test_norms_are_measured_in_both_conventions():
    class PlusOne(nn.Module):
        def __init__(self, weight):
            super().__init__()
            self.weight = nn.Parameter(weight)

        def forward(self, x):
            return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * (1 + self.weight)

    weight = torch.randn(16)
    torch.testing.assert_close(norm_scale(PlusOne(weight), 16, 1e-6), 1 + weight, rtol=1e-5, atol=1e-6)
    plain = nn.RMSNorm(16, eps=1e-6)
    nn.init.normal_(plain.weight)
    torch.testing.assert_close(norm_scale(plain, 16, 1e-6), plain.weight, rtol=1e-5, atol=1e-6)
    layer_norm = nn.LayerNorm(16)
    nn.init.normal_(layer_norm.bias)
    assert norm_scale(layer_norm, 16, 1e-5) is None
    assert norm_scale(nn.LayerNorm(16), 16, 1e-5) is None
    assert norm_scale(plain, 8, 1e-6) is None


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"num_layers": 6}, "only 5 of the captured layers"),
        ({"target_layer_ids": [3, 7]}, "only 1 of the captured layers"),
        ({"num_heads": 2}, "num_heads=2 differs from the target's 4"),
        ({"intermediate_size": 40}, "intermediate_size=40 differs"),
        ({"qk_norm": True}, "qk_norm=True differs"),
    ],
)
def test_settings_that_rule_out_the_targets_layers(llama, settings, reason):
    drafter = DFlyConfig(**settings).build(llama.spec)
    assert reason in drafter.initialise(llama)
    assert drafter.initialise(llama).startswith("draft layers start from random weights, not from the target's layers")
    strict = DFlyConfig(**settings, init="target_layers").build(llama.spec)
    with pytest.raises(ValueError, match=r"choose drafter\.init=random"):
        strict.initialise(llama)


def test_targets_whose_layers_are_of_another_kind():
    gemma = build_target(GemmaConfig, GemmaForCausalLM, hidden_act="gelu_pytorch_tanh")
    assert "gelu" in DFlyConfig().build(gemma.spec).initialise(gemma)
    sliding = build_target(
        Qwen3Config, Qwen3ForCausalLM, use_sliding_window=True, sliding_window=4, max_window_layers=2
    )
    assert "has sliding_attention" in DFlyConfig().build(sliding.spec).initialise(sliding)
    interleaved = build_target(Ernie4_5Config, Ernie4_5ForCausalLM)  # Llama's names, but rotates interleaved pairs
    assert "rotates or projects its keys in another way" in DFlyConfig().build(interleaved.spec).initialise(interleaved)


def test_auto_says_what_it_did_and_random_leaves_the_weights(llama):
    assert DFlyConfig().build(llama.spec).initialise(llama) == "draft layers start from the target's layers 5, 6"
    drafter = DFlyConfig(init="random").build(llama.spec)
    before = {name: value.clone() for name, value in drafter.state_dict().items()}
    assert drafter.initialise(llama) == "draft layers start from random weights"
    assert all(torch.equal(before[name], value) for name, value in drafter.state_dict().items())


def test_a_target_of_another_size_is_refused(llama):
    other = DFlyConfig().build(replace(llama.spec, hidden_size=64))
    with pytest.raises(ValueError, match="built for a target with hidden 64 and 8 layers, this one has 32 and 8"):
        other.initialise(llama)
