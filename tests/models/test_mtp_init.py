"""Starting weights: the block is the target's own layer, in every family whose layout it claims to know."""

from __future__ import annotations

import pytest
import torch
import transformers
from safetensors.torch import save_file

from draftsmith.data.batch import Document
from draftsmith.models import mtp_init
from draftsmith.models.moe import MoEConfig
from draftsmith.models.mtp import MTPConfig
from draftsmith.models.mtp_block import Columns
from draftsmith.models.mtp_init import copy_tensors, layer_tensors
from draftsmith.models.target import Target, TargetConfig, TargetSpec

SIZES = {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
    "tie_word_embeddings": False,
}
EXPERTS = {"moe_intermediate_size": 16, "num_experts_per_tok": 2}
MOE = {"num_experts": 4, "experts_per_token": 2, "expert_intermediate_size": 16, "shared_intermediate_size": 16}
ZEROED = {"zero_first_embedding": True}

# model_type, transformers settings, the drafter's settings.
FAMILIES = {
    "hy_v3": (
        {**EXPERTS, "num_experts": 4, "mlp_layer_types": ["dense", "sparse"]},
        {**ZEROED, "qk_norm": True, "moe": MoEConfig(**MOE, scaling=2.826)},
    ),
    "qwen3_next": (
        {
            **EXPERTS,
            "num_experts": 4,
            "shared_expert_intermediate_size": 16,
            "layer_types": ["linear_attention", "full_attention"],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 2,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "partial_rotary_factor": 0.5,
            "norm_topk_prob": True,
        },
        {
            "qk_norm": True,
            "norm_plus_one": True,
            "attention_output_gate": True,
            "moe": MoEConfig(**MOE, scores="softmax", expert_bias=False, shared_expert_gate=True),
        },
    ),
    "glm4_moe": (
        {
            **EXPERTS,
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "routed_scaling_factor": 1.5,
            "use_qk_norm": True,
            "attention_bias": True,
            "n_group": 1,
            "topk_group": 1,
            "partial_rotary_factor": 0.5,
            "norm_topk_prob": True,
        },
        {**ZEROED, "qk_norm": True, "qkv_bias": True, "feedback": "pre_norm", "moe": MoEConfig(**MOE, scaling=1.5)},
    ),
}


def randomise(module):
    with torch.no_grad():
        for tensor in [*module.parameters(), *(b for n, b in module.named_buffers() if "bias" in n)]:
            tensor.normal_(std=0.3)
        for name, tensor in module.named_parameters():
            if "norm" in name:
                tensor.uniform_(0.3, 1.5)


@pytest.fixture(scope="module")
def family(tmp_path_factory, new_tokenizer):
    """A tiny target of a family, saved and loaded, by model_type."""
    made = {}

    def make(model_type):
        if model_type not in made:
            torch.manual_seed(0)
            config = transformers.AutoConfig.for_model(model_type, **{**SIZES, **FAMILIES[model_type][0]})
            model = transformers.AutoModelForCausalLM.from_config(config)
            randomise(model)
            folder = tmp_path_factory.mktemp(model_type)
            model.save_pretrained(folder)
            new_tokenizer().save_pretrained(folder)
            made[model_type] = (folder, Target.load(TargetConfig(path=str(folder)), device="cpu"))
        return made[model_type]

    return make


def run_layer(block, residual):
    positions = torch.arange(residual.shape[0])
    columns = Columns(first=torch.zeros_like(positions), last=positions, position_ids=positions)
    return block.layer(residual, 0, columns, block.layer_entries(residual, positions), ())


def causal(seq):
    return torch.full((seq, seq), float("-inf")).triu(1)[None, None]


def reference_layer(model, index, residual):
    decoder = model.get_decoder()
    positions = torch.arange(residual.shape[0])[None]
    embeddings = decoder.rotary_emb(residual[None], positions)
    out = decoder.layers[index](
        residual[None], position_embeddings=embeddings, attention_mask=causal(residual.shape[0]), position_ids=positions
    )
    return (out[0] if isinstance(out, tuple) else out)[0]


