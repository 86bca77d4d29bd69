"""What llguidance says of regular expressions: the characters of a class with a name, and whether anything matches."""

from __future__ import annotations

import functools

from jaxserve.text.grammars import character_sets as sets
from jaxserve.text.grammars.character_sets import Ranges

# For terminals that are tried while a request waits; llguidance's own limits are a hundred times as high.
_FUEL = 20_000
# Beginnings of characters that are looked at to find a class.
_MAX_VISITS = 4000
# The bytes of a character that begins with one of a high nibble.
_NUM_BYTES = {0xC: 2, 0xD: 2, 0xE: 3, 0xF: 4}


@functools.lru_cache(512)
def named_class(text: str) -> Ranges:
    """Return the characters that match a class like `\\w` or `\\p{Greek}`. Raises `ValueError` if there is no such."""
    from llguidance import LLMatcher, LLTokenizer

    vocabulary = LLTokenizer("byte")
    matcher = LLMatcher(vocabulary, LLMatcher.grammar_from_regex(text), log_level=0)
    if matcher.is_error():
        raise ValueError(f"`{text}` is not supported")
    found: list[tuple[int, int]] = []
    num_visits = 0

    def visit(before: bytes, num_left: int) -> None:
        nonlocal num_visits
        num_visits += 1
        if num_visits > _MAX_VISITS:
            raise ValueError(f"`{text}` has too many characters")
        mask = matcher.compute_bitmask()
        for byte in (byte for byte in range(256) if mask[byte // 8] >> byte % 8 & 1):
            left = num_left - 1 if before else _NUM_BYTES.get(byte >> 4, 1) - 1
            if not left:
                code = ord((before + bytes((byte,))).decode())
                found.append((code, code))
                continue
            matcher.consume_token(byte)
            visit(before + bytes((byte,)), left)
            matcher.rollback(1)

    visit(b"", 0)
    return sets.union(found)


@functools.lru_cache(512)
def matches_nothing(terminal: str) -> bool:
    """Return whether no text matches a terminal of Lark. Raises `ValueError` if that takes too long to find out."""
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

    vocabulary = LLTokenizer("byte")
    limits = LLParserLimits(initial_lexer_fuel=_FUEL, step_lexer_fuel=_FUEL, verbose_errors=False)
    grammar = LLMatcher.grammar_from_lark(f"start: T\nT: {terminal}\n")
    matcher = LLMatcher(vocabulary, grammar, log_level=0, limits=limits)
    if matcher.is_accepting():
        return False
    error = matcher.get_error()
    if not error and any(matcher.compute_bitmask()[:32]):
        return False
    if "NoExtension" not in matcher.get_error():
        raise ValueError("a terminal with `&` or `~` is too complex")
    return True
