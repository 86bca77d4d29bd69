"""Finds regular expressions in a text that comes character by character, in a time that no pattern can make long.

Python's syntax, without what a finite automaton can't do (back references, look-around) or what depends on text that
is still to come (word boundaries). A `^` at the start of a pattern is the start of the text, a `$` at its end is where
the text stands now, and the empty text is no match.

A pattern becomes a position automaton (Glushkov 1961): one position for each character class in it, and which may
follow which. All places where a match could have begun are followed at once, so there is no backtracking: a character
costs at most as many looks as the automaton has edges, and those are bounded.
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
    """`tests[i]` says whether a character suits position i; a match begins in `first`, with `at_start` at the start of
    the text only, and is complete in `last`."""

    tests: tuple[Callable[[str], object], ...]
    first: tuple[int, ...]
    at_start: bool
    follow: tuple[tuple[int, ...], ...]
    last: frozenset[int]


@functools.lru_cache(256)
def compile_stop(pattern: str) -> Automaton:
    """Raises `InvalidRequestError` naming `stop_regex` for a pattern that is wrong, not supported or too large."""
    try:
        parsed = _parser.parse(pattern)
        builder = _Builder()
        nodes = list(parsed)
        at_start = _is_anchor(nodes[:1], "AT_BEGINNING", "AT_BEGINNING_STRING")
        at_end = _is_anchor(nodes[-1:], "AT_END", "AT_END_STRING")
        part = builder.sequence(nodes[at_start : len(nodes) - at_end], parsed.state.flags)
    except (re.error, OverflowError, RecursionError) as error:
        raise _refused(pattern, f"is no regular expression: {error}") from error
    except _Unsupported as error:
        raise _refused(pattern, str(error)) from error
    follow = tuple(tuple(sorted(following)) for following in builder.follow)
    return Automaton(tuple(builder.tests), tuple(sorted(part.first)), at_start, follow, frozenset(part.last))


def _is_anchor(nodes: Sequence[Any], *names: str) -> bool:
    return any(str(kind) == "AT" and str(value) in names for kind, value in nodes)


def _refused(pattern: str, why: str) -> InvalidRequestError:
    return InvalidRequestError(f"stop_regex {pattern[:100]!r} {why}", param="stop_regex")


def check_patterns(patterns: Sequence[str]) -> None:
    """Raises `InvalidRequestError` unless outputs can be searched for these patterns."""
    if patterns:
        RegexMatcher(patterns)


class RegexMatcher:
    """Where each of several patterns stands in one text. A match is complete at the first character it can be."""

    def __init__(self, patterns: Sequence[str]) -> None:
        self._patterns = [(pattern, compile_stop(pattern)) for pattern in dict.fromkeys(patterns)]
        edges = sum(len(automaton.first) + sum(map(len, automaton.follow)) for _, automaton in self._patterns)
        if edges > MAX_EDGES:
            raise _refused(self._patterns[0][0], f"and the other patterns are too large together: {_LIMIT}")
        # For each pattern, the positions that the text may stand at, with where the match began at the earliest.
        self._active: list[dict[int, int]] = [{} for _ in self._patterns]
        self._length = 0

    @property
    def num_held(self) -> int:
        """How many of the last characters may still become part of a match."""
        begun = [start for active in self._active for start in active.values()]
        return self._length - min(begun) if begun else 0

    def advance(self, char: str) -> tuple[int, str] | None:
        """Takes the next character. Returns the longest match that it completes, as a length and its pattern."""
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


class _Unsupported(Exception):
    pass


_LIMIT = f"at most {MAX_EDGES} steps between its characters, repetitions written out, are supported"


@dataclasses.dataclass
class _Part:
    """Of a part of a pattern: whether it matches the empty text, and the positions that a match begins and ends in."""

    nullable: bool
    first: set[int]
    last: set[int]


class _Builder:
    def __init__(self) -> None:
        self.tests: list[Callable[[str], object]] = []
        self.follow: list[set[int]] = []
        self._num_edges = 0

    def sequence(self, nodes: Any, flags: int) -> _Part:
        whole = _Part(True, set(), set())
        for node in nodes:
            whole = self._joined(whole, self._part(node, flags))
        return whole

    def _part(self, node: Any, flags: int) -> _Part:
        kind, value = node
        name = str(kind)
        if name in _MATCHES_ONE:
            return self._position(node, flags)
        if name == "SUBPATTERN":
            _, added, removed, nodes = value
            return self.sequence(nodes, (flags | added) & ~removed)
        if name == "BRANCH":
            parts = [self.sequence(nodes, flags) for nodes in value[1]]
            return _Part(
                any(part.nullable for part in parts),
                set().union(*(part.first for part in parts)),
                set().union(*(part.last for part in parts)),
            )
        if name in _REPEATS:
            low, high, nodes = value
            return self._repeated(low, high, nodes, flags)
        raise _Unsupported(
            f"uses {name.lower().replace('_', ' ')}, which is not supported: a match must not depend on "
            "what comes before or after it"
        )

    def _position(self, node: Any, flags: int) -> _Part:
        state = _parser.State()
        state.flags, state.str = flags, ""
        position = len(self.tests)
        self.tests.append(_compiler.compile(_parser.SubPattern(state, [node])).match)
        self.follow.append(set())
        self._count(1)
        return _Part(False, {position}, {position})

    def _repeated(self, low: int, high: int, nodes: Any, flags: int) -> _Part:
        whole = _Part(True, set(), set())
        endless = high is _constants.MAXREPEAT
        for number in range(max(low, 1) if endless else high):
            part = self.sequence(nodes, flags)
            if not part.first:
                return whole
            whole = self._joined(whole, _Part(part.nullable or number >= low, part.first, part.last))
            if endless and number == max(low, 1) - 1:
                self._connect(part.last, part.first)
        return whole

    def _joined(self, left: _Part, right: _Part) -> _Part:
        self._connect(left.last, right.first)
        return _Part(
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
            raise _Unsupported(f"is too large: {_LIMIT}")
