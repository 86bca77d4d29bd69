"""Sets of characters as sorted ranges of code points: the named ones of regular expressions, and the operations.

Surrogates are in no set: texts are made of whole characters.
"""

from __future__ import annotations

import functools
import itertools
import unicodedata
from collections.abc import Iterable, Iterator

type Ranges = tuple[tuple[int, int], ...]

_LAST = 0x10FFFF
EVERY: Ranges = ((0, 0xD7FF), (0xE000, _LAST))


def union(*sets: Iterable[tuple[int, int]]) -> Ranges:
    """Return the characters that are in any of the sets."""
    found: list[tuple[int, int]] = []
    for low, high in sorted(itertools.chain(*sets)):
        if found and low <= found[-1][1] + 1:
            found[-1] = (found[-1][0], max(found[-1][1], high))
        else:
            found.append((low, high))
    return tuple(found)


def intersection(one: Ranges, other: Ranges) -> Ranges:
    """Return the characters that are in both sets."""
    return complement(union(complement(one), complement(other)))


def complement(ranges: Ranges) -> Ranges:
    """Return all other characters."""
    found, start = [], 0
    for low, high in union(ranges, ((0xD800, 0xDFFF),)):
        if start < low:
            found.append((start, low - 1))
        start = high + 1
    return (*found, (start, _LAST)) if start <= _LAST else tuple(found)


def characters(text: str) -> Ranges:
    """Return the set of the characters of a text."""
    return union((ord(one), ord(one)) for one in text)


def contains(ranges: Ranges, character: str) -> bool:
    """Return whether a character is in the set."""
    return any(low <= ord(character) <= high for low, high in ranges)


def members(ranges: Ranges) -> Iterator[str]:
    """Yield the characters of a set."""
    return (chr(code) for low, high in ranges for code in range(low, high + 1))


def ignore_case(ranges: Ranges) -> Ranges:
    """Return the set with the other case of its ASCII letters."""
    lower = intersection(ranges, ((0x61, 0x7A),))
    upper = intersection(ranges, ((0x41, 0x5A),))
    return union(ranges, ((low - 32, high - 32) for low, high in lower), ((low + 32, high + 32) for low, high in upper))


def ignore_any_case(ranges: Ranges) -> Ranges:
    """Return the set with all other cases of its letters, as Unicode folds single characters."""
    orbits = _orbits()
    cased = intersection(ranges, characters("".join(orbits)))
    return union(ranges, *(characters(orbits[one]) for one in members(cased)))


@functools.cache
def _orbits() -> dict[str, str]:
    """Return the letters that have another case, each with all letters that differ from it in case only."""
    grouped: dict[str, str] = {}
    for one in members(((0, 0xD7FF), (0xE000, 0x1FFFF))):  # letters with cases are among these
        grouped[one.casefold()] = grouped.get(one.casefold(), "") + one
    return {one: group for group in grouped.values() if len(group) > 1 for one in group}


DIGITS = characters("0123456789")
WORDS = union(DIGITS, ((0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A)))
# The blanks that both JavaScript and Python know.
BLANKS = union(characters("\t\n\v\f\r \xa0\u1680\u2028\u2029\u202f\u205f\u3000"), ((0x2000, 0x200A),))
WIDE_BLANKS = union(BLANKS, characters("\x1c\x1d\x1e\x1f\x85\ufeff"))
LINE_ENDS = characters("\n\r\u2028\u2029")


@functools.cache
def category(name: str) -> Ranges:
    """Return the characters of a general category of Unicode, "L" or "Lu"; none if there is no such category."""
    return union((low, high) for found, low, high in _categories() if found.startswith(name))


def unicode_words() -> Ranges:
    """Return the letters and numbers of all scripts and `_`, as Python's `\\w` has them."""
    return union(category("L"), category("N"), characters("_"))


@functools.cache
def _categories() -> tuple[tuple[str, int, int], ...]:
    """Return runs of characters of one category: its name, the first and the last."""
    found, start = [], 0
    for name, run in itertools.groupby(map(unicodedata.category, map(chr, range(_LAST + 1)))):
        end = start + len(list(run))
        found.append((name, start, end - 1))
        start = end
    return tuple(one for one in found if one[0] != "Cs")
