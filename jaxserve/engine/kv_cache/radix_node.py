"""A node of the prefix tree, and nodes in the order in which they are given up.

It owns the shape of the tree and nothing else: whose the pages are, and when a node goes, its users decide.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator

Key = tuple[int, ...]
_FEW = 1024


class Node:
    """A run of whole pages: `tokens` are `length * page_size` ids. The root of a namespace has none.

    It is resident, with its pages on the device, or host-only, without any. `host` are the slots in host memory that
    have a copy: of a host-only node all pages, of a resident one the first so many. Above a resident node all are.
    `locks` counts the requests whose prefix ends here or below. A node that a flush has cut off is `detached`: it keeps
    its pages while it is locked, and nothing finds it any more.
    """

    __slots__ = ("children", "detached", "host", "last_used", "locks", "num_resident", "pages", "parent", "tokens")

    def __init__(self, parent: Node | None, tokens: list[int], pages: list[int], host: list[int] | None = None) -> None:
        self.parent = parent
        self.tokens = tokens
        self.pages = pages
        self.host = host or []
        self.children: dict[Key, Node] = {}
        self.num_resident = 0  # of the children
        self.locks = 0
        self.last_used = 0
        self.detached = False

    @property
    def length(self) -> int:
        """How many pages it is long."""
        return len(self.pages) or len(self.host)

    def unlink(self, page_size: int) -> Node:
        """Take it and all below out of the tree; returns its parent."""
        parent = self.parent
        assert parent is not None
        del parent.children[tuple(self.tokens[:page_size])]
        parent.num_resident -= bool(self.pages)
        return parent

    def cut(self, length: int, page_size: int) -> Node:
        """Cut it after `length` pages, which stay; returns the rest, now its only child. Nobody may have locked it."""
        at = length * page_size
        rest = Node(self, self.tokens[at:], self.pages[length:], self.host[length:])
        rest.last_used, rest.children, rest.num_resident = self.last_used, self.children, self.num_resident
        for child in rest.children.values():
            child.parent = rest
        del self.tokens[at:], self.pages[length:], self.host[length:]
        self.children = {tuple(rest.tokens[:page_size]): rest}
        self.num_resident = int(bool(rest.pages))
        return rest


def below(root: Node) -> Iterator[Node]:
    """All nodes under one."""
    stack = list(root.children.values())
    while stack:
        node = stack.pop()
        yield node
        stack.extend(node.children.values())


class ByLastUse:
    """Nodes that may be given up, the least recently used first.

    A node is offered whenever it may have become one, or was used again; `is_one` is asked when its turn comes.
    """

    def __init__(self, is_one: Callable[[Node], bool]) -> None:
        self._is_one = is_one
        # An entry whose time is not the node's any more is stale.
        self._entries: list[tuple[int, int, Node]] = []
        self._compact_at = _FEW

    def __len__(self) -> int:
        return len(self._entries)

    def offer(self, node: Node) -> None:
        """Take note of a node, if it is one."""
        if not self._is_one(node):
            return
        heapq.heappush(self._entries, (node.last_used, id(node), node))
        if len(self._entries) > self._compact_at:
            self._entries = [entry for entry in set(self._entries) if entry[0] == entry[2].last_used]
            heapq.heapify(self._entries)
            self._compact_at = 2 * len(self._entries) + _FEW

    def pop(self) -> Node | None:
        """The one that goes next. What is left of it must be offered again."""
        while self._entries:
            last_used, _, node = heapq.heappop(self._entries)
            if node.last_used == last_used and self._is_one(node):
                return node
        return None

    def clear(self) -> None:
        """Forget all."""
        self._entries.clear()
