"""The pages of a KV group with a window: of requests, of cached prefixes, or of both at once.

A query sees only the last positions before it, so a request gives its pages up one after the other while it runs, and a
prefix can be used again if the pages of the last window before its end are there. A page is free when neither a request
nor a node of the prefix tree has it. A node has pages for the end of its run only, because they are evicted from the
front: first the pages that a longer prefix doesn't need, then those of the last window, each time in the order of the
policy. The same holds for copies in host memory, which requests use only while they are loaded.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import NamedTuple

from jaxserve.engine.kv_cache.eviction import EvictionHeap, EvictionPolicy
from jaxserve.engine.kv_cache.page_pool import PagePool
from jaxserve.engine.kv_cache.radix_node import RadixNode


class WindowRun(NamedTuple):
    """Consecutive pages of a sequence; `first` is the index of the first one among all pages of the sequence."""

    first: int
    pages: list[int]


class WindowPages:
    """A pool of `num_pages` pages of a group whose queries see `window` positions, their own included.

    Nodes keep their pages in `RadixNode.windows[index]`.
    """

    def __init__(self, num_pages: int, page_size: int, window: int, index: int, policy: EvictionPolicy = "lru") -> None:
        self.window = window
        self.last_pages = -(-(window - 1) // page_size)
        self.num_evictable = 0
        self._pool = PagePool(num_pages, page_size)
        self._index = index
        self._users = [0] * num_pages
        self._nodes: list[RadixNode | None] = [None] * num_pages
        self._inner = EvictionHeap(self._has_inner, policy)
        self._evictable = EvictionHeap(self._is_evictable, policy)

    @property
    def num_pages(self) -> int:
        """The number of pages."""
        return self._pool.num_pages

    @property
    def num_free(self) -> int:
        """The number of pages that no request and no node has."""
        return self._pool.num_free

    @property
    def num_available(self) -> int:
        """The number of pages that are free, or cached and used by no request."""
        return self._pool.num_free + self.num_evictable

    def first_seen(self, position: int) -> int:
        """Return the index of the first page that a query at this position sees."""
        return max(0, position - self.window + 1) // self._pool.page_size

    def of(self, node: RadixNode) -> list[int]:
        """Return the pages of a node, which hold the end of its run."""
        return node.windows[self._index]

    def allocate(self, count: int) -> list[int]:
        """Take free pages for a request; the caller makes sure that there are enough."""
        pages = self._pool.allocate(count)
        for page in pages:
            self._users[page] = 1
        return pages

    def use(self, pages: Iterable[int]) -> None:
        """Count one more request that uses these cached pages."""
        for page in pages:
            if not self._users[page]:
                self.num_evictable -= 1
            self._users[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """Count one request less that uses these pages."""
        for page in pages:
            self._users[page] -= 1
            if not self._users[page]:
                node = self._nodes[page]
                if node is None:
                    self._pool.release((page,))
                else:
                    self.num_evictable += 1
                    if self.of(node)[0] == page:
                        self._push(node)

    def prepend(self, node: RadixNode, pages: list[int]) -> None:
        """Add `pages` before the pages of `node`. A request must be using them."""
        for page in pages:
            self._nodes[page] = node
        node.windows[self._index] = pages + self.of(node)

    def append(self, node: RadixNode, pages: list[int]) -> None:
        """Add `pages` after the pages of `node`, whose run has grown. A request must be using them."""
        for page in pages:
            self._nodes[page] = node
        self.of(node).extend(pages)
        self._push(node)

    def drop(self, node: RadixNode, count: int | None = None) -> None:
        """Remove the first `count` pages from a node, or all of them. A page that no request uses becomes free."""
        self._drop(node, slice(0, count))

    def drop_end(self, node: RadixNode, count: int) -> None:
        """Remove the last `count` pages from a node."""
        pages = self.of(node)
        self._drop(node, slice(max(0, len(pages) - count), len(pages)))

    def moved(self, node: RadixNode) -> None:
        """Record that a node has taken over pages of a node that was split."""
        for page in self.of(node):
            self._nodes[page] = node
        self._push(node)

    def clear(self) -> None:
        """Forget the nodes after the tree was flushed and `drop` was called on each of them."""
        self._inner.clear()
        self._evictable.clear()

    def check(self, used: Iterable[int], nodes: Iterable[RadixNode]) -> list[str]:
        """Return the inconsistencies found, as sentences; `used` has a page once for each request that uses it."""
        users = Counter(used)
        owners = {page: node for node in nodes for page in self.of(node)}
        problems = [
            f"page {page} is used by {users[page]} requests, but counted for {self._users[page]}"
            for page in range(self.num_pages)
            if users[page] != self._users[page]
        ]
        problems += [
            f"page {page} doesn't know the cached run that it belongs to"
            for page, node in enumerate(self._nodes)
            if node is not owners.get(page)
        ]
        evictable = sum(not self._users[page] for page in owners)
        if evictable != self.num_evictable:
            problems.append(f"{self.num_evictable} cached pages are said to be evictable, but {evictable} are")
        return problems + self._pool.check(owners.keys() | users.keys())

    def _drop(self, node: RadixNode, part: slice) -> None:
        """Remove some pages from a node."""
        pages = self.of(node)
        for page in pages[part]:
            self._nodes[page] = None
            if not self._users[page]:
                self.num_evictable -= 1
                self._pool.release((page,))
        del pages[part]

    def make_room(self, count: int, save: Callable[[RadixNode], None] | None = None) -> None:
        """Evict cached pages that no request uses, until `count` pages are free. That many must be available.

        `save` is called before a node loses pages of its last window.
        """
        while (missing := count - self._pool.num_free) > 0:
            if node := self._inner.pop():
                most = min(missing, len(self.of(node)) - self.last_pages)
            elif node := self._evictable.pop():
                if save is not None:
                    save(node)
                most = min(missing, len(self.of(node)))
            else:
                # The unused pages come after pages that a request has just added to the node and still uses.
                page = next(page for page, node in enumerate(self._nodes) if node and not self._users[page])
                node = self._nodes[page]
                assert node is not None
                self.drop(node, self.of(node).index(page) + 1)
                continue
            pages = self.of(node)
            self.drop(node, next((at for at in range(most) if self._users[pages[at]]), most))
            self._push(node)

    def _push(self, node: RadixNode) -> None:
        self._inner.push(node)
        self._evictable.push(node)

    def _is_evictable(self, node: RadixNode) -> bool:
        pages = self.of(node)
        return bool(pages) and not self._users[pages[0]]

    def _has_inner(self, node: RadixNode) -> bool:
        return len(self.of(node)) > self.last_pages and self._is_evictable(node)
