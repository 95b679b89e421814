"""A tiny random target and its tokenizer, built in memory or in a temp folder: no test downloads anything."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers, trainers
from tokenizers.models import BPE
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from draftsmith.models import readout, vocabulary_pass

SPECIAL = ["<|bos|>", "<|pad|>", "<|user|>", "<|asst|>", "<|end|>", "<think>", "</think>", "<|mask|>"]

CORPUS = [
    "What is the capital of France? The capital of France is Paris.",
    "Write a function that adds two numbers. def add(a, b): return a + b",
    "Tell me a story about a fox. Once upon a time a quick brown fox jumped over the lazy dog.",
    "How many apples are left? There were 12 apples, 5 were eaten, so 7 are left.",
] * 4

_OPEN = "{% for m in messages %}"
_OTHERS = (
    "{% if m['role'] == 'system' %}{{ m['content'] }}<|end|>"
    "{% elif m['role'] == 'user' %}<|user|>{{ m['content'] }}<|end|>{% endif %}"
)
_PROMPT = "{% if add_generation_prompt %}<|asst|>{% endif %}"

CHAT_TEMPLATES = {
    # append-only, with generation tags
    "C1": _OPEN
    + _OTHERS
    + "{% if m['role'] == 'assistant' %}<|asst|>{% generation %}{{ m['content'] }}<|end|>{% endgeneration %}{% endif %}"
    + "{% endfor %}"
    + _PROMPT,
    # the same without tags
    "C2": _OPEN
    + _OTHERS
    + "{% if m['role'] == 'assistant' %}<|asst|>{{ m['content'] }}<|end|>{% endif %}{% endfor %}"
    + _PROMPT,
    # drops the reasoning of all assistant turns but the last
    "C3": _OPEN
    + _OTHERS
    + "{% if m['role'] == 'assistant' %}<|asst|>{% if loop.last %}{{ m['content'] }}"
    + "{% else %}{{ m['content'].split('</think>')[-1] }}{% endif %}<|end|>{% endif %}{% endfor %}"
    + _PROMPT,
    # prints BOS itself
    "C4": "<|bos|>"
    + _OPEN
    + _OTHERS
    + "{% if m['role'] == 'assistant' %}<|asst|>{{ m['content'] }}<|end|>{% endif %}{% endfor %}"
    + _PROMPT,
    # puts an empty think pair in front of each answer
    "C5": _OPEN
    + _OTHERS
    + "{% if m['role'] == 'assistant' %}<|asst|><think></think>{{ m['content'] }}<|end|>{% endif %}{% endfor %}"
    + "{% if add_generation_prompt %}<|asst|><think></think>{% endif %}",
    # opens <think> in the generation prompt
    "C6": _OPEN
    + _OTHERS
    + "{% if m['role'] == 'assistant' %}<|asst|>{{ m['content'] }}<|end|>{% endif %}{% endfor %}"
    + "{% if add_generation_prompt %}<|asst|><think>{% endif %}",
}


def make_tokenizer(template: str = "C2", *, pad: str | None = "<|pad|>", bos: str | None = None) -> Any:
    """Byte-level BPE with about 300 tokens; pad None: no pad token; bos: prepended by a post-processor."""
    raw = Tokenizer(BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    raw.train_from_iterator(CORPUS, trainer)
    if bos is not None:
        from tokenizers.processors import TemplateProcessing

        raw.post_processor = TemplateProcessing(single=f"{bos} $A", special_tokens=[(bos, raw.token_to_id(bos))])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw,
        eos_token="<|end|>",
        pad_token=pad,
        bos_token=bos,
        additional_special_tokens=["<|user|>", "<|asst|>", "<|mask|>"],
    )
    tokenizer.chat_template = CHAT_TEMPLATES[template]
    return tokenizer


def make_target(path: Path, *, seed: int = 0, template: str = "C2", **overrides: Any) -> Path:
    """Writes a tiny random Llama and its tokenizer to a folder."""
    tokenizer = make_tokenizer(template)
    settings: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 512,
        "initializer_range": 0.3,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(**{**settings, **overrides})).eval()
    for name, weight in model.named_parameters():
        if name.endswith("norm.weight"):
            with torch.no_grad():
                # Not 1 and not constant: a norm that is forgotten or applied twice changes the argmax.
                weight.uniform_(0.5, 1.5)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def chat_templates() -> dict[str, str]:
    return CHAT_TEMPLATES


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    return make_tokenizer()


@pytest.fixture(scope="session")
def new_tokenizer() -> Callable[..., Any]:
    return make_tokenizer


@pytest.fixture(scope="session")
def new_target() -> Callable[..., Path]:
    return make_target


@pytest.fixture(scope="session")
def target_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_target(tmp_path_factory.mktemp("target"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked gpu are skipped, with the reason shown, where there is no CUDA device."""
    if torch.cuda.is_available():
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture
def vocabulary_rows(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How many rows met the vocabulary so far: `logits` in its products, `gradients` in those that go back."""
    rows: Counter[str] = Counter()

    def count(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def counted(matrix: torch.Tensor, *arguments: Any) -> Any:
            rows[name] += len(matrix)
            return function(matrix, *arguments)

        return counted

    monkeypatch.setattr(readout, "project", count("logits", readout.project))
    monkeypatch.setattr(vocabulary_pass, "pull_back", count("gradients", vocabulary_pass.pull_back))
    return rows