@pytest.mark.parametrize("model_type", FAMILIES)
def test_block_is_the_familys_decoder_layer(family, model_type):
    _, target = family(model_type)
    block = MTPConfig(**{**FAMILIES[model_type][1], "feedback": "pre_norm"}).build(target.spec).block
    tensors = layer_tensors(target.decoder_layer(1).state_dict())
    copy_tensors(
        block, tensors, "test", skip=("enorm.weight", "hnorm.weight", "eh_proj.weight", "final_layernorm.weight")
    )
    residual = torch.randn(9, 32)
    with torch.no_grad():
        _, ours, _ = run_layer(block, residual)
        expected = reference_layer(target.model, 1, residual)
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("config_class", "layer_module", "settings"),
    [
        ("Qwen2Config", "qwen2.modeling_qwen2.Qwen2DecoderLayer", {"qkv_bias": True}),  # MiMo's decoder layer
        (
            "Qwen3_5TextConfig",
            "qwen3_5.modeling_qwen3_5.Qwen3_5DecoderLayer",
            {"qk_norm": True, "norm_plus_one": True, "attention_output_gate": True},
        ),
    ],
)
def test_block_is_the_decoder_layer_of_dense_families(config_class, layer_module, settings):
    import importlib

    path, name = layer_module.rsplit(".", 1)
    module = importlib.import_module(f"transformers.models.{path}")
    config = getattr(transformers, config_class)(**SIZES, layer_types=["full_attention"] * 2)
    config._attn_implementation = "eager"
    layer = getattr(module, name)(config, 0).eval()
    randomise(layer)
    rotary = getattr(module, name.replace("DecoderLayer", "RotaryEmbedding").replace("Qwen3_5R", "Qwen3_5TextR"))(
        config
    )
    spec = TargetSpec(
        hidden_size=32,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        intermediate_size=48,
        rms_norm_eps=config.rms_norm_eps,
        vocab_size=300,
        max_position_embeddings=128,
        rope_inv_freq=tuple(rotary.inv_freq.tolist()),
    )
    block = MTPConfig(**settings, feedback="pre_norm").build(spec).block
    fresh = ("enorm.weight", "hnorm.weight", "eh_proj.weight", "final_layernorm.weight")
    copy_tensors(block, layer_tensors(layer.state_dict()), "test", skip=fresh)
    residual, positions = torch.randn(9, 32), torch.arange(9)[None]
    with torch.no_grad():
        _, ours, _ = run_layer(block, residual)
        expected = layer(
            residual[None],
            position_embeddings=rotary(residual[None], positions),
            attention_mask=causal(9),
            position_ids=positions,
        )
    torch.testing.assert_close(ours, expected[0], rtol=1e-5, atol=1e-5)


def mtp_checkpoint(target, model_type):
    """Random MTP tensors under the family's checkpoint names, and the transformers layer that they are."""
    layer = type(target.decoder_layer(1))(target.model.config, 1).eval()
    randomise(layer)
    stored = {}
    for name, tensor in layer.state_dict().items():
        if model_type == "hy_v3":
            for new, old in (("router.gate.weight", "gate.weight"), ("expert_bias", "e_score_correction_bias")):
                name = f"mlp.{new}" if name == f"mlp.{old}" else name
            name = name.replace("shared_experts", "shared_mlp")
        if name == "mlp.experts.gate_up_proj" and model_type != "qwen3_next":
            for expert, both in enumerate(tensor):
                gate, up = both.chunk(2)
                stored[f"mlp.experts.{expert}.gate_proj.weight"] = gate
                stored[f"mlp.experts.{expert}.up_proj.weight"] = up
        elif name == "mlp.experts.down_proj" and model_type != "qwen3_next":
            stored.update({f"mlp.experts.{e}.down_proj.weight": w for e, w in enumerate(tensor)})
        else:
            stored[name] = tensor
    extra = {name: torch.rand(32) + 0.5 for name in ("enorm", "hnorm", "final")}
    extra["eh_proj"] = torch.randn(32, 64)
    names = {
        "hy_v3": ("enorm", "hnorm", "final_layernorm", "eh_proj"),
        "glm4_moe": ("enorm", "hnorm", "shared_head.norm", "eh_proj"),
        "qwen3_next": ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm", "fc"),
    }[model_type]
    prefix, inner = ("mtp.", "layers.0.") if model_type == "qwen3_next" else ("model.layers.2.", "")
    stored = {f"{prefix}{inner}{name}": tensor for name, tensor in stored.items()}
    stored.update({f"{prefix}{name}.weight": t for name, t in zip(names, extra.values(), strict=True)})
    return {name: tensor.contiguous().clone() for name, tensor in stored.items()}, layer, extra


