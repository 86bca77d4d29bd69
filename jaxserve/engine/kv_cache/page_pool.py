"""The allocator of KV cache pages, which are plain numbers.

It owns the free list. It knows neither the owners of the other pages nor their content or device.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable


class PagePool:
    """A pool of `num_pages` pages of `page_size` tokens, numbered from 0. A page is free or has one owner.

    `read_by_draft[page]` is 1 if a draft model has read the page's tokens since it was allocated.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self._free = list(range(num_pages - 1, -1, -1))
        self._owned = bytearray(num_pages)
        self.read_by_draft = bytearray(num_pages)

    @property
    def num_free(self) -> int:
        """The number of pages that can be allocated now."""
        return len(self._free)

    def pages_for(self, num_tokens: int) -> int:
        """Return the number of pages that hold `num_tokens` tokens."""
        return -(-num_tokens // self.page_size)

    def allocate(self, count: int) -> list[int]:
        """Take `count` free pages. The caller makes sure that this many are free."""
        assert count <= len(self._free), (count, len(self._free))
        taken = [self._free.pop() for _ in range(count)]
        for page in taken:
            self._owned[page] = 1
            self.read_by_draft[page] = 0
        return taken

    def release(self, pages: Iterable[int]) -> None:
        """Free the pages."""
        for page in pages:
            assert self._owned[page], f"page {page} is free already"
            self._owned[page] = 0
            self._free.append(page)

    def check(self, owned: Iterable[int]) -> list[str]:
        """Return the inconsistencies found, as sentences; `owned` are all pages that have an owner."""
        owners, free = Counter(owned), Counter(self._free)
        problems = []
        for page in range(self.num_pages):
            if owners[page] + free[page] != 1:
                problems.append(f"page {page} has {owners[page]} owners and is free {free[page]} times")
            elif owners[page] != self._owned[page]:
                problems.append(f"page {page} is owned by {owners[page]} but counted as {self._owned[page]}")
        return problems
