"""From messages to a document: the target's chat template, and which tokens the assistant wrote.

What is supervised is found by rendering alone. The conversation up to an answer is rendered twice: with the generation
prompt in place of the answer, which is what a server gives to the model, and with the answer. What the second has
beyond the first, up to and including the end-of-turn token, is what the model would generate; a newline that a template
prints after that token is not generated and not supervised.

A template that only ever appends gives one document for a whole conversation. One that rewrites history (drops earlier
reasoning, say) makes a later prompt differ from what was generated before it; there a new document begins, so that each
document is exactly what a server would have in front of it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jinja2
import torch
from torch import Tensor

from draftsmith.data.batch import Document

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = dict[str, str]

TURNS = ("first", "last", "all")

REWRITTEN = "a later prompt differs from what was generated before it (history is rewritten): a new document begins"
RETOKENISED = "an answer's first characters merge with the prompt's last: the answer is tokenised by itself"
CUT = "cut at data.max_length"
BEYOND = "later answers begin beyond data.max_length and are left out"


class RenderError(ValueError):
    """This conversation cannot be rendered or supervised; the message is the reason."""


def render_prompt(
    messages: Sequence[Message], tokenizer: PreTrainedTokenizerBase, *, thinking: bool | None = None
) -> Tensor:
    """The prompt that a server gives to the target, token for token the one that training documents begin with.

    Args:
        messages: a conversation that waits for an answer.
        thinking: passed to the chat template as `enable_thinking`; None: the template's own default.

    Returns:
        (seq,) int64.
    """
    text = _render(messages, tokenizer, thinking, generation_prompt=True)
    return torch.tensor(_encode(text, tokenizer), dtype=torch.int64)


def _render(
    messages: Sequence[Message], tokenizer: PreTrainedTokenizerBase, thinking: bool | None, *, generation_prompt: bool
) -> str:
    options: dict[str, Any] = {} if thinking is None else {"enable_thinking": thinking}
    if tokenizer.chat_template is None:
        raise ValueError(
            "the target's tokenizer has no chat template; set target.chat_template to a file that holds one"
        )
    try:
        return tokenizer.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=generation_prompt, **options
        )
    except jinja2.TemplateError as error:
        raise RenderError(f"the chat template refuses it: {error}") from error


def _encode(text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Token ids of rendered text. The template prints BOS where the model wants one: the tokenizer adds none."""
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def _decode(ids: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> str:
    return tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """The conversation up to one answer, as token ids.

    Attributes:
        ids: the whole rendering.
        start: the first generated token, which is also the length of the prompt.
        end: one past the end-of-turn token.
        retokenised: whether the tokenizer would merge the prompt's last characters with the answer's first, which a
            server never does: the answer is then tokenised by itself.
    """

    ids: list[int]
    start: int
    end: int
    retokenised: bool


class Renderer:
    """Renders conversations for one target."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, *, max_length: int, turns: str = "all", thinking: bool | None = None
    ) -> None:
        """Prepares a renderer.

        Args:
            max_length: tokens after which a document is cut.
            turns: which answers are supervised: `first` (the document ends there), `last` or `all`.
            thinking: passed to the chat template as `enable_thinking`; None: the template's own default.

        Raises:
            ValueError: the template prints no special token after an answer, or knows no thinking mode.
        """
        self.tokenizer, self.thinking = tokenizer, thinking
        self.max_length, self.turns = max_length, turns
        self.tail = self._end_of_turn()
        if thinking is not None and self._ignores_thinking():
            raise ValueError(
                f"thinking={thinking} changes nothing in this target's chat template; set data.thinking=null"
            )

    def _text(self, messages: Sequence[Message], *, generation_prompt: bool = False) -> str:
        return _render(messages, self.tokenizer, self.thinking, generation_prompt=generation_prompt)

    def _end_of_turn(self) -> list[int]:
        """What the template prints after any answer, from its first special token on."""
        question = {"role": "user", "content": "u"}
        x, y = (self._text([question, {"role": "assistant", "content": answer}]) for answer in "xy")
        common = next((n for n, (a, b) in enumerate(zip(reversed(x), reversed(y), strict=False)) if a != b), 0)
        after = _encode(x[len(x) - common :], self.tokenizer)
        special = {*self.tokenizer.added_tokens_decoder, *self.tokenizer.all_special_ids}
        for index, token in enumerate(after):
            if token in special:
                return after[index:]
        raise ValueError(
            "the chat template prints no special token after an answer, so no end of turn can be learnt; set"
            " target.chat_template to a file with a template that does"
        )

    def _ignores_thinking(self) -> bool:
        question, answer = {"role": "user", "content": "u"}, {"role": "assistant", "content": "x"}
        renderings = {
            mode: (
                _render([question], self.tokenizer, mode, generation_prompt=True),
                _render([question, answer], self.tokenizer, mode, generation_prompt=False),
            )
            for mode in (True, False)
        }
        return renderings[True] == renderings[False]

    def turn(self, messages: Sequence[Message]) -> Turn:
        """Renders a conversation that ends with an answer; of one whose prompt fills max_length, only the prompt.

        Raises:
            RenderError: what is supervised cannot be told exactly.
        """
        prompt = self._text(messages[:-1], generation_prompt=True)
        text = self._text(messages)
        if not text.startswith(prompt):
            raise RenderError(
                "the rendered answer does not begin with the generation prompt, as a server's would (set data.thinking,"
                " keep the reasoning in the data, or give another target.chat_template)"
            )
        prompt_ids = _encode(prompt, self.tokenizer)
        start = len(prompt_ids)
        if start >= self.max_length:
            return Turn(ids=prompt_ids, start=start, end=start, retokenised=False)
        ids = _encode(text, self.tokenizer)
        retokenised = ids[:start] != prompt_ids
        if retokenised:
            answer = _encode(text[len(prompt) :], self.tokenizer)
            if _decode(prompt_ids + answer, self.tokenizer) != _decode(ids, self.tokenizer):
                raise RenderError("the answer cannot be tokenised apart from its prompt")
            ids = prompt_ids + answer
        end = len(ids) - len(self.tail) + 1
        if end <= start or ids[end - 1 :] != self.tail:
            raise RenderError("the rendered answer does not end as the chat template ends other answers")
        if self.tail[0] in ids[start : end - 1]:
            raise RenderError("the answer's text contains the end-of-turn token")
        return Turn(ids=ids, start=start, end=end, retokenised=retokenised)

    def documents(self, messages: Sequence[Message], *, domain: str) -> tuple[list[Document], list[str]]:
        """Renders a conversation of one domain.

        Returns:
            Its documents, and notes on what was done to it that its owner should know.

        Raises:
            RenderError: no answer of it can be supervised.
        """
        notes: list[str] = []
        stretches = self._stretches(messages, notes)
        if not stretches:
            raise RenderError(notes[0])
        opening = next(message["content"] for message in messages if message["role"] == "user")
        documents = []
        for turn, spans in stretches:
            if len(turn.ids) > self.max_length:
                notes.append(CUT)
            documents.append(make_document(turn.ids[: self.max_length], spans, domain=domain, opening=opening))
        return documents, notes

    def _stretches(self, messages: Sequence[Message], notes: list[str]) -> list[tuple[Turn, list[tuple[int, int]]]]:
        """Longest runs of turns to which the template only appends: each run's last turn and its supervised spans."""
        answers = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        chosen = {"first": answers[:1], "last": answers[-1:], "all": answers}[self.turns]
        stretches: list[tuple[Turn, list[tuple[int, int]]]] = []
        for index in chosen:
            try:
                turn = self.turn(messages[: index + 1])
            except RenderError as error:
                notes.append(str(error))
                continue
            if turn.start >= self.max_length:
                notes.append(BEYOND if stretches else f"the prompt fills max_length={self.max_length} (raise it)")
                break
            if turn.retokenised:
                notes.append(RETOKENISED)
            spans = []
            if stretches:
                before, earlier = stretches[-1]
                if turn.start > before.end and turn.ids[: before.end] == before.ids[: before.end]:
                    stretches.pop()
                    spans = earlier
                else:
                    notes.append(REWRITTEN)
            stretches.append((turn, [*spans, (turn.start, turn.end)]))
        return stretches


def make_document(ids: Sequence[int], spans: Sequence[tuple[int, int]], *, domain: str, opening: str) -> Document:
    """A document of token ids, supervised on the half-open spans (cut where the ids end)."""
    tokens = torch.tensor(ids, dtype=torch.int64)
    supervised = torch.zeros(len(ids), dtype=torch.bool)
    for start, end in spans:
        supervised[start:end] = True
    content = hashlib.blake2b(tokens.numpy().tobytes() + supervised.numpy().tobytes(), digest_size=16).hexdigest()
    return Document(tokens=tokens, supervised=supervised, domain=domain, id=f"{opening_hash(opening)}-{content}")


def opening_hash(opening: str) -> str:
    """Hash of a conversation's first user message: conversations that share it are held out together."""
    return hashlib.blake2b(opening.strip().encode(), digest_size=16).hexdigest()
