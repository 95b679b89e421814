"""Rendering: which tokens are supervised, by decoding the mask; one BOS; one document for each stretch of history."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from draftsmith.data.batch import Document
from draftsmith.data.packing import collate
from draftsmith.data.rendering import BEYOND, CUT, RETOKENISED, REWRITTEN, Renderer, RenderError, render_prompt
from draftsmith.models.grid import build_grid, legal_anchors

AWKWARD = ["→", "👨‍👩‍👧‍👦", "สวัสดีครับ", "e\u0301 cafe\u0301", "\n", "a → b\n\n👨‍👩‍👧 ไทย e\u0301\n"]


def chat(*turns: str) -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(turns)]


def spans(document: Document, tokenizer: Any) -> list[str]:
    """The text of each run of supervised tokens: what the oracle decodes."""
    runs: list[list[int]] = [[]]
    for token, supervised in zip(document.tokens.tolist(), document.supervised.tolist(), strict=True):
        if supervised:
            runs[-1].append(token)
        elif runs[-1]:
            runs.append([])
    return [tokenizer.decode(run) for run in runs if run]


def render(tokenizer: Any, messages: list[dict[str, str]], **options: Any) -> tuple[list[Document], list[str]]:
    return Renderer(tokenizer, **{"max_length": 512, **options}).documents(messages, domain="chat")


class ZeroWidthOffsets:
    """A tokenizer whose character offsets all have zero width, as some report."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def __call__(self, text: str, **options: Any) -> dict[str, Any]:
        ids = self.inner(text, **options)["input_ids"]
        return {"input_ids": ids, "offset_mapping": [(0, 0)] * len(ids), "attention_mask": [1] * len(ids)}


@pytest.mark.parametrize("template", ["C1", "C2", "C4", "C5"])
@pytest.mark.parametrize("answer", AWKWARD)
def test_the_supervised_tokens_decode_to_each_answer_and_its_end_of_turn(
    template: str, answer: str, new_tokenizer: Callable[..., Any]
) -> None:
    tokenizer = new_tokenizer(template)
    messages = [{"role": "system", "content": "Be kind."}, *chat("Hi → 👨‍👩‍👧", answer, "more", "The end.")]
    (document,), notes = render(tokenizer, messages)
    assert spans(document, tokenizer) == [f"{answer}<|end|>", "The end.<|end|>"]
    assert tokenizer.decode(document.tokens) == tokenizer.apply_chat_template(messages, tokenize=False)
    assert notes == []


@pytest.mark.parametrize("answer", AWKWARD)
def test_character_offsets_are_never_needed(answer: str, tokenizer: Any) -> None:
    (straight,), _ = render(tokenizer, chat("Hi", answer))
    (blind,), _ = render(ZeroWidthOffsets(tokenizer), chat("Hi", answer))
    assert straight.id == blind.id
    assert torch.equal(straight.supervised, blind.supervised)


def test_an_empty_think_pair_that_the_generation_prompt_supplies_is_not_supervised(
    new_tokenizer: Callable[..., Any],
) -> None:
    tokenizer = new_tokenizer("C5")
    (document,), _ = render(tokenizer, chat("Why?", "Because."))
    assert spans(document, tokenizer) == ["Because.<|end|>"]
    before = document.tokens[~document.supervised].tolist()
    assert before[-2:] == tokenizer.convert_tokens_to_ids(["<think>", "</think>"])


def test_an_opened_think_tag_is_the_prompts_and_the_reasoning_is_the_answers(new_tokenizer: Callable[..., Any]) -> None:
    tokenizer = new_tokenizer("C6")
    (document,), _ = render(tokenizer, chat("Why?", "<think>hm</think>Because."))
    assert spans(document, tokenizer) == ["hm</think>Because.<|end|>"]
    with pytest.raises(RenderError, match="does not begin with the generation prompt"):
        render(tokenizer, chat("Why?", "Because."))


def test_one_turn_that_cannot_follow_its_prompt_does_not_cost_the_others(new_tokenizer: Callable[..., Any]) -> None:
    tokenizer = new_tokenizer("C6")
    (document,), notes = render(tokenizer, chat("a", "No thought.", "b", "<think>t</think>B"))
    assert spans(document, tokenizer) == ["t</think>B<|end|>"]
    assert len(notes) == 1
    assert "does not begin with the generation prompt" in notes[0]


