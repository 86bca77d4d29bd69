"""Finds regular expressions in a text that arrives character by character, in bounded time for every pattern.

The syntax is Python's, without features that a finite automaton lacks (back references, look-around) or that depend on
later text (word boundaries). A `^` at the start of a pattern matches the start of the text, a `$` at its end matches
the current end of the text, and the empty text is no match.

A pattern becomes a position automaton (Glushkov 1961): one position for each character class, and the positions that
may follow each. All possible starts of a match are followed at once, without backtracking: the cost of a character is
at most the number of the automaton's edges, which is limited.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Sequence
from re import _compiler, _constants, _parser  # type: ignore[attr-defined]
from typing import Any

from jaxserve.errors import InvalidRequestError

MAX_EDGES = 2000

_MATCHES_ONE = frozenset({"LITERAL", "NOT_LITERAL", "ANY", "IN"})
_REPEATS = frozenset({"MAX_REPEAT", "MIN_REPEAT"})


@dataclasses.dataclass(frozen=True)
class Automaton:
    """A position automaton. `tests[i]` returns a true value for a character that matches position i; `follow[i]` are
    the positions after it. A match begins in `first` (with `at_start`, only at the start of the text) and ends in
    `last`."""

    tests: tuple[Callable[[str], object], ...]
    first: tuple[int, ...]
    at_start: bool
    follow: tuple[tuple[int, ...], ...]
    last: frozenset[int]


@functools.lru_cache(256)
def compile_stop(pattern: str) -> Automaton:
    """Compile a pattern. Raises `InvalidRequestError` for one that is invalid, not supported or too large."""
    try:
        parsed = _parser.parse(pattern)
        builder = _Builder()
        nodes = list(parsed)
        at_start = _is_anchor(nodes[:1], "AT_BEGINNING", "AT_BEGINNING_STRING")
        at_end = _is_anchor(nodes[-1:], "AT_END", "AT_END_STRING")
        part = builder.sequence(nodes[at_start : len(nodes) - at_end], parsed.state.flags)
    except (re.error, OverflowError, RecursionError) as error:
        raise _pattern_error(pattern, f"is not a valid regular expression: {error}") from error
    except _UnsupportedError as error:
        raise _pattern_error(pattern, str(error)) from error
    follow = tuple(tuple(sorted(following)) for following in builder.follow)
    return Automaton(tuple(builder.tests), tuple(sorted(part.first)), at_start, follow, frozenset(part.last))


def _is_anchor(nodes: Sequence[Any], *names: str) -> bool:
    return any(str(kind) == "AT" and str(value) in names for kind, value in nodes)


def _pattern_error(pattern: str, why: str) -> InvalidRequestError:
    return InvalidRequestError(f"stop_regex {pattern[:100]!r} {why}", param="stop_regex")


def check_patterns(patterns: Sequence[str]) -> None:
    """Raise `InvalidRequestError` for an invalid or unsupported pattern, or if they are too large together."""
    if patterns:
        RegexMatcher(patterns)


class RegexMatcher:
    """Searches one text for several patterns. A match ends at the first character that completes it."""

    def __init__(self, patterns: Sequence[str]) -> None:
        self._patterns = [(pattern, compile_stop(pattern)) for pattern in dict.fromkeys(patterns)]
        edges = sum(len(automaton.first) + sum(map(len, automaton.follow)) for _, automaton in self._patterns)
        if edges > MAX_EDGES:
            raise _pattern_error(self._patterns[0][0], f"and the other patterns are too large together: {_LIMIT}")
        # For each pattern, its active positions, each with the earliest start of its match.
        self._active: list[dict[int, int]] = [{} for _ in self._patterns]
        self._length = 0

    @property
    def num_held(self) -> int:
        """The number of last characters that may still become part of a match."""
        begun = [start for active in self._active for start in active.values()]
        return self._length - min(begun) if begun else 0

    def advance(self, char: str) -> tuple[int, str] | None:
        """Add the next character. Return the longest match that it completes, as a length and a pattern, or None."""
        found: tuple[int, str] | None = None
        for index, (pattern, automaton) in enumerate(self._patterns):
            active: dict[int, int] = {}
            tests, follow = automaton.tests, automaton.follow
            # Earlier starts come first, so that each position keeps its earliest.
            for position, start in sorted(self._active[index].items(), key=lambda item: item[1]):
                for after in follow[position]:
                    if after not in active and tests[after](char):
                        active[after] = start
            for position in () if automaton.at_start and self._length else automaton.first:
                if position not in active and tests[position](char):
                    active[position] = self._length
            self._active[index] = active
            complete = [start for position, start in active.items() if position in automaton.last]
            if complete:
                length = self._length + 1 - min(complete)
                if found is None or length > found[0]:
                    found = length, pattern
        self._length += 1
        return found


class _UnsupportedError(Exception):
    pass


_LIMIT = f"at most {MAX_EDGES} steps between its characters, repetitions written out, are supported"


@dataclasses.dataclass
class _Fragment:
    """A part of a pattern: whether it matches the empty text, and the positions where a match begins and ends."""

    nullable: bool
    first: set[int]
    last: set[int]


class _Builder:
    def __init__(self) -> None:
        self.tests: list[Callable[[str], object]] = []
        self.follow: list[set[int]] = []
        self._num_edges = 0

    def sequence(self, nodes: Any, flags: int) -> _Fragment:
        whole = _Fragment(True, set(), set())
        for node in nodes:
            whole = self._concatenate(whole, self._fragment(node, flags))
        return whole

    def _fragment(self, node: Any, flags: int) -> _Fragment:
        kind, value = node
        name = str(kind)
        if name in _MATCHES_ONE:
            return self._position(node, flags)
        if name == "SUBPATTERN":
            _, added, removed, nodes = value
            return self.sequence(nodes, (flags | added) & ~removed)
        if name == "BRANCH":
            parts = [self.sequence(nodes, flags) for nodes in value[1]]
            return _Fragment(
                any(part.nullable for part in parts),
                set().union(*(part.first for part in parts)),
                set().union(*(part.last for part in parts)),
            )
        if name in _REPEATS:
            low, high, nodes = value
            return self._repeat(low, high, nodes, flags)
        raise _UnsupportedError(
            f"uses {name.lower().replace('_', ' ')}, which is not supported: a match must not depend on "
            "what comes before or after it"
        )

    def _position(self, node: Any, flags: int) -> _Fragment:
        state = _parser.State()
        state.flags, state.str = flags, ""
        position = len(self.tests)
        self.tests.append(_compiler.compile(_parser.SubPattern(state, [node])).match)
        self.follow.append(set())
        self._count(1)
        return _Fragment(False, {position}, {position})

    def _repeat(self, low: int, high: int, nodes: Any, flags: int) -> _Fragment:
        whole = _Fragment(True, set(), set())
        endless = high is _constants.MAXREPEAT
        for number in range(max(low, 1) if endless else high):
            part = self.sequence(nodes, flags)
            if not part.first:
                return whole
            whole = self._concatenate(whole, _Fragment(part.nullable or number >= low, part.first, part.last))
            if endless and number == max(low, 1) - 1:
                self._connect(part.last, part.first)
        return whole

    def _concatenate(self, left: _Fragment, right: _Fragment) -> _Fragment:
        self._connect(left.last, right.first)
        return _Fragment(
            left.nullable and right.nullable,
            left.first | right.first if left.nullable else left.first,
            left.last | right.last if right.nullable else right.last,
        )

    def _connect(self, last: set[int], first: set[int]) -> None:
        for position in last:
            before = len(self.follow[position])
            self.follow[position] |= first
            self._count(len(self.follow[position]) - before)

    def _count(self, edges: int) -> None:
        self._num_edges += edges
        if self._num_edges > MAX_EDGES:
            raise _UnsupportedError(f"is too large: {_LIMIT}")
