"""The pages of windows in the prefix tree: how far a prefix can be used, its window's users, the pages a node lacks.

It works on the nodes of the tree, which the radix cache owns, and on the pages and copies of each KV group that has a
window. A request counts as a user of the pages it needs, so that they are not evicted.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from jaxserve.engine.kv_cache.host_tier import HostTier
from jaxserve.engine.kv_cache.radix_node import RadixNode, path_to
from jaxserve.engine.kv_cache.window_pages import WindowPages, WindowRun


class _NodePart(NamedTuple):
    """Consecutive pages at the end of a node: first `slots` in host memory, then `pages` on the device."""

    node: RadixNode
    slots: list[int]
    pages: list[int]


class HeldWindow(NamedTuple):
    """The pages of the last window of a prefix; `first` is the index of the first one in the sequence."""

    first: int
    parts: list[_NodePart]

    @property
    def num_resident(self) -> int:
        """The number of pages that are on the device."""
        return sum(len(part.pages) for part in self.parts)


class PrefixWindows:
    """The windows of cached prefixes, by KV group; `groups` have the pages and `tier` the copies in host memory."""

    def __init__(self, groups: Sequence[WindowPages], tier: HostTier, page_size: int) -> None:
        self.groups = tuple(groups)
        self._tier = tier
        self._stores = (*groups, *tier.windows)
        self._page_size = page_size

    def new_lists(self) -> list[list[int]]:
        """Return the lists of pages of a new node."""
        return [[] for _ in self._stores]

    def usable(self, path: Iterator[tuple[RadixNode, int]]) -> list[tuple[RadixNode, int]]:
        """Return the part of a path up to the last node before whose end each group has a whole window."""
        found = list(path)
        if not self.groups:
            return found
        usable = end = 0
        starts = [0] * len(self.groups)  # the pages from here to `end` are there
        for count, (node, length) in enumerate(found, 1):
            start, end = end, end + length
            for group, window in enumerate(self.groups):
                held = max(len(window.of(node)), len(self._tier.window_slots(group, node)))
                if held < node.length:
                    starts[group] = start + min(node.length - held, length)
            position = end * self._page_size
            if all(first <= window.first_seen(position) for first, window in zip(starts, self.groups)):
                usable = count
        return found[:usable]

    def hold(self, node: RadixNode) -> list[HeldWindow]:
        """Count a request as a user of the last window of the prefix that ends at `node`; return the pages by group."""
        if not self.groups:
            return []
        num_pages = sum(one.length for one in path_to(node))
        return [self._hold(group, node, num_pages) for group in range(len(self.groups))]

    def release(self, held: Sequence[HeldWindow]) -> None:
        """Undo a `hold`."""
        for group, one in enumerate(held):
            for part in one.parts:
                self.groups[group].release(part.pages)
                self._tier.release_window(group, part.slots)

    def allocate(self, group: int, count: int) -> list[int]:
        """Take pages for a request, evicting cached ones if needed; the caller makes sure that there are enough."""
        window = self.groups[group]
        if count > window.num_free:
            window.make_room(count, self._tier.save_evicted_window)
        return window.allocate(count)

    def load(self, held: Sequence[HeldWindow]) -> list[WindowRun]:
        """Load the pages that are only in host memory, for which there is room; return all pages of each window."""
        runs = []
        for group, one in enumerate(held):
            pages: list[int] = []
            for part in one.parts:
                if part.slots:
                    loaded = self.allocate(group, len(part.slots))
                    self.groups[group].prepend(part.node, loaded)
                    self._tier.load_window(group, part.slots, loaded)
                    pages += loaded
                pages += part.pages
            runs.append(WindowRun(one.first, pages))
        return runs

    def lacks_any(self, node: RadixNode, start: int, runs: Sequence[WindowRun]) -> bool:
        """Return whether a node that begins at page `start` of a sequence lacks pages which the sequence has."""
        return any(
            node.length > len(window.of(node)) and run.first < start + node.length - len(window.of(node))
            for window, run in zip(self.groups, runs)
        )

    def give(self, node: RadixNode, start: int, runs: Sequence[WindowRun]) -> None:
        """Give a node that begins at page `start` of a sequence the sequence's pages that it lacks."""
        for window, run in zip(self.groups, runs):
            first, end = max(start, run.first), start + node.length - len(window.of(node))
            if first < end:
                window.prepend(node, run.pages[first - run.first : end - run.first])

    def grow(self, node: RadixNode, start: int, count: int, runs: Sequence[WindowRun]) -> None:
        """Give a node that has grown by `count` pages, from page `start` of a sequence on, the sequence's pages."""
        for window, run in zip(self.groups, runs):
            if run.first > start:  # the sequence has given some up, and a node has no gap
                window.drop(node)
            window.append(node, run.pages[max(0, start - run.first) : start + count - run.first])

    def drop(self, node: RadixNode) -> None:
        """Take a node's pages on the device from it."""
        for window in self.groups:
            window.drop(node)

    def split(self, *nodes: RadixNode) -> None:
        """Record that nodes are the parts of one that was split."""
        for store in self._stores:
            for node in nodes:
                store.moved(node)

    def clear(self) -> None:
        """Forget the nodes after the tree was flushed and all their pages and copies were dropped."""
        for store in self._stores:
            store.clear()

    def check(self, used: Sequence[Iterable[int]], nodes: Sequence[RadixNode]) -> list[str]:
        """Return the inconsistencies found, as sentences; `used` are the pages that requests use, by group."""
        problems = [
            f"of the group with a window of {window.window} tokens, {problem}"
            for window, pages in zip(self.groups, used)
            for problem in window.check(pages, nodes)
        ]
        for node in nodes:
            most = [len(node.pages)] * len(self.groups) + [node.length] * len(self._tier.windows)
            for store, limit in zip(self._stores, most, strict=True):
                if len(store.of(node)) > limit:
                    problems.append(f"a cached run of {limit} pages has {len(store.of(node))} pages of a window")
        return problems

    def _hold(self, group: int, node: RadixNode, num_pages: int) -> HeldWindow:
        """Return the last window of a prefix of `num_pages` pages, and count a user of its pages and copies."""
        window = self.groups[group]
        first = window.first_seen(num_pages * self._page_size)
        missing, parts = num_pages - first, list[_NodePart]()
        for one in path_to(node):
            if missing <= 0:
                break
            wanted = min(missing, one.length)
            resident, copies = window.of(one), self._tier.window_slots(group, one)
            pages = resident[max(0, len(resident) - wanted) :]
            slots = copies[len(copies) - wanted :][: wanted - len(pages)] if len(pages) < wanted else []
            assert len(pages) + len(slots) == wanted, "a prefix was found without its window"
            parts.append(_NodePart(one, slots, pages))
            missing -= wanted
        parts.reverse()
        for part in parts:
            window.use(part.pages)
            self._tier.use_window(group, part.slots)
        return HeldWindow(first, parts)
