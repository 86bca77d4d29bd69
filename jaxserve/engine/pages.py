"""The pages of the KV cache, as numbers: which are free, and how many owners each of the others has.

It owns the free list and the reference counts. Whose a page is, what lies in it and on which device, it never knows.
"""

from __future__ import annotations

from collections.abc import Iterable


class PagePool:
    """`num_pages` pages of `page_size` tokens, numbered from 0. A page with no owner left is free again at once."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self._free = list(range(num_pages - 1, -1, -1))
        self._owners = [0] * num_pages

    @property
    def num_free(self) -> int:
        """Pages that can be allocated now."""
        return len(self._free)

    @property
    def usage(self) -> float:
        """Share of the pages that have an owner."""
        return 1.0 - len(self._free) / self.num_pages

    def pages_for(self, num_tokens: int) -> int:
        """How many pages hold `num_tokens` tokens."""
        return -(-num_tokens // self.page_size)

    def allocate_one(self) -> int:
        """Take one free page, with one owner. The caller has made sure that there is one."""
        page = self._free.pop()
        self._owners[page] = 1
        return page

    def allocate(self, count: int) -> list[int]:
        """Take `count` free pages, each with one owner. The caller has made sure that there are as many."""
        assert count <= len(self._free), (count, len(self._free))
        return [self.allocate_one() for _ in range(count)]

    def share(self, pages: Iterable[int]) -> None:
        """Add an owner to each of `pages`."""
        for page in pages:
            assert self._owners[page] > 0, f"page {page} is free and can't be shared"
            self._owners[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """Take an owner from each of `pages`."""
        owners = self._owners
        for page in pages:
            assert owners[page] > 0, f"page {page} has no owner to release"
            owners[page] -= 1
            if owners[page] == 0:
                self._free.append(page)

    def check(self, owned: Iterable[int]) -> list[str]:
        """What is wrong, as sentences, when `owned` names every owned page as often as it has owners."""
        counts = [0] * self.num_pages
        for page in owned:
            counts[page] += 1
        free = set(self._free)
        problems = []
        if len(free) != len(self._free):
            problems.append(f"the free list names {len(self._free) - len(free)} pages twice")
        for page in range(self.num_pages):
            if counts[page] != self._owners[page]:
                problems.append(f"page {page} counts {self._owners[page]} owners but has {counts[page]}")
            if page in free and counts[page]:
                problems.append(f"page {page} is free and owned")
            if page not in free and not self._owners[page]:
                problems.append(f"page {page} is neither free nor owned")
        return problems
