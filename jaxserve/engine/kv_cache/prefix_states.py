"""The states of cached prefixes: from which node a request can go on, and which rows it reads and writes.

In a model that keeps a state for each sequence, a request begins after the last node on its path that has a snapshot,
on the device or in host memory. Pages that match further are used too, but their tokens are computed again for the
state. This module works on the nodes of the tree, which the radix cache owns.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from jaxserve.engine.kv_cache.host_tier import HostTier
from jaxserve.engine.kv_cache.radix_node import RadixNode, path_to
from jaxserve.engine.kv_cache.state_pool import ON_DEVICE, SnapshotOwner, StatePool


class StateOwner(SnapshotOwner, Protocol):
    """A running request."""

    row: int


_Path = list[tuple[RadixNode, int]]


class StartRows(NamedTuple):
    """The rows with which a request starts: it reads `source`, if there is one, and writes `own`."""

    source: int | None
    own: int


class PrefixStates:
    """The snapshots of the nodes of a tree, in rows of `pool`; `tier` has copies in host memory.

    `num_taken` nodes got one, `num_found` requests began with one, and `num_recomputed_tokens` tokens whose pages were
    there were computed again.
    """

    def __init__(self, pool: StatePool, tier: HostTier, page_size: int) -> None:
        self.pool = pool
        self.num_taken = 0
        self.num_found = 0
        self.num_recomputed_tokens = 0
        self._tier = tier
        self._page_size = page_size

    def usable(self, path: _Path) -> _Path:
        """Return the part of a path up to the last state, and as far beyond as pages are on the device."""
        end = self._num_known(path)
        while end < len(path) and path[end][0].pages:
            end += 1
        return path[:end]

    def known_length(self, path: _Path) -> int:
        """Return how many tokens a request would not compute."""
        return self._page_size * sum(length for _, length in path[: self._num_known(path)])

    def before(self, node: RadixNode) -> tuple[RadixNode | None, int]:
        """Return the last node with a state on the path to `node` and how many tokens end there, or None and 0."""
        for one in path_to(node):
            if _has_state(one):
                return one, self._page_size * sum(part.length for part in path_to(one))
        return None, 0

    def start(self, node: RadixNode, num_pages: int) -> tuple[StartRows, int]:
        """Return the rows of a request that starts with the prefix of `num_pages` pages that ends at `node`.

        Also return for how many of its tokens there is a state. A row must be available.
        """
        base, known = self.before(node)
        self.num_recomputed_tokens += num_pages * self._page_size - known
        if base is None:
            own = self.take()
            assert own is not None
            return StartRows(None, own), 0
        self.num_found += 1
        for pool in (self.pool, self._tier.states):
            pool.use(base)
            pool.hold(base)
        source = base.states[ON_DEVICE]
        if source is None:
            source = self.take()
            assert source is not None
            self._tier.load_state(base, source)
            self.pool.give(base, source)
            self.pool.hold(base)
        own = self.take()
        if own is None:  # the snapshot has the only row, and nothing else reads it in this plan
            self._tier.save_state(base)
            own = self.pool.take_from(base)
        return StartRows(source, own), known

    def start_plan(self) -> None:
        """Hold no rows any more: see `StatePool.start_plan`."""
        self.pool.start_plan()
        self._tier.states.start_plan()

    def take(self) -> int | None:
        """Take a row, for which a snapshot may be evicted; None if there is none."""
        return self.pool.take(self._save)

    def give(self, node: RadixNode, row: int) -> None:
        """Give a node that lacks a snapshot a row, which the caller holds if the plan being made writes it."""
        self.num_taken += 1
        self.pool.give(node, row)
        self._tier.mark_added(node)

    def take_over(self, node: RadixNode | None, row: int) -> None:
        """Give a row to a node that lacks a snapshot; else free it."""
        if node is None or node.states[ON_DEVICE] is not None:
            self.pool.release(row)
        else:
            self.give(node, row)
        if node is not None:
            self.pool.use(node)

    def moved(self, node: RadixNode) -> None:
        """Record that a node has taken over the states of a node that was split."""
        self.pool.move(node)
        self._tier.states.move(node)

    def check(self, requests: Sequence[StateOwner], nodes: Sequence[RadixNode]) -> list[str]:
        """Return the inconsistencies found, as sentences; `requests` run and have a row each."""
        problems = self.pool.check([request.row for request in requests], [*requests, *nodes])
        return problems + [
            "a cached run without pages has a state on the device"
            for node in nodes
            if node.states[ON_DEVICE] is not None and not node.pages
        ]

    def _num_known(self, path: _Path) -> int:
        """Return how many nodes of a path end with the last one that has a state at its end."""
        for count in range(len(path), 0, -1):
            node, length = path[count - 1]
            if length == node.length and _has_state(node):
                return count
        return 0

    def _save(self, owner: SnapshotOwner) -> None:
        if isinstance(owner, RadixNode):
            self._tier.save_state(owner)


def _has_state(node: RadixNode) -> bool:
    return any(row is not None for row in node.states)
