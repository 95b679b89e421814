"""Speculative decoding is plain decoding, with fewer target passes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from toy_drafters import PerfectDrafter, RandomDrafter, SideBySide, TableDrafter
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, MistralConfig, MistralForCausalLM

from draftsmith.data.batch import TargetStates
from draftsmith.decode.speculative import DecodingConfig, end_tokens, plain_decode, speculative_decode
from draftsmith.models.dfly import DFlyConfig
from draftsmith.models.mtp import MTPConfig
from draftsmith.models.sampling import distribution
from draftsmith.models.target import Target, TargetConfig

NEVER = -1  # an end token that no output contains


@pytest.fixture(scope="module")
def target(target_path: Path) -> Target:
    loaded = Target.load(TargetConfig(path=str(target_path)), device="cpu")
    loaded.model.generation_config.eos_token_id = NEVER
    return loaded


def prompts_of(target: Target, count: int, *, seed: int = 0, longest: int = 12) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, longest + 1, (count,), generator=generator).tolist()
    return [torch.randint(0, target.spec.vocab_size, (length,), generator=generator) for length in lengths]


def perfect(target: Target, prompt: Tensor, num_draft_tokens: int, **kwargs: Any) -> PerfectDrafter:
    return PerfectDrafter(num_draft_tokens, lambda ids: target.model(ids).logits, int(prompt[0]), **kwargs)


def test_plain_decoding_is_transformers_own(target: Target) -> None:
    for prompt in prompts_of(target, 5):
        ours = plain_decode(target, [prompt], DecodingConfig(max_new_tokens=32))[0].tokens
        theirs = target.model.generate(
            prompt[None], attention_mask=torch.ones(1, len(prompt)), max_new_tokens=32, do_sample=False
        )
        assert ours == theirs[0, len(prompt) :].tolist()


def test_plain_decoding_reads_one_token_in_each_pass(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    widths, extend = [], target.extend
    monkeypatch.setattr(target, "extend", lambda ids, *rest: widths.append(ids.shape[1]) or extend(ids, *rest))
    plain_decode(target, [torch.arange(5)], DecodingConfig(max_new_tokens=4))
    assert widths == [5, 1, 1, 1]


def test_identical_to_plain_decoding_with_a_random_drafter(target: Target) -> None:
    """50 prompts over draft lengths 1 to 8."""
    config = DecodingConfig(max_new_tokens=20)
    accepted = []
    for index, prompt in enumerate(prompts_of(target, 50)):
        drafter = RandomDrafter(1 + index % 8, target.spec.vocab_size)
        result = speculative_decode(target, drafter, [prompt], config)[0]
        assert result.tokens == plain_decode(target, [prompt], config)[0].tokens
        assert len(result.tokens) == 20
        accepted += result.accepted
    assert sum(accepted) / len(accepted) < 0.1


@pytest.mark.parametrize("num_draft_tokens", range(1, 9))
def test_a_perfect_drafter_is_accepted_whole(target: Target, num_draft_tokens: int) -> None:
    rounds = 4
    config = DecodingConfig(max_new_tokens=1 + rounds * (num_draft_tokens + 1))
    for prompt in prompts_of(target, 3, seed=num_draft_tokens):
        result = speculative_decode(target, perfect(target, prompt, num_draft_tokens), [prompt], config)[0]
        assert result.tokens == plain_decode(target, [prompt], config)[0].tokens
        assert result.accepted == [num_draft_tokens] * rounds
        assert result.acceptance == [[1.0] * num_draft_tokens] * rounds


class Forgetful(PerfectDrafter):
    """Wrong now and then."""

    def logits(self, seen: Any, chain: list[int]) -> Tensor:
        logits = super().logits(seen, chain)
        return -logits if (7 * len(seen.next_ids) + len(chain)) % 5 == 0 else logits


def test_identical_when_drafts_are_partly_right(target: Target) -> None:
    """Every number of accepted drafts occurs, so that every length of rollback does."""

    config = DecodingConfig(max_new_tokens=64)
    lengths = set()
    for prompt in prompts_of(target, 6, seed=3):
        drafter = Forgetful(4, lambda ids: target.model(ids).logits, int(prompt[0]))
        result = speculative_decode(target, drafter, [prompt], config)[0]
        assert result.tokens == plain_decode(target, [prompt], config)[0].tokens
        lengths |= set(result.accepted)
    assert lengths == {0, 1, 2, 3, 4}


def test_the_drafter_sees_verified_positions_only(target: Target) -> None:
    prompt = prompts_of(target, 1, seed=9)[0]
    layer_ids = (0, 2, 3)
    for drafter in (
        RandomDrafter(3, target.spec.vocab_size, target_layer_ids=layer_ids),
        perfect(target, prompt, 3, target_layer_ids=layer_ids),
    ):
        result = speculative_decode(target, drafter, [prompt], DecodingConfig(max_new_tokens=20))[0]
        text = torch.cat((prompt, torch.tensor(result.tokens)))
        seen = drafter.caches[0]
        shown = len(seen.next_ids)
        assert shown >= len(prompt) + 12
        assert seen.next_ids == text[1 : shown + 1].tolist()
        states = target.states(text[None, :shown], layer_ids)
        assert torch.allclose(torch.cat(seen.final), states.final[0], atol=1e-4)
        assert torch.allclose(torch.cat(seen.layers), states.layers[0], atol=1e-4)


@pytest.mark.parametrize("max_new_tokens", range(1, 10))
def test_output_never_exceeds_max_new_tokens(target: Target, max_new_tokens: int) -> None:
    prompt = prompts_of(target, 1, seed=1)[0]
    config = DecodingConfig(max_new_tokens=max_new_tokens)
    result = speculative_decode(target, perfect(target, prompt, 3), [prompt], config)[0]
    assert result.tokens == plain_decode(target, [prompt], config)[0].tokens
    assert len(result.tokens) == max_new_tokens
    # 1 token from the prompt, then 3 drafts and a bonus in each round; the last round's drafts count where emitted.
    expected = {1: [], 2: [1], 3: [2], 4: [3], 5: [3], 6: [3, 1], 7: [3, 2], 8: [3, 3], 9: [3, 3]}
    assert result.accepted == expected[max_new_tokens]


def unrepetitive(target: Target) -> tuple[Tensor, list[int]]:
    """A prompt with an output of 16 tokens that has no token twice before its last three."""
    for prompt in prompts_of(target, 50, seed=4):
        free = plain_decode(target, [prompt], DecodingConfig(max_new_tokens=16))[0].tokens
        if len(set(free[:13])) == 13:
            return prompt, free
    raise AssertionError("no prompt has such an output")


@pytest.mark.parametrize("position", range(1, 10))
def test_an_end_token_ends_the_output_and_cuts_the_draft(
    target: Target, position: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever of several end tokens comes first ends the output, wherever in a round it stands."""
    prompt, free = unrepetitive(target)
    monkeypatch.setattr(target.model.generation_config, "eos_token_id", [free[12], free[position]])
    assert end_tokens(target) == {free[12], free[position]}
    config = DecodingConfig(max_new_tokens=16)
    assert plain_decode(target, [prompt], config)[0].tokens == free[: position + 1]
    result = speculative_decode(target, perfect(target, prompt, 3), [prompt], config)[0]
    assert result.tokens == free[: position + 1]
    whole, rest = divmod(position, 4)
    assert result.accepted == [3] * whole + ([rest] if rest else [])


