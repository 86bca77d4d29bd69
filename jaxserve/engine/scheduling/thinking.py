"""Counts the tokens of reasoning in one output, and says when its budget is used up and what follows then.

It sees the tokens of the output in order, each once, as they become known. It finds the texts around reasoning in the
bytes of the tokens that may have a part of one, however tokens divide them. It decides as the readers of answers do
(`jaxserve/text/answers/`), and never plans anything.
"""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Iterable, Sequence

from jaxserve.api_types import ThinkingBudget

# What a regular expression of texts calls `\s`.
_BLANKS = tuple(char.encode() for char in map(chr, range(0x3001)) if char.isspace())
_BLANK_RUN = re.compile(b"(?:" + b"|".join(map(re.escape, _BLANKS)) + b")*")


class ThinkingCounter:
    """The place of an output in its reasoning, and the rest of its budget.

    It `is_inside` of it or not; `is_over` says that no reasoning can come any more.
    """

    __slots__ = ("_budget", "_fragments", "_left", "_num_closings", "_tail", "is_inside", "is_over")

    def __init__(self, budget: ThinkingBudget) -> None:
        self._budget = budget
        self._fragments = budget.fragments
        self._left = budget.num_tokens
        self.is_inside = budget.inside
        self._tail = b""  # the end of the output that may become one of the texts
        self._num_closings = 0
        self.is_over = False

    @property
    def is_used_up(self) -> bool:
        """Whether the output is inside of its reasoning, and a closing must follow."""
        return self.is_inside and self._left <= 0

    @property
    def num_free(self) -> int:
        """The number of tokens that may follow before the budget can be used up."""
        if self.is_over:
            return sys.maxsize
        left = max(self._left, 0)
        if self.is_inside:
            return left
        return left + (1 if self._tail else self._budget.num_begin_tokens)

    def passes(self, token: int) -> bool:
        """Count a token that has no part of a text and changes nothing but the count; else return False."""
        if self._tail or token in self._fragments:
            return False
        if not self.is_inside:
            return not self._budget.once
        if self._left <= 1:
            return False
        self._left -= 1
        return True

    def push(self, tokens: Iterable[int]) -> None:
        """Add tokens to the output. One in which reasoning begins or ends doesn't count as reasoning."""
        fragments = self._fragments
        for token in tokens:
            if self.is_over:
                return
            was_inside = self.is_inside
            piece = fragments.get(token)
            if piece is not None:
                self._read(self._tail + piece)
            else:
                self._tail = b""
                self.is_over = self._budget.once and not was_inside
            if was_inside and self.is_inside:
                self._left -= 1

    def closing(self) -> tuple[int, ...]:
        """Return the tokens that must follow now that the budget is used up."""
        closings = self._budget.closings
        return closings[min(self._num_closings, len(closings) - 1)]

    def close(self) -> None:
        """Add the closing to the output."""
        closing = self.closing()
        self._num_closings += 1
        self.push(closing)

    def _read(self, data: bytes) -> None:
        """Read the end of the output, from where a text may begin."""
        budget = self._budget
        while not self.is_over:
            if budget.once and not self.is_inside:
                found, data = _at_start(data, budget.begins)
                if found is None:
                    self._tail = data
                    return
                self.is_inside, self.is_over = found, not found
                continue
            texts = budget.ends if self.is_inside else budget.begins
            match = _any_of(texts).search(data)
            if match is None:
                self._tail = data[_beginning_in(data, texts) :]
                return
            # In channels, a text that ends reasoning may also be the beginning of one that begins it
            goes_on = self.is_inside and any(text.startswith(match[0]) for text in budget.begins)
            data = data[match.start() if goes_on else match.end() :]
            self.is_over = self.is_inside and budget.once
            self.is_inside = not self.is_inside


def _at_start(data: bytes, begins: Sequence[bytes]) -> tuple[bool | None, bytes]:
    """Return whether an output begins with one of `begins` after blanks, and what follows it; None while more of the
    output decides."""
    blanks = _BLANK_RUN.match(data)
    assert blanks is not None
    rest = data[blanks.end() :]
    for text in begins:
        if rest.startswith(text):
            return True, rest[len(text) :]
    return None if any(text.startswith(rest) for text in (*begins, *_BLANKS)) else False, rest


@functools.lru_cache(64)
def _any_of(texts: Sequence[bytes]) -> re.Pattern[bytes]:
    return re.compile(b"|".join(map(re.escape, texts)))


def _beginning_in(data: bytes, texts: Sequence[bytes]) -> int:
    """Return where the longest end of `data` starts that begins one of `texts`."""
    longest = max(map(len, texts)) - 1
    for start in range(max(0, len(data) - longest), len(data)):
        if any(text.startswith(data[start:]) for text in texts):
            return start
    return len(data)
