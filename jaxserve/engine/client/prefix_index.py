"""Which prefixes an engine of another process has cached, as far as can be told from what it was sent.

It owns names of pages, no tokens: a page is known by a hash of all tokens up to its end and their namespace. It holds
as many as the engine has pages, and forgets as the engine does: of the prefixes that were not used for longest, the end
first. A wrong guess costs a request its best place, never its answer.
"""

from __future__ import annotations

import array
import itertools
from collections import OrderedDict
from collections.abc import Sequence


def page_names(namespace: str, tokens: Sequence[int], page_size: int) -> list[int]:
    """The names of the whole pages of a sequence, from its first on."""
    ids = array.array("q", tokens)
    size = page_size * ids.itemsize
    raw = ids.tobytes()
    names: list[int] = []
    name = hash(namespace)
    for end in range(size, len(raw) + 1, size):
        name = hash((name, raw[end - size : end]))
        names.append(name)
    return names


class PrefixIndex:
    """The pages of one engine, `num_pages` at most."""

    def __init__(self, num_pages: int) -> None:
        self._num_pages = num_pages
        # The least recently used first; of a prefix its end first, as the engine's tree gives up leaves.
        self._pages: OrderedDict[object, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._pages)

    def match(self, names: Sequence[int]) -> int:
        """How many of these pages, from the first on, the engine is taken to have."""
        pages = self._pages
        return sum(1 for _ in itertools.takewhile(pages.__contains__, names))

    def use(self, names: Sequence[int]) -> None:
        """The engine gets a sequence of these pages."""
        pages = self._pages
        for name in reversed(names):
            pages[name] = None
            pages.move_to_end(name)
        self._trim()

    def fill(self, count: int) -> None:
        """The engine has put so many pages of outputs into its cache; they push others out and are not found again."""
        for _ in range(count):
            self._pages[object()] = None
        self._trim()

    def clear(self) -> None:
        """The engine has forgotten all."""
        self._pages.clear()

    def _trim(self) -> None:
        while len(self._pages) > self._num_pages:
            self._pages.popitem(last=False)