def test_mask_and_padding_tokens_inside_an_output_are_kept(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is trimmed by value: a target that emits its mask token, padding token and 0 keeps them."""
    mask, pad = target.tokenizer.convert_tokens_to_ids("<|mask|>"), target.tokenizer.pad_token_id
    cycle = [5, mask, pad, 0, 9]
    table = torch.zeros(target.spec.vocab_size, target.spec.vocab_size)
    for token, following in zip(cycle, cycle[1:] + cycle[:1], strict=True):
        table[token, following] = 1.0
    forced = TableTarget(table)
    prompt = torch.tensor([9])
    for drafter in (TableDrafter(3, table), RandomDrafter(3, target.spec.vocab_size)):
        result = speculative_decode(forced, drafter, [prompt], DecodingConfig(max_new_tokens=12))[0]
        assert result.tokens == (cycle * 3)[:12]


def test_a_generation_leaves_nothing_behind(target: Target) -> None:
    """The second of two prompts gives what it gives alone, with one drafter for both."""
    first, second = prompts_of(target, 2, seed=8)
    config = DecodingConfig(max_new_tokens=24)
    alone = speculative_decode(target, RandomDrafter(4, target.spec.vocab_size), [second], config)[0]
    drafter = RandomDrafter(4, target.spec.vocab_size)
    speculative_decode(target, drafter, [first], config)
    again = speculative_decode(target, drafter, [second], config)[0]
    assert again.tokens == alone.tokens
    assert drafter.caches[1].next_ids[: len(second) - 1] == second[1:].tolist()


def test_a_batch_gives_each_request_what_it_gets_alone(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts of different lengths, outputs that end at different rounds, and one that ends with its first token."""
    prompts = prompts_of(target, 5, seed=12, longest=20)
    config = DecodingConfig(max_new_tokens=30)
    free = [output.tokens for output in plain_decode(target, prompts, config)]
    ends = [free[0][0], free[1][7], free[2][20]]
    monkeypatch.setattr(target.model.generation_config, "eos_token_id", ends)

    def drafter(prompt: Tensor) -> Forgetful:
        return Forgetful(4, lambda ids: target.model(ids).logits, int(prompt[0]))

    alone = [speculative_decode(target, drafter(prompt), [prompt], config)[0] for prompt in prompts]
    plain = plain_decode(target, prompts, config)
    together = speculative_decode(target, SideBySide([drafter(prompt) for prompt in prompts]), prompts, config)
    assert [output.tokens for output in plain] == [output.tokens for output in alone]
    for one, other in zip(alone, together, strict=True):
        assert (one.tokens, one.accepted, one.acceptance) == (other.tokens, other.accepted, other.acceptance)
    lengths = [len(output.tokens) for output in together]
    assert lengths[0] == 1
    assert len(set(lengths)) >= 3
    assert len({output.seconds for output in together}) == 1


@pytest.mark.parametrize(
    "config",
    [DFlyConfig(block_size=4, target_layer_ids=[0, 2]), MTPConfig(num_draft_tokens=3)],
    ids=["dfly", "mtp"],
)
def test_a_drafter_proposes_for_a_batch_what_it_proposes_for_one(target: Target, config: Any) -> None:
    """Its cache takes a different number of positions from each request, and none from finished ones."""
    torch.manual_seed(0)
    drafter = config.build(target.spec).eval()
    proposed: list[Tensor] = []
    propose = drafter.propose
    drafter.propose = lambda *args, **kwargs: proposed.append(propose(*args, **kwargs)) or proposed[-1]
    prompts = prompts_of(target, 3, seed=2, longest=20)
    decoding = DecodingConfig(max_new_tokens=12)
    together = speculative_decode(target, drafter, prompts, decoding)
    rounds = [[proposal.tokens[i].tolist() for proposal in proposed] for i in range(3)]
    for i, prompt in enumerate(prompts):
        proposed.clear()
        alone = speculative_decode(target, drafter, [prompt], decoding)[0]
        assert (alone.tokens, alone.accepted) == (together[i].tokens, together[i].accepted)
        own = [proposal.tokens[0].tolist() for proposal in proposed]
        assert rounds[i][: len(own)] == own


def save_with_tokenizer(model: Any, tokenizer: Any, folder: Path) -> Path:
    for name, weight in model.named_parameters():
        if name.endswith("norm.weight"):
            torch.nn.init.uniform_(weight, 0.5, 1.5)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def sliding_gemma3(tokenizer: Any, folder: Path) -> Path:
    torch.manual_seed(0)
    config = Gemma3TextConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        sliding_window=8,
        sliding_window_pattern=2,
        initializer_range=0.3,
        max_position_embeddings=256,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    return save_with_tokenizer(Gemma3ForCausalLM(config), tokenizer, folder)


def sliding_mistral(tokenizer: Any, folder: Path) -> Path:
    torch.manual_seed(0)
    config = MistralConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        sliding_window=6,
        initializer_range=0.3,
        max_position_embeddings=256,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    return save_with_tokenizer(MistralForCausalLM(config), tokenizer, folder)


@pytest.mark.parametrize("build", [sliding_gemma3, sliding_mistral])
def test_sliding_windows_roll_back(build: Callable[..., Path], tokenizer: Any, tmp_path: Path) -> None:
    target = Target.load(TargetConfig(path=str(build(tokenizer, tmp_path))), device="cpu")
    target.model.generation_config.eos_token_id = NEVER
    for prompt in prompts_of(target, 4, longest=20):
        config = DecodingConfig(max_new_tokens=41)
        plain = plain_decode(target, [prompt], config)[0].tokens
        theirs = target.model.generate(
            prompt[None], attention_mask=torch.ones(1, len(prompt)), max_new_tokens=41, do_sample=False
        )
        assert plain == theirs[0, len(prompt) :].tolist()
        assert speculative_decode(target, RandomDrafter(3, target.spec.vocab_size), [prompt], config)[0].tokens == plain
        result = speculative_decode(target, perfect(target, prompt, 3), [prompt], config)[0]
        assert result.tokens == plain
        assert result.accepted == [3] * 10


class TableTarget:
    """A target whose next-token logits are a row of a table: the state of a position is its token's one-hot."""

    def __init__(self, table: Tensor) -> None:
        self.model = SimpleNamespace(generation_config=SimpleNamespace(eos_token_id=NEVER))
        self.head = SimpleNamespace(logits=lambda hidden: hidden @ table)
        self.vocab_size = len(table)

    def new_kv_cache(self, batch_size: int) -> Any:
        return SimpleNamespace(keep=lambda counts: None)

    def extend(self, input_ids: Tensor, kv_cache: Any, layer_ids: tuple[int, ...]) -> TargetStates:
        final = torch.nn.functional.one_hot(input_ids, self.vocab_size).float()
        return TargetStates(layers=final[:, :, None, :][:, :, :0], final=final)


@pytest.mark.parametrize(("draft_sampling", "top_p"), [("sampled", 1.0), ("sampled", 0.8), ("greedy", 0.8)])
def test_sampled_outputs_follow_the_target(draft_sampling: str, top_p: float) -> None:
    vocab, draws = 3, 1000
    generator = torch.Generator().manual_seed(11)
    table, drafted = 1.5 * torch.randn(2, vocab, vocab, generator=generator)
    target, drafter = TableTarget(table), TableDrafter(2, drafted)
    config = DecodingConfig(max_new_tokens=3, temperature=0.9, top_p=top_p, draft_sampling=draft_sampling)
    counts = torch.zeros(vocab, vocab, vocab, dtype=torch.float64)
    for _ in range(draws):
        tokens = speculative_decode(target, drafter, [torch.tensor([1])], config, generator)[0].tokens
        counts[tuple(tokens)] += 1
        drafter.caches.clear()
    rows = distribution(table, 0.9, top_p).double()
    expected = draws * rows[1][:, None, None] * rows[:, :, None] * rows[None]
    possible = expected > 0
    assert counts[~possible].sum() == 0
    # At most 26 degrees of freedom: chi-square is above 54.1 once in a thousand.
    assert ((counts - expected)[possible] ** 2 / expected[possible]).sum().item() < 54.1


def test_a_perfect_drafter_that_samples_is_accepted_whole(target: Target) -> None:
    prompt = prompts_of(target, 1, seed=2)[0]
    config = DecodingConfig(max_new_tokens=21, temperature=1.0, top_p=0.9)
    drafter = perfect(target, prompt, 3)
    result = speculative_decode(target, drafter, [prompt], config, torch.Generator().manual_seed(0))[0]
    assert result.accepted == [3] * 5
    assert torch.tensor(result.acceptance).allclose(torch.ones(5, 3), atol=1e-3)


def test_the_same_seed_gives_the_same_output(target: Target) -> None:
    prompt = prompts_of(target, 1, seed=2)[0]
    config = DecodingConfig(max_new_tokens=20, temperature=1.0)

    def run(seed: int) -> tuple[list[int], list[int]]:
        generator = torch.Generator().manual_seed(seed)
        drafter = TableDrafter(3, torch.zeros(target.spec.vocab_size, target.spec.vocab_size))
        return (
            plain_decode(target, [prompt], config, generator)[0].tokens,
            speculative_decode(target, drafter, [prompt], config, generator)[0].tokens,
        )

    assert run(0) == run(0) != run(1)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens is 0"),
        ({"temperature": -1.0}, r"temperature is -1.0"),
        ({"top_p": 0.0}, r"top_p is 0.0"),
        ({"draft_sampling": "argmax"}, "choose one of sampled, greedy"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"batch_size": 2, "temperature": 1.0}, "batch_size is 2 at temperature 1.0: .* set batch_size=1"),
    ],
)
def test_settings_out_of_range_are_refused(setting: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DecodingConfig(**setting)
