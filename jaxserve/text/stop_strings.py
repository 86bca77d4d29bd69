"""Finds stop strings and patterns in streamed text, and holds back only text that may still become one."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from jaxserve.text.stop_regex import RegexMatcher


class StopMatcher:
    """Finds the first stop string or pattern to be completed; of several completed by the same character, the longest.

    So the result doesn't depend on how the text is divided into pushes. Each stop string has a Knuth-Morris-Pratt
    automaton: the cost is linear in the text, however long the stop strings are.
    """

    def __init__(self, stops: Sequence[str], include_stop: bool, patterns: Sequence[str] = ()) -> None:
        self._patterns = RegexMatcher(patterns) if patterns else None
        self._stops = sorted(dict.fromkeys(stops), key=len, reverse=True)
        self._include_stop = include_stop
        self._failures = [_failure_lengths(stop) for stop in self._stops]
        self._matched = [0] * len(self._stops)  # how many characters of each stop string the text ends with
        self._first = {stop[0] for stop in self._stops}
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """Return the text that is not held back, and the stop string or pattern found in it, if any. Nothing may be
        pushed after a match."""
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
                found = found or stop  # the longest is first
                length = self._failures[index][length - 1]
            self._matched[index] = length
        by_pattern = self._patterns.advance(char) if self._patterns else None
        if found is None or (by_pattern is not None and by_pattern[0] > len(found)):
            return by_pattern
        return len(found), found

    def flush(self) -> str:
        """Return the held-back text at the end of the output."""
        held, self._held = self._held, ""
        self._matched = [0] * len(self._stops)
        return held


@functools.lru_cache(maxsize=64)  # all samples of a request share it
def _failure_lengths(stop: str) -> list[int]:
    """Return, for each prefix of `stop`, the length of its longest proper prefix that is also its suffix."""
    failure, length = [0], 0
    for char in stop[1:]:
        while length and stop[length] != char:
            length = failure[length - 1]
        length += stop[length] == char
        failure.append(length)
    return failure
