"""Divides the KV cache between the KV groups of a model.

The pages of a window group follow from those of the first group and from settings alone. So the size of the first one
decides all: the processes of a mesh agree on it, a bundle keeps it, and memory limits it.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Sequence

_LONGEST_EXPECTED = 16384
_EXPECTED_BY_DEFAULT = 4096


@dataclasses.dataclass(frozen=True)
class KVDivision:
    """The division for requests of `expected_tokens`; a rank runs at most `max_running` and prefills `chunk` tokens.

    `bytes_per_token` and `windows` are by KV group; the first group has no window. `ratio` is the number of pages of a
    window group as a share of the first one's, None if the expected requests decide.
    """

    bytes_per_token: tuple[int, ...]
    windows: tuple[int | None, ...]
    page_size: int
    expected_tokens: int
    max_running: int
    chunk: int
    ratio: float | None = None

    def pages(self, first: int) -> tuple[int, ...]:
        """Return the pages of each group if the first one has `first`."""
        return tuple(first if window is None else self._window_pages(first, window) for window in self.windows)

    def nbytes(self, first: int) -> int:
        """Return the bytes of all pools on a device if the first group has `first` pages."""
        pages = zip(self.pages(first), self.bytes_per_token, strict=True)
        return self.page_size * sum(count * size for count, size in pages)

    def largest_in(self, nbytes: int, most: int) -> int:
        """Return the most pages of the first group, up to `most`, with which all pools take at most `nbytes`."""
        return max(0, bisect.bisect_right(range(most + 1), nbytes, hi=most + 1, key=self.nbytes) - 1)

    def largest_within(self, limits: Sequence[int], most: int) -> int:
        """Return the most pages of the first group, up to `most`, with which no group has more than its limit."""

        def exceeds(first: int) -> bool:
            return any(count > limit for count, limit in zip(self.pages(first), limits, strict=True))

        return max(0, bisect.bisect_left(range(most + 1), True, hi=most + 1, key=exceeds) - 1)

    def least_pages(self, window: int) -> int:
        """Return the fewest pages of a group with which a request can run: it writes a page while it sees the window,
        which may begin within another one."""
        return self.pages_for(window) + 2

    def pages_for(self, tokens: int) -> int:
        """Return the number of pages that hold this many tokens."""
        return -(-tokens // self.page_size)

    def _window_pages(self, first: int, window: int) -> int:
        """Return the pages of a window group; never more than the first group's, as each goes with one of them."""
        if self.ratio is not None:
            return min(first, int(first * self.ratio))
        expected, chunk = self.pages_for(self.expected_tokens), self.pages_for(self.chunk)
        one = min(expected, self.pages_for(window) + 1)
        live = -(-first * one // expected)
        # This holds all running requests, and a quarter more for cached prefixes: more would hardly be used.
        live = min(live, -(-self.max_running * one * 5 // 4))
        return min(first, max(live, self.least_pages(window)) + chunk)


def expected_tokens(context: int, windows: Sequence[int | None], *, whole_sequences: bool, context_is_set: bool) -> int:
    """Return the length of the requests that a division is made for.

    It is half of the context, at least one window, and at most 16,384 tokens if the context was set, else 4,096: few
    requests are as long as a model allows, and shorter ones would find no room for their windows. If no layer keeps
    whole sequences, the pages of the first group cost nothing, and suffice for any length.
    """
    if not whole_sequences:
        return context
    longest = _LONGEST_EXPECTED if context_is_set else _EXPECTED_BY_DEFAULT
    return min(context, max(min(context // 2, longest), 1, *(window or 0 for window in windows)))
