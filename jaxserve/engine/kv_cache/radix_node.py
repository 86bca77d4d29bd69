"""A node of the prefix tree.

It owns the shape of the tree and nothing else: its users own the pages and decide when a node is evicted.
"""

from __future__ import annotations

from collections.abc import Iterator

Key = tuple[int, ...]


class RadixNode:
    """A run of whole pages: `tokens` are `length * page_size` ids. The root of a namespace has none.

    A node is resident (its pages are on the device) or host-only (it has no pages). `host_slots` are the slots in host
    memory that hold copies: of all pages of a host-only node, of the first few pages of a resident one. All ancestors
    of a resident node are resident. `locks` counts the requests whose prefix ends at this node or below it. A flush
    removes a node from the tree and marks it `detached`: it keeps its pages while it is locked, and no lookup finds it.

    It was `last_used` at a time of the cache's clock. `num_uses` requests have made it or begun with it, and `priority`
    is their highest; the cache counts them if its policy needs it.

    `windows` has a list of pages for each KV group with a window, and then a list of host slots for each, all for the
    end of the run. A host-only node has no window pages on the device. `states` are the rows that have the state of a
    sequence at the end of the run, on the device and in host memory; a node that has one doesn't grow. If events are
    recorded, `num_states` counts those rows, and the ones of all nodes below.
    """

    __slots__ = (
        "children",
        "detached",
        "host_slots",
        "last_used",
        "locks",
        "num_resident_children",
        "num_states",
        "num_uses",
        "pages",
        "parent",
        "priority",
        "states",
        "tokens",
        "windows",
    )

    def __init__(
        self,
        parent: RadixNode | None,
        tokens: list[int],
        pages: list[int],
        host_slots: list[int] | None = None,
        windows: list[list[int]] | None = None,
    ) -> None:
        self.parent = parent
        self.tokens = tokens
        self.pages = pages
        self.host_slots = host_slots or []
        self.windows = windows or []
        self.states: list[int | None] = [None, None]
        self.num_states = 0
        self.children: dict[Key, RadixNode] = {}
        self.num_resident_children = 0
        self.locks = 0
        self.last_used = 0
        self.num_uses = 1
        self.priority = 0
        self.detached = False

    @property
    def length(self) -> int:
        """The length in pages."""
        return len(self.pages) or len(self.host_slots)

    def check(self, page_size: int) -> list[str]:
        """Return the inconsistencies found between the node and its children, as sentences."""
        problems = []
        if len(self.tokens) != self.length * page_size or not self.length:
            problems.append(f"a cached run has {len(self.tokens)} tokens in {self.length} pages")
        if len(self.host_slots) > self.length:
            problems.append(f"a cached run of {self.length} pages has {len(self.host_slots)} copies")
        resident = sum(bool(child.pages) for child in self.children.values())
        if resident != self.num_resident_children or (resident and not self.pages):
            problems.append(
                f"a cached run of {len(self.pages)} pages on the device counts {self.num_resident_children} resident "
                f"children, but has {resident}"
            )
        return problems

    def unlink(self, page_size: int) -> RadixNode:
        """Remove this node and its descendants from the tree; return its parent."""
        parent = self.parent
        assert parent is not None
        del parent.children[tuple(self.tokens[:page_size])]
        parent.num_resident_children -= bool(self.pages)
        return parent

    def num_equal_pages(self, tokens: list[int], at: int, end: int, page_size: int) -> int:
        """Return how many whole pages of the run equal `tokens[at:end]`; the first one must.

        Finds the first difference by bisection over slices, because Python compares whole lists fast.
        """
        most = min(self.length, (end - at) // page_size)
        if self.tokens[: most * page_size] == tokens[at : at + most * page_size]:
            return most
        low, high = 1, most  # the first `low` pages are equal, the first `high` are not
        while high - low > 1:
            middle = (low + high) // 2
            first, last = low * page_size, middle * page_size
            if self.tokens[first:last] == tokens[at + first : at + last]:
                low = middle
            else:
                high = middle
        return low

    def take_uses(self, other: RadixNode) -> None:
        """Count the uses of the node that this one was a part of."""
        self.last_used, self.num_uses, self.priority = other.last_used, other.num_uses, other.priority

    def split_windows(self, length: int) -> list[list[int]]:
        """Keep the window pages of the first `length` pages of the run, and return the others."""
        rest = self.length - length
        kept = [pages[: max(0, len(pages) - rest)] for pages in self.windows]
        others = [pages[len(first) :] for pages, first in zip(self.windows, kept)]
        self.windows = kept
        return others

    def split_tail(self, length: int, page_size: int) -> RadixNode:
        """Keep the first `length` pages and return the rest as a new node, the only child. The node is not locked."""
        at = length * page_size
        windows = self.split_windows(length)
        tail = RadixNode(self, self.tokens[at:], self.pages[length:], self.host_slots[length:], windows)
        tail.take_uses(self)
        tail.children = self.children
        tail.num_resident_children = self.num_resident_children
        tail.states, self.states = self.states, tail.states
        tail.num_states = self.num_states
        for child in tail.children.values():
            child.parent = tail
        del self.tokens[at:], self.pages[length:], self.host_slots[length:]
        self.children = {tuple(tail.tokens[:page_size]): tail}
        self.num_resident_children = int(bool(tail.pages))
        return tail


def descendants(root: RadixNode) -> Iterator[RadixNode]:
    """Yield all nodes below `root`."""
    stack = list(root.children.values())
    while stack:
        node = stack.pop()
        yield node
        stack.extend(node.children.values())


def path_to(node: RadixNode) -> Iterator[RadixNode]:
    """Yield the node and its ancestors, but for the root."""
    while node.parent is not None:
        yield node
        node = node.parent


def walk(node: RadixNode, tokens: list[int], limit: int, page_size: int) -> Iterator[tuple[RadixNode, int]]:
    """Yield the nodes below `node` along `tokens[:limit]`, and how many pages of each match.

    Only the last node may match in part. The caller may split a node that it got.
    """
    end = min(len(tokens), limit) // page_size * page_size
    at = 0
    while at < end:
        child = node.children.get(tuple(tokens[at : at + page_size]))
        if child is None:
            return
        pages = child.num_equal_pages(tokens, at, end, page_size)
        is_whole = pages == child.length  # computed before the yield, as the caller may split the child
        yield child, pages
        if not is_whole:
            return
        at += pages * page_size
        node = child
