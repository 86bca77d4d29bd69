"""Finds stop strings and patterns in a text that comes in parts, and holds back only what may still become one."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from jaxserve.text.stop_regex import RegexMatcher


class StopMatcher:
    """The stop string or pattern that is complete first wins; of those complete at the same character, the longest.

    So the result doesn't depend on how the text is cut into pushes. Each stop string has a Knuth-Morris-Pratt
    automaton: the cost is linear in the text, however long the stop strings are.
    """

    def __init__(self, stops: Sequence[str], include_stop: bool, patterns: Sequence[str] = ()) -> None:
        self._patterns = RegexMatcher(patterns) if patterns else None
        self._stops = sorted(dict.fromkeys(stops), key=len, reverse=True)
        self._include_stop = include_stop
        self._failures = [_failure(stop) for stop in self._stops]
        self._matched = [0] * len(self._stops)  # how many characters of each stop string the text ends with
        self._first = {stop[0] for stop in self._stops}
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """The text that can be shown, and the stop string or pattern that was found in it, after which nothing may be
        pushed."""
        if self._patterns is None and not self._held and self._first.isdisjoint(text):
            return text, None
        whole = self._held + text
        for position, char in enumerate(text, start=len(self._held) + 1):
            found = self._advance(char)
            if found is not None:
                self._held = ""
                length, stop = found
                return whole[: position if self._include_stop else position - length], stop
        shown = len(whole) - max(*self._matched, 0, self._patterns.num_held if self._patterns else 0)
        self._held = whole[shown:]
        return whole[:shown], None

    def _advance(self, char: str) -> tuple[int, str] | None:
        found: str | None = None
        for index, stop in enumerate(self._stops):
            length = self._matched[index]
            while length and stop[length] != char:
                length = self._failures[index][length - 1]
            length += stop[length] == char
            if length == len(stop):
                found = found or stop  # the longest stands first
                length = self._failures[index][length - 1]
            self._matched[index] = length
        by_pattern = self._patterns.advance(char) if self._patterns else None
        if found is None or (by_pattern is not None and by_pattern[0] > len(found)):
            return by_pattern
        return len(found), found

    def flush(self) -> str:
        """What was held back, once it is certain that no more text comes."""
        held, self._held = self._held, ""
        self._matched = [0] * len(self._stops)
        return held


@functools.lru_cache(maxsize=64)  # the samples of a request have the same
def _failure(stop: str) -> list[int]:
    """For each prefix of `stop`, the length of the longest proper prefix that it also ends with."""
    failure, length = [0], 0
    for char in stop[1:]:
        while length and stop[length] != char:
            length = failure[length - 1]
        length += stop[length] == char
        failure.append(length)
    return failure
