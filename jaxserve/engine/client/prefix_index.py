"""An estimate of which prefixes an engine in another process has cached, made from the requests sent to it.

It stores names of pages, no tokens: the name of a page is a hash of the namespace and of all tokens up to the page's
end. It stores as many names as the engine has pages, and evicts as the engine does by default: the end of the least
recently used prefix first. A wrong estimate may cost speed, never correctness.
"""

from __future__ import annotations

import array
import itertools
from collections import OrderedDict
from collections.abc import Sequence


def page_names(namespace: str, tokens: Sequence[int], page_size: int) -> list[int]:
    """Return the names of the whole pages of a sequence, from the first on."""
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
    """The estimated cache content of one engine, `num_pages` pages at most."""

    def __init__(self, num_pages: int) -> None:
        self._num_pages = num_pages
        # It is in order of eviction: the least recently used prefix first, its end first, as the engine evicts leaves.
        self._pages: OrderedDict[object, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._pages)

    def match(self, names: Sequence[int]) -> int:
        """Return how many of these pages, from the first on, the engine probably has."""
        pages = self._pages
        return sum(1 for _ in itertools.takewhile(pages.__contains__, names))

    def add(self, names: Sequence[int]) -> None:
        """Record that the engine was sent a sequence of these pages."""
        pages = self._pages
        for name in reversed(names):
            pages[name] = None
            pages.move_to_end(name)
        self._trim()

    def add_outputs(self, count: int) -> None:
        """Record that the engine cached `count` pages of outputs: they take room, but are not found by name."""
        for _ in range(count):
            self._pages[object()] = None
        self._trim()

    def resize(self, num_pages: int) -> None:
        """Hold this many pages from now on."""
        self._num_pages = num_pages
        self._trim()

    def clear(self) -> None:
        """Forget all pages."""
        self._pages.clear()

    def _trim(self) -> None:
        while len(self._pages) > self._num_pages:
            self._pages.popitem(last=False)
