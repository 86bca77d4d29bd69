"""Finds stop strings in a text that comes in parts, and holds back only what may still become one."""

from __future__ import annotations

import functools
from collections.abc import Sequence


class StopMatcher:
    """The stop string that is complete first wins; of those complete at the same character, the longest.

    So the result doesn't depend on how the text is cut into pushes. Each stop string has a Knuth-Morris-Pratt
    automaton: the cost is linear in the text, however long the stop strings are.
    """

    def __init__(self, stops: Sequence[str], include_stop: bool) -> None:
        self._stops = sorted(dict.fromkeys(stops), key=len, reverse=True)
        self._include_stop = include_stop
        self._failures = [_failure(stop) for stop in self._stops]
        self._matched = [0] * len(self._stops)  # how many characters of each stop string the text ends with
        self._first = {stop[0] for stop in self._stops}
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """The text that can be shown, and the stop string that was found in it, after which nothing may be pushed."""
        if not self._held and self._first.isdisjoint(text):
            return text, None
        whole = self._held + text
        for position, char in enumerate(text, start=len(self._held) + 1):
            found = self._advance(char)
            if found is not None:
                self._held = ""
                return whole[: position if self._include_stop else position - len(found)], found
        shown = len(whole) - max(self._matched)
        self._held = whole[shown:]
        return whole[:shown], None

    def _advance(self, char: str) -> str | None:
        found = None
        for index, stop in enumerate(self._stops):
            length = self._matched[index]
            while length and stop[length] != char:
                length = self._failures[index][length - 1]
            length += stop[length] == char
            if length == len(stop):
                found = found or stop  # the longest stands first
                length = self._failures[index][length - 1]
            self._matched[index] = length
        return found

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
