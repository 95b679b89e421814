"""Every prompt is decoded twice, by two independent calls, and a difference is located."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from toy_drafters import RandomDrafter, TableDrafter

from draftsmith.decode.comparison import Outcome, decode_plainly, decode_prompts
from draftsmith.decode.prompts import Prompt
from draftsmith.decode.speculative import DecodingConfig
from draftsmith.models.target import Target, TargetConfig


@pytest.fixture(scope="module")
def target(target_path: Path) -> Target:
    return Target.load(TargetConfig(path=str(target_path)), device="cpu")


def prompt(*tokens: int) -> Prompt:
    return Prompt(id=str(tokens), tokens=torch.tensor(tokens), domain="chat")


def test_both_decodes_run_for_every_prompt(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    passes: list[int] = []
    extend = target.extend
    monkeypatch.setattr(target, "extend", lambda ids, *rest: passes.append(ids.shape[1]) or extend(ids, *rest))
    seen: list[Outcome] = []
    drafter = RandomDrafter(2, target.spec.vocab_size)
    config = DecodingConfig(max_new_tokens=3)
    outcomes = decode_prompts(target, drafter, [prompt(50, 51), prompt(60)], config, on_outcome=seen.append)
    assert seen == outcomes
    assert [outcome.prompt.id for outcome in outcomes] == ["(50, 51)", "(60,)"]
    assert [outcome.plain.tokens == outcome.speculative.tokens for outcome in outcomes] == [True, True]
    # Plain decoding reads one token in a pass, speculative an anchor and two drafts; the first two calls warm up.
    assert passes == [2, 1, 1, 2, 3, 3] * 2 + [1, 1, 1, 1, 3, 3]
    assert outcomes[0].plain.accepted == []
    assert len(outcomes[0].speculative.accepted) == 2
    assert all(outcome.plain.seconds > 0 and outcome.speculative.seconds > 0 for outcome in outcomes)


def test_what_is_drawn_for_a_prompt_depends_on_no_other(target: Target) -> None:
    config = DecodingConfig(max_new_tokens=8, temperature=1.0)

    def outputs(*prompts: Prompt, seed: int = 0) -> list[list[int]]:
        drafter = TableDrafter(2, torch.zeros(target.spec.vocab_size, target.spec.vocab_size))
        outcomes = decode_prompts(target, drafter, prompts, config, seed=seed)
        return [outcome.speculative.tokens for outcome in outcomes]

    first, second = prompt(50, 51), prompt(60)
    assert outputs(first, second) == [*outputs(first), *outputs(second)]
    assert outputs(first) != outputs(first, seed=1)


def test_the_first_divergence_is_located_with_the_targets_margin(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cache that is never rolled back gives other tokens, and the report says where and by how much."""
    target.model.generation_config.eos_token_id = -1
    new_kv_cache = target.new_kv_cache

    def broken(batch_size: int) -> object:
        cache = new_kv_cache(batch_size)
        monkeypatch.setattr(cache.layers, "crop", lambda count: None)
        return cache

    monkeypatch.setattr(target, "new_kv_cache", broken)
    question = prompt(50, 51, 52)
    drafter = RandomDrafter(3, target.spec.vocab_size)
    outcome = decode_prompts(target, drafter, [question], DecodingConfig(max_new_tokens=24))[0]
    assert outcome.plain.tokens != outcome.speculative.tokens
    found = outcome.divergence
    assert found is not None
    place = found.position
    assert outcome.plain.tokens[:place] == outcome.speculative.tokens[:place]
    assert found.token == outcome.plain.tokens[place]
    assert found.speculative_token == outcome.speculative.tokens[place]
    text = torch.cat((question.tokens, torch.tensor(outcome.plain.tokens[:place])))
    logits: Tensor = target.model(text[None]).logits[0, -1]
    assert int(logits.argmax()) == found.token
    best = logits.topk(2).values
    assert found.top2_gap == pytest.approx((best[0] - best[1]).item(), abs=1e-4)


def test_a_prompt_too_long_for_the_target_is_refused(target: Target) -> None:
    long = prompt(*([5] * 500))
    with pytest.raises(ValueError, match=r"has 500 tokens; with max_new_tokens=10 and 3 drafts .* leave 499"):
        decode_prompts(target, RandomDrafter(3, 320), [long], DecodingConfig(max_new_tokens=10))


def test_known_plain_outputs_are_compared_with_and_not_decoded_again(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts, config = [prompt(50, 51), prompt(60)], DecodingConfig(max_new_tokens=3)
    plain = decode_plainly(target, prompts, config)
    drafter = RandomDrafter(2, target.spec.vocab_size)
    expected = decode_prompts(target, drafter, prompts, config)
    assert [outcome.plain.tokens for outcome in expected] == [generation.tokens for generation in plain]
    passes: list[int] = []
    extend = target.extend
    monkeypatch.setattr(target, "extend", lambda ids, *rest: passes.append(ids.shape[1]) or extend(ids, *rest))
    outcomes = decode_prompts(target, drafter, prompts, config, plain=plain)
    assert passes == [2, 1, 1, 2, 3, 3, 2, 3, 3, 1, 3, 3]  # only the warm-up, of three passes each, has a plain one
    assert [outcome.plain for outcome in outcomes] == plain
    wrong = [replace(generation, tokens=[1, 2, 3]) for generation in plain]
    outcomes = decode_prompts(target, drafter, prompts, config, plain=wrong)
    assert [outcome.divergence is None for outcome in outcomes] == [False, False]
