"""The bytes of tokens, as llguidance gets them: with every kind of tokenizer, what a choice allows is its text."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from llguidance import LLMatcher

from jaxserve.api_types import StructuredOutputs
from jaxserve.text.grammars.formats import grammar_of
from jaxserve.text.grammars.vocabulary import load_vocabulary, tokens_of
from jaxserve.text.tokenizers.tokenizer import Tokenizer
from tests.text import small_tokenizers

KINDS = [small_tokenizers.byte_level, small_tokenizers.sentencepiece]
TEXTS = ["Hello world, it's 2024!", " Привет", "日本é!", "你好，世界", "👍🏽 x", "def f(x):\n\treturn  x**2\r\n"]


@pytest.mark.parametrize("make", KINDS)
@pytest.mark.parametrize("text", TEXTS)
def test_any_tokens_that_a_choice_allows_are_its_text(make: Callable[[], Tokenizer], text: str) -> None:
    """Tokens are drawn at random; whichever are allowed, their bytes are those of the text."""
    tokenizer, rng = make(), random.Random(0)
    vocabulary, tokens = load_vocabulary(tokenizer), tokens_of(tokenizer).tokens
    grammar = grammar_of(StructuredOutputs(choice=(text, text + "a", text + "b")))
    for _ in range(20):
        matcher, drawn = LLMatcher(vocabulary, grammar, log_level=0), []
        while not matcher.is_stopped():
            mask = matcher.compute_bitmask()
            assert not matcher.is_error(), matcher.get_error()
            drawn.append(rng.choice([i for i in range(len(tokens)) if mask[i // 8] >> i % 8 & 1]))
            matcher.consume_token(drawn[-1])
        ids = [token for token in drawn if token not in tokenizer.eos_ids]
        found = b"".join(tokens[token] for token in ids).decode()
        assert found in (text, text + "a", text + "b")
        assert tokenizer.decode(ids).strip() == found.strip()
