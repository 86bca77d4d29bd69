"""Draws outputs of grammars at random, with a vocabulary of single bytes."""

from __future__ import annotations

import functools
import random

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from jaxserve.api_types import MAX_LEXER_STATES
from jaxserve.text.grammars.vocabulary import load_vocabulary
from tests.server.tiny import END_ID, tiny_tokenizer

# Bytes that end a text, a list, an object or a number.
ENDINGS = '"]},:'


@functools.cache
def vocabulary() -> LLTokenizer:
    return load_vocabulary(tiny_tokenizer())


def matcher_of(grammar: str) -> LLMatcher:
    limits = LLParserLimits(max_lexer_states=MAX_LEXER_STATES, verbose_errors=False)
    matcher = LLMatcher(vocabulary(), grammar, log_level=0, limits=limits)
    assert not matcher.is_error(), matcher.get_error()
    return matcher


def drawn(
    grammar: str, rng: random.Random, *, most: int = 400, endings: float = 0.4, often: str = ENDINGS
) -> str | None:
    """Return an output, or None if it would have more than `most` bytes. Fails where it can neither go on nor end.

    It ends, or goes on with one of the characters `often`, with the probability `endings` at each place.
    """
    matcher, found = matcher_of(grammar), bytearray()
    while not matcher.is_stopped():
        mask = matcher.compute_bitmask()
        allowed = [token for token in range(len(mask) * 8) if mask[token // 8] >> token % 8 & 1]
        assert not matcher.is_error(), (matcher.get_error()[:300], bytes(found))
        if END_ID in allowed:
            assert matcher.is_accepting(), (bytes(found), "is not the whole of an output, but can't go on")
            if len(allowed) == 1 or rng.random() < endings:
                break
            allowed.remove(END_ID)
        assert allowed, bytes(found)
        if len(found) == most:
            return None
        ending = [token for token in allowed if token in often.encode()]
        found.append(rng.choice(ending if ending and rng.random() < endings else allowed))
        assert matcher.consume_token(found[-1])
    return found.decode()


def accepts(grammar: str, text: str) -> bool:
    """Return whether a text, and nothing after it, is an output."""
    matcher, data = matcher_of(grammar), text.encode()
    return matcher.try_consume_tokens([*data, END_ID]) > len(data) or (
        matcher.reset() and matcher.try_consume_tokens(list(data)) == len(data) and matcher.is_accepting()
    )
