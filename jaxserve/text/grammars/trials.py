"""Tries grammars in a child: compiles them, and draws outputs, which must never reach a place where no token may follow
and the output may not end."""

from __future__ import annotations

import random
from collections.abc import Collection

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from jaxserve.api_types import MAX_LEXER_STATES
from jaxserve.text.grammars.json_grammar import CHECKED_TERMINAL
from jaxserve.text.grammars.lark import parts_of
from jaxserve.text.grammars.vocabulary import Tokens, make_vocabulary

_MAX_ERROR = 500
# Outputs drawn from a grammar, and tokens of each.
_NUM_DRAWN = 4
_MAX_DRAWN = 40
# Tokens that begin so often end a text, a list or an object.
_ENDINGS = (b'"', b"]", b"}", b",", b":")


class GrammarTester:
    """Tries grammars for one vocabulary."""

    def __init__(self, tokens: Tokens) -> None:
        self._tokens = tokens
        self._vocabulary: LLTokenizer = make_vocabulary(tokens, lambda text: self._vocabulary.greedy_tokenize(text))
        self._bytes = LLTokenizer("byte")
        self._ending = [index for index, token in enumerate(tokens.tokens) if token[:1] in _ENDINGS]
        self._eos = frozenset(tokens.eos_ids)

    def problem(self, grammar: str) -> str:
        """Return why a grammar can't be used, or nothing."""
        matcher = self._matcher(self._vocabulary, grammar)
        if matcher.is_error():
            return _shortened(matcher.get_error())
        for part in parts_of(grammar):
            for name, terminal, place in CHECKED_TERMINAL.findall(part):
                lark = LLMatcher.grammar_from_lark(f"start: {name}\n{name}: {terminal}\n")
                if _is_dead(self._matcher(self._bytes, lark), {self._bytes.eos_token}):
                    return f"{place}: no text matches"
        if _is_dead(matcher, self._eos):
            return "no token of the vocabulary begins a match"
        rng = random.Random(0)
        for _ in range(_NUM_DRAWN):
            matcher.reset()
            if problem := self._draw(matcher, rng):
                return problem
        return ""

    @staticmethod
    def _matcher(vocabulary: LLTokenizer, grammar: str) -> LLMatcher:
        limits = LLParserLimits(max_lexer_states=MAX_LEXER_STATES, verbose_errors=False)
        return LLMatcher(vocabulary, grammar, log_level=0, limits=limits)

    def _draw(self, matcher: LLMatcher, rng: random.Random) -> str:
        """Draw an output, or the beginning of one; return what is wrong with the grammar at its end."""
        drawn = b""
        for _ in range(_MAX_DRAWN):
            if matcher.is_stopped():
                return ""
            if _is_dead(matcher, self._eos):
                end = drawn[-40:].decode(errors="replace")
                return f"it leads to where no token of the vocabulary may follow, after {end!r}"
            token = self._choose(matcher.compute_bitmask(), rng)
            if token is None:
                return ""
            drawn += self._tokens.tokens[token]
            matcher.consume_token(token)
        return ""

    def _choose(self, mask: bytes, rng: random.Random) -> int | None:
        """Return a token that a mask allows and that doesn't end the output: often one that ends a text or a list."""

        def is_allowed(token: int) -> bool:
            return token // 8 < len(mask) and mask[token // 8] >> token % 8 & 1 == 1 and token not in self._eos

        ending = [token for token in self._ending if is_allowed(token)] if rng.random() < 0.5 else []
        if ending:
            return rng.choice(ending)
        for _ in range(16):
            token = rng.randrange(len(self._tokens.tokens))
            if is_allowed(token):
                return token
        found = [at * 8 + bit for at, byte in enumerate(mask) if byte for bit in range(8) if byte >> bit & 1]
        found = [token for token in found if token not in self._eos]
        return rng.choice(found) if found else None


def _is_dead(matcher: LLMatcher, eos: Collection[int]) -> bool:
    """Return whether an output neither goes on nor ends: llguidance allows to end it where nothing else is possible."""
    if matcher.is_stopped() or matcher.is_accepting():
        return False
    mask = bytearray(matcher.compute_bitmask())
    for token in eos:
        if token // 8 < len(mask):
            mask[token // 8] &= ~(1 << token % 8)
    return not any(mask)


def _shortened(error: str) -> str:
    """Return what is wrong, without the grammar that llguidance may add."""
    return error.strip().split("\n\n", 1)[0][:_MAX_ERROR]