@pytest.mark.parametrize("model_type", FAMILIES)
def test_target_mtp_takes_the_checkpoints_layer(family, model_type):
    folder, target = family(model_type)
    stored, layer, extra = mtp_checkpoint(target, model_type)
    if model_type == "glm4_moe":
        stored["model.layers.2.embed_tokens.weight"] = target.head.embedding.clone()
    save_file(stored, folder / "mtp.safetensors")
    mtp = MTPConfig(init="target_mtp", **FAMILIES[model_type][1]).build(target.spec)
    assert mtp.initialise(target).startswith("MTP block: the target's own MTP layer")

    embedding, hidden = torch.randn(9, 32), torch.randn(9, 32)

    def norm(x, weight):
        scale = 1 + weight if model_type == "qwen3_next" else weight
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + target.spec.rms_norm_eps) * scale

    fused = torch.cat([norm(embedding, extra["enorm"]), norm(hidden, extra["hnorm"])], -1) @ extra["eh_proj"].T
    positions = torch.arange(9)
    columns = Columns(first=torch.zeros_like(positions), last=positions, position_ids=positions)
    with torch.no_grad():
        context = mtp.block.entries(embedding, hidden, positions)
        state, fed_back, _ = mtp.block(embedding, hidden, 0, columns, context, ())
        target.model.get_decoder().layers.append(layer)
        expected = reference_layer(target.model, 2, fused)
        del target.model.get_decoder().layers[2]
    normed = norm(expected, extra["final"])
    torch.testing.assert_close(state, normed, rtol=1e-5, atol=2e-5)
    torch.testing.assert_close(fed_back, expected if model_type == "glm4_moe" else normed, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("model.layers.2.self_attn.q_norm.weight"), "q_norm.weight is missing"),
        (
            lambda t: t.update({"model.layers.2.self_attn.kv_a_proj_with_mqa.weight": torch.ones(3)}),
            "kv_a_proj_with_mqa",
        ),
        (lambda t: t.update({"model.layers.2.eh_proj.weight": torch.ones(32, 32)}), r"eh_proj.weight is \(32, 32\)"),
        (lambda t: t.update({"model.layers.2.embed_tokens.weight": torch.ones(300, 32)}), "not the target's own"),
        (lambda t: t.clear(), "brings no MTP layer"),
    ],
)
def test_target_mtp_refuses_what_it_cannot_state(family, change, message):
    folder, target = family("hy_v3")
    stored, _, _ = mtp_checkpoint(target, "hy_v3")
    change(stored)
    save_file(stored, folder / "mtp.safetensors")
    mtp = MTPConfig(init="target_mtp", **FAMILIES["hy_v3"][1]).build(target.spec)
    with pytest.raises(ValueError, match=message):
        mtp.initialise(target)


def test_target_mtp_names_the_settings_to_change(family):
    _, target = family("hy_v3")
    moe = MoEConfig(**MOE, scores="softmax")
    mtp = MTPConfig(init="target_mtp", qk_norm=True, feedback="pre_norm", moe=moe).build(target.spec)
    with pytest.raises(ValueError, match="set drafter") as refusal:
        mtp.initialise(target)
    for line in (
        "drafter.zero_first_embedding=true",
        "drafter.feedback=post_norm",
        "drafter.moe.scores=sigmoid",
        "drafter.moe.scaling=2.826",
    ):
        assert line in str(refusal.value)


def test_target_mtp_refuses_other_families(target_path):
    target = Target.load(TargetConfig(path=str(target_path)), device="cpu")
    with pytest.raises(ValueError, match="MTP layer of llama is not supported"):
        MTPConfig(init="target_mtp").build(target.spec).initialise(target)


def documents_of(lengths, vocab_size=300, seed=0):
    source = torch.Generator().manual_seed(seed)
    tokens = [torch.randint(vocab_size, (length,), generator=source) for length in lengths]
    return [Document(tokens=ids, supervised=torch.ones_like(ids) > 0, domain="chat", id=str(ids)) for ids in tokens]


def test_last_layer_starts_as_the_targets_last_layer(target_path):
    """With the last layer's own input in place of the fused one, the block gives the target's final states."""
    target = Target.load(TargetConfig(path=str(target_path)), device="cpu")
    mtp = MTPConfig(init="last_layer").build(target.spec)
    assert "layer 3 and final norm; fusion fitted on 57 tokens" in mtp.initialise(target, documents_of([40, 1, 19]))
    ids = torch.arange(20)[None]
    states = target.states(ids, [2])
    with torch.no_grad():
        state, _, _ = run_layer(mtp.block, states.layers[0, :, 0])
    torch.testing.assert_close(state, states.final[0], rtol=1e-4, atol=1e-4)
    assert torch.equal(mtp.block.enorm.weight, torch.ones(32))
    assert torch.equal(mtp.block.hnorm.weight, torch.ones(32))


