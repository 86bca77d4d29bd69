"""The cache's second tier: which slots of host memory hold a copy of which cached page, and what is copied when.

It owns the host slots, the order in which what only the host has is given up, and the copies that the next plan asks
for: first all saves, then all loads, then the step. So a page may be reused by the very plan that saves it, and read by
the one that loads it. What lies where in the tree is the radix cache's to say; memory it never touches.

`write_through` saves pages with the plan that follows the one which computes them, so that they can be evicted at once
at any time, and gives host memory twice; `write_back` saves them when they are evicted, and holds more.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from jaxserve.engine.kv_cache.page_pool import PagePool
from jaxserve.engine.kv_cache.radix_node import ByLastUse, Node

WritePolicy = Literal["write_through", "write_back"]


class HostTier:
    """`num_pages` slots of a page each; with none there is no tier, and nothing is kept."""

    def __init__(self, num_pages: int, page_size: int, policy: WritePolicy = "write_through") -> None:
        self._slots = PagePool(num_pages, page_size)
        self._saves_early = num_pages > 0 and policy == "write_through"
        self._entered: list[Node] = []
        self._idle = ByLastUse(_is_idle)
        self._saves: dict[int, int] = {}
        self._loads: list[tuple[int, int]] = []
        self.num_saved = 0
        self.num_loaded = 0

    @property
    def num_pages(self) -> int:
        """Pages that it holds at most."""
        return self._slots.num_pages

    @property
    def num_used(self) -> int:
        """Pages that it holds."""
        return self._slots.num_pages - self._slots.num_free

    def entered(self, node: Node) -> None:
        """The tree has got pages of `node` that the plan under way computes, or an earlier one has."""
        if self._saves_early:
            self._entered.append(node)

    def save_entered(self) -> None:
        """At the start of a plan: copy what earlier plans computed, the beginnings of sequences first."""
        for node in self._entered:
            lacking = []
            at: Node | None = node
            while at is not None and not at.detached and len(at.host) < len(at.pages):
                lacking.append(at)
                at = at.parent
            for one in reversed(lacking):
                if self.keep(one) < len(one.pages):
                    break  # without it, what follows could not be found again
        self._entered.clear()

    def keep(self, node: Node) -> int:
        """Copy the pages of `node` that have no copy yet, as far as there is room; returns how many have one then."""
        pages = node.pages[len(node.host) :]
        slots = self._allocate(len(pages))
        self._saves.update(zip(slots, pages))
        node.host += slots
        return len(node.host)

    def load(self, node: Node) -> None:
        """Copy `node`, which was host-only, into its pages."""
        self._loads += zip(node.host, node.pages, strict=True)

    def offer(self, node: Node) -> None:
        """A node may have become one that can be given up, or was used again."""
        self._idle.offer(node)

    def forget(self, node: Node) -> None:
        """Give up the copies of a node."""
        self._release(node.host)
        node.host = []

    def take_copies(self) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """For the plan that is made now: saves as (page, slot), loads as (slot, page)."""
        if not self._saves and not self._loads:
            return [], []
        saves, loads = [(page, slot) for slot, page in self._saves.items()], self._loads
        self._saves, self._loads = {}, []
        self.num_saved += len(saves)
        self.num_loaded += len(loads)
        return saves, loads

    def clear(self) -> None:
        """The tree is gone, and every node has been forgotten."""
        self._entered.clear()
        self._idle.clear()

    def check(self, owned: Iterable[int]) -> list[str]:
        """What is wrong, as sentences, when `owned` names every slot that a node has."""
        problems = [f"in host memory, {problem}" for problem in self._slots.check(owned)]
        if self._loads:
            problems.append(f"{len(self._loads)} pages were to be loaded by a plan that was never made")
        return problems

    def _allocate(self, count: int) -> list[int]:
        """Up to `count` slots; to get them, what only the host has and was used least recently is given up."""
        while self._slots.num_free < count and (node := self._idle.pop()) is not None:
            self._shorten(node, count - self._slots.num_free)
        return self._slots.allocate(min(count, self._slots.num_free))

    def _shorten(self, node: Node, count: int) -> None:
        """Take up to `count` slots from the end of a host-only leaf."""
        size = self._slots.page_size
        kept = max(len(node.host) - count, 0)
        parent = None if kept else node.unlink(size)
        self._release(node.host[kept:])
        del node.host[kept:], node.tokens[kept * size :]
        self._idle.offer(parent or node)

    def _release(self, slots: list[int]) -> None:
        self._slots.release(slots)
        for slot in slots:
            self._saves.pop(slot, None)


def _is_idle(node: Node) -> bool:
    """Host-only, and nothing follows it."""
    return not node.locks and not node.children and not node.pages and bool(node.host)