def test_a_template_that_rewrites_history_gives_one_document_for_each_turn(new_tokenizer: Callable[..., Any]) -> None:
    tokenizer = new_tokenizer("C3")
    messages = chat("a", "<think>one</think>A", "b", "<think>two</think>B")
    documents, notes = render(tokenizer, messages)
    assert [tokenizer.decode(d.tokens) for d in documents] == [
        "<|user|>a<|end|><|asst|><think>one</think>A<|end|>",
        "<|user|>a<|end|><|asst|>A<|end|><|user|>b<|end|><|asst|><think>two</think>B<|end|>",
    ]
    assert [spans(d, tokenizer) for d in documents] == [
        ["<think>one</think>A<|end|>"],
        ["<think>two</think>B<|end|>"],
    ]
    assert notes == [REWRITTEN]
    assert len({d.id.split("-")[0] for d in documents}) == 1
    for i, document in enumerate(documents):
        prompt = render_prompt(messages[: 2 * i + 1], tokenizer)
        assert document.tokens[: len(prompt)].tolist() == prompt.tolist()
        assert document.supervised.nonzero()[0].item() == len(prompt)


def test_turns_to_which_the_template_only_appends_stay_together(new_tokenizer: Callable[..., Any]) -> None:
    tokenizer = new_tokenizer("C3")
    documents, _ = render(tokenizer, chat("a", "A", "b", "<think>two</think>B", "c", "C"))
    assert [spans(d, tokenizer) for d in documents] == [["A<|end|>", "<think>two</think>B<|end|>"], ["C<|end|>"]]


@pytest.mark.parametrize(("turns", "expected"), [("first", ["A<|end|>"]), ("last", ["B<|end|>"])])
def test_first_or_last_turn_only(turns: str, expected: list[str], tokenizer: Any) -> None:
    (document,), _ = render(tokenizer, chat("a", "A", "b", "B"), turns=turns)
    assert spans(document, tokenizer) == expected
    assert ("b" in tokenizer.decode(document.tokens)) == (turns == "last")


@pytest.mark.parametrize("adds_bos", [None, "<|bos|>"])
def test_exactly_one_bos_in_training_and_in_evaluation(adds_bos: str | None, new_tokenizer: Callable[..., Any]) -> None:
    tokenizer = new_tokenizer("C4", bos=adds_bos)
    bos, end = tokenizer.convert_tokens_to_ids(["<|bos|>", "<|end|>"])
    (document,), _ = render(tokenizer, chat("a", "A", "b", "B"))
    prompt = render_prompt(chat("a"), tokenizer)
    assert document.tokens.tolist().count(bos) == 1
    assert document.tokens[0] == bos
    assert document.tokens.tolist().count(end) == 4
    assert prompt.tolist().count(bos) == 1
    assert document.tokens[: len(prompt)].tolist() == prompt.tolist()
    assert not document.supervised[: len(prompt)].any()
    assert document.supervised[len(prompt)]


@pytest.mark.parametrize("pad", [None, "<|end|>"])
def test_end_tokens_stay_supervised_when_the_pad_token_is_the_end_token_or_missing(
    pad: str | None, new_tokenizer: Callable[..., Any]
) -> None:
    tokenizer = new_tokenizer("C2", pad=pad)
    (long,), _ = render(tokenizer, chat("a", "b", "c", "d"))
    (short,), _ = render(tokenizer, chat("a", "b"))
    batch = collate([[short], [long]], row_tokens=len(long))
    end = tokenizer.convert_tokens_to_ids("<|end|>")
    assert batch.supervised[1, long.tokens == end].tolist() == [False, True, False, True]
    assert batch.supervised[0, : len(short)].tolist() == short.supervised.tolist()
    assert (batch.document_ids == -1).sum().item() == len(long) - len(short)
    assert not batch.supervised[batch.document_ids == -1].any()


def test_a_newline_after_the_end_of_turn_is_not_supervised(new_tokenizer: Callable[..., Any]) -> None:
    tokenizer = new_tokenizer("C2")
    tokenizer.chat_template = (
        "{% for m in messages %}<|{{ 'user' if m.role == 'user' else 'asst' }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|asst|>\n{% endif %}"
    )
    (document,), notes = render(tokenizer, chat("a", "A", "b", "B"))
    assert spans(document, tokenizer) == ["A<|end|>", "B<|end|>"]
    assert tokenizer.decode(document.tokens[-1:]) == "\n"
    assert not document.supervised[-1]
    assert notes == []


def test_what_a_template_prints_only_after_the_last_turn_rewrites_nothing(new_tokenizer: Callable[..., Any]) -> None:
    tokenizer = new_tokenizer("C2")
    tokenizer.chat_template = (
        "{% for m in messages %}<|{{ 'user' if m.role == 'user' else 'asst' }}|>{{ m.content }} <|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|asst|>{% else %}<|bos|>{% endif %}"
    )
    (document,), notes = render(tokenizer, chat("a", "A", "b", "B"))
    assert spans(document, tokenizer) == ["A <|end|>", "B <|end|>"]
    assert document.tokens[-1] == tokenizer.convert_tokens_to_ids("<|bos|>")
    assert notes == []


