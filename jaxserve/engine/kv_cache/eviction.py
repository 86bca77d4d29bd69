"""Which unused nodes of the prefix tree lose what they hold first: the policies, and a heap in their order.

It works on nodes and changes nothing in the tree: its users own pages, copies and states, and evict them.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from operator import attrgetter
from typing import Any, Literal

from jaxserve.engine.kv_cache.radix_node import RadixNode

EvictionPolicy = Literal["lru", "lfu", "priority"]

# Of nodes, the one with the lowest key is evicted first. The key of a node never becomes lower.
_KEYS: dict[EvictionPolicy, Callable[[Any], Any]] = {
    "lru": attrgetter("last_used"),
    "lfu": attrgetter("num_uses", "last_used"),
    "priority": attrgetter("priority", "last_used"),
}
_MIN_COMPACT_SIZE = 1024


class EvictionHeap:
    """Nodes that may be evicted, in the order of a policy.

    Push a node whenever it may have become evictable; `is_evictable` is checked again when the node is popped. Of nodes
    with equal keys, the one that was pushed first comes first.
    """

    def __init__(self, is_evictable: Callable[[RadixNode], bool], policy: EvictionPolicy = "lru") -> None:
        self._is_evictable = is_evictable
        self._key = _KEYS[policy]
        self._entries: list[tuple[Any, int, RadixNode]] = []
        self._compact_at = _MIN_COMPACT_SIZE
        self._pushes = itertools.count()

    def __len__(self) -> int:
        return len(self._entries)

    def push(self, node: RadixNode) -> None:
        """Add a node if it is evictable."""
        if not self._is_evictable(node):
            return
        key = self._key
        heapq.heappush(self._entries, (key(node), next(self._pushes), node))
        if len(self._entries) > self._compact_at:
            nodes = dict.fromkeys(node for _, _, node in sorted(self._entries) if self._is_evictable(node))
            self._entries = sorted((key(node), next(self._pushes), node) for node in nodes)
            self._compact_at = 2 * len(self._entries) + _MIN_COMPACT_SIZE

    def pop(self) -> RadixNode | None:
        """Return the node to evict first. If a part of it remains in the tree, push it again."""
        while self._entries:
            key, _, node = heapq.heappop(self._entries)
            if self._key(node) != key:
                self.push(node)  # it was used since
            elif self._is_evictable(node):
                return node
        return None

    def clear(self) -> None:
        """Remove all nodes."""
        self._entries.clear()