def test_a_fusion_that_can_be_exact_makes_the_block_the_target_one_token_on(target_path, monkeypatch):
    """Of a target whose last layer reads the token's own embedding, depth 0 gives the final states one position on."""
    monkeypatch.setattr(mtp_init, "RIDGE", 1e-9)
    target = Target.load(TargetConfig(path=str(target_path)), device="cpu")
    for index in range(3):
        for name, weight in target.decoder_layer(index).named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                weight.zero_()
    rows = target.model.get_input_embeddings().weight
    rows.copy_(3 * (rows + 1e-9).sign())  # each of size 3, as exactly as its norm can say
    block = MTPConfig(init="last_layer").build(target.spec).block
    mtp_init.from_last_layer(block, target, documents_of([150] * 8, len(rows)))
    expected = torch.cat([3 * torch.eye(32), torch.zeros(32, 32)], 1)
    torch.testing.assert_close(block.eh_proj.weight.detach(), expected, rtol=0, atol=1e-3)

    ids = documents_of([24], len(rows), seed=1)[0].tokens
    with torch.no_grad():
        state, _, _ = run_layer(
            block, block.fuse(target.head.embed(ids[1:]), target.states(ids[None], ()).final[0, :-1])
        )
    torch.testing.assert_close(state, target.states(ids[None, 1:], ()).final[0], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("fuse_order", "zero_first_embedding"), [("embedding_hidden", True), ("hidden_embedding", False)]
)
def test_the_fusion_is_the_ridge_regression_of_the_data(target_path, fuse_order, zero_first_embedding):
    """Against least squares with a row for each penalty, on every second of eight documents: 512 tokens of 800."""
    target = Target.load(TargetConfig(path=str(target_path)), device="cpu")
    config = MTPConfig(init="last_layer", fuse_order=fuse_order, zero_first_embedding=zero_first_embedding)
    mtp, documents = config.build(target.spec), documents_of([100] * 8, target.spec.vocab_size)
    assert "fitted on 396 tokens" in mtp.initialise(target, documents)
    inputs, expected = [], []
    for document in documents[::2]:
        states = target.states(document.tokens[None], [2])
        embedding = target.head.embed(document.tokens[1:])
        if zero_first_embedding:
            embedding[0] = 0
        parts = [mtp.block.enorm(embedding), mtp.block.hnorm(states.final[0, :-1])]
        inputs.append(torch.cat(parts if fuse_order == "embedding_hidden" else parts[::-1], -1).detach().double())
        expected.append(states.layers[0, 1:, 0].double())
    scale = 1 / torch.cat(expected).square().mean(-1, keepdim=True).sqrt()
    inputs, expected = torch.cat(inputs) * scale, torch.cat(expected) * scale
    penalty = torch.diag(inputs.square().sum(0) * 0.03).sqrt()
    solution = torch.linalg.lstsq(
        torch.cat([inputs, penalty]), torch.cat([expected, torch.zeros(64, 32, dtype=torch.float64)])
    ).solution
    torch.testing.assert_close(mtp.block.eh_proj.weight.detach().double(), solution.T, rtol=1e-4, atol=1e-5)


def test_last_layer_needs_a_document_of_two_tokens(target_path):
    target = Target.load(TargetConfig(path=str(target_path)), device="cpu")
    with pytest.raises(ValueError, match="no document of two tokens"):
        MTPConfig(init="last_layer").build(target.spec).initialise(target, documents_of([1, 1]))


@pytest.mark.parametrize("model_type", FAMILIES)
def test_last_layer_works_for_every_family(family, model_type):
    _, target = family(model_type)
    mtp = MTPConfig(init="last_layer", **FAMILIES[model_type][1]).build(target.spec)
    assert "final norm" in mtp.initialise(target, documents_of([30, 30]))


def test_last_layer_refuses_another_layer(new_target, tmp_path, target_path):
    target = Target.load(TargetConfig(path=str(target_path)), device="cpu")
    with pytest.raises(ValueError, match=r"q_norm.weight is missing.*options"):
        MTPConfig(init="last_layer", qk_norm=True).build(target.spec).initialise(target)
    with pytest.raises(ValueError, match=r"q_proj.weight is \(32, 32\), the block's \(16, 32\)"):
        MTPConfig(init="last_layer", num_heads=2).build(target.spec).initialise(target)
    gelu = new_target(tmp_path / "gelu", hidden_act="gelu")
    target = Target.load(TargetConfig(path=str(gelu)), device="cpu")
    with pytest.raises(ValueError, match="layer is of another kind"):
        MTPConfig(init="last_layer").build(target.spec).initialise(target)


def test_random_start_is_reproducible(target_path):
    target = Target.load(TargetConfig(path=str(target_path)), device="cpu")
    torch.manual_seed(5)
    one = MTPConfig().build(target.spec)
    torch.manual_seed(5)
    two = MTPConfig().build(target.spec)
    assert "random" in one.initialise(target)
    two.initialise(target)
    for a, b in zip(one.parameters(), two.parameters(), strict=True):
        assert torch.equal(a, b)