def test_an_answer_that_merges_with_the_prompt_is_tokenised_as_a_server_sees_it(
    new_tokenizer: Callable[..., Any],
) -> None:
    tokenizer = new_tokenizer("C2")
    tokenizer.chat_template = (
        "{% for m in messages %}<|{{ 'user' if m.role == 'user' else 'asst' }}|>T{{ m.content }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|asst|>T{% endif %}"
    )
    whole = tokenizer("<|asst|>The", add_special_tokens=False)["input_ids"]
    prompt = tokenizer("<|asst|>T", add_special_tokens=False)["input_ids"]
    assert whole[: len(prompt)] != prompt, "the trigger: The merges across the boundary"

    documents, notes = render(tokenizer, chat("a", "he fox", "b", "B"))
    assert [spans(d, tokenizer) for d in documents] == [["he fox<|end|>"], ["B<|end|>"]]
    assert notes == [RETOKENISED, REWRITTEN]
    first = render_prompt(chat("a"), tokenizer)
    assert documents[0].tokens[: len(first)].tolist() == first.tolist()
    second = render_prompt(chat("a", "he fox", "b"), tokenizer)
    assert documents[1].tokens[: len(second)].tolist() == second.tolist()


def test_an_end_of_turn_token_inside_an_answer_is_refused(tokenizer: Any) -> None:
    with pytest.raises(RenderError, match="contains the end-of-turn token"):
        render(tokenizer, chat("a", "one<|end|>two"))


def test_a_cut_document_keeps_the_supervision_it_has(tokenizer: Any) -> None:
    messages = chat("How many apples?", "There were 12 apples, 5 were eaten.", "And now?", "7.")
    (whole,), _ = render(tokenizer, messages)
    first = int(whole.supervised.nonzero()[0])
    (cut,), notes = render(tokenizer, messages, max_length=first + 4)
    assert torch.equal(cut.tokens, whole.tokens[: first + 4])
    assert cut.supervised.tolist() == [False] * first + [True] * 4
    assert notes == [BEYOND, CUT]
    with pytest.raises(RenderError, match=f"the prompt fills max_length={first}"):
        render(tokenizer, messages, max_length=first)


def test_legal_anchors_and_labels_follow_the_supervised_tokens() -> None:
    # Eight tokens, answer at 4, 5, 6: the anchors are 4 and 5 and their first labels 5 and 6; nothing else trains.
    supervised = torch.tensor([0, 0, 0, 0, 1, 1, 1, 0], dtype=torch.bool)
    document = Document(tokens=torch.arange(8), supervised=supervised, domain="chat", id=f"{'0' * 32}-{'1' * 32}")
    batch = collate([[document]], row_tokens=8)
    anchors = legal_anchors(batch)[0].nonzero().squeeze(1)
    assert anchors.tolist() == [4, 5]
    grid = build_grid(batch, [anchors], num_steps=3)
    assert grid.valid[0].tolist() == [[True, True, False], [True, False, False]]
    assert grid.label_index[0].tolist() == [[5, 6, 0], [6, 0, 0]]


def test_the_thinking_mode_reaches_the_template_or_is_refused(new_tokenizer: Callable[..., Any]) -> None:
    tokenizer = new_tokenizer("C2")
    with pytest.raises(ValueError, match=r"thinking=False changes nothing .* set data.thinking=null"):
        Renderer(tokenizer, max_length=64, thinking=False)
    tokenizer.chat_template = tokenizer.chat_template.replace(
        "{% if add_generation_prompt %}<|asst|>",
        "{% if add_generation_prompt %}<|asst|>{% if enable_thinking is false %}<think></think>{% endif %}",
    ).replace(
        "<|asst|>{{ m['content'] }}",
        "<|asst|>{% if enable_thinking is false %}<think></think>{% endif %}{{ m['content'] }}",
    )
    (document,), _ = render(tokenizer, chat("a", "A"), thinking=False)
    assert tokenizer.decode(document.tokens) == "<|user|>a<|end|><|asst|><think></think>A<|end|>"
    assert spans(document, tokenizer) == ["A<|end|>"]
    assert tokenizer.decode(render_prompt(chat("a"), tokenizer, thinking=False)).endswith("<|asst|><think></think>")
    assert tokenizer.decode(render_prompt(chat("a"), tokenizer)).endswith("<|asst|>")


def test_templates_that_cannot_be_used_say_so(new_tokenizer: Callable[..., Any]) -> None:
    tokenizer = new_tokenizer("C2")
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    with pytest.raises(ValueError, match="prints no special token after an answer"):
        Renderer(tokenizer, max_length=64)
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match=r"no chat template; set target.chat_template"):
        render_prompt(chat("a"), tokenizer)
    tokenizer = new_tokenizer("C2")
    tokenizer.chat_template = (
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
        + tokenizer.chat_template
    )
    with pytest.raises(RenderError, match="the chat template refuses it: no system role"):
        render(tokenizer, [{"role": "system", "content": "s"}, *chat("a", "A")])
