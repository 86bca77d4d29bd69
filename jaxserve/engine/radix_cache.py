"""The prefix cache: a radix tree over whole pages of tokens, one tree a namespace.

It owns the pages of sequences that were computed and may be used again. A running request locks the path to the node
that ends its cached prefix; what nobody has locked can be evicted, least recently used leaves first and from their
ends. Pages come to it from requests and go back to the pool; it never allocates. It knows no requests, only nodes.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from jaxserve.engine.pages import PagePool

_Key = tuple[int, ...]
_FEW_LEAVES = 1024


class Node:
    """A run of whole pages: `tokens` are `len(pages) * page_size` ids. The root of a namespace has none.

    `locks` counts the requests whose prefix ends here or below. A node that a flush has cut off is `detached`: it keeps
    its pages while it is locked, and nothing finds it any more.
    """

    __slots__ = ("children", "detached", "last_used", "locks", "pages", "parent", "tokens")

    def __init__(self, parent: Node | None, tokens: list[int], pages: list[int]) -> None:
        self.parent = parent
        self.tokens = tokens
        self.pages = pages
        self.children: dict[_Key, Node] = {}
        self.locks = 0
        self.last_used = 0
        self.detached = False


class RadixCache:
    """`disabled`, it holds roots alone, so that nothing is ever found or kept."""

    def __init__(self, pool: PagePool, *, disabled: bool = False) -> None:
        self._pool = pool
        self._page_size = pool.page_size
        self._disabled = disabled
        self._roots: dict[str, Node] = {}
        self._detached: set[Node] = set()
        self._time = 0
        # Evictable leaves by time of use; an entry whose time is not the node's any more is stale.
        self._leaves: list[tuple[int, int, Node]] = []
        self._compact_at = _FEW_LEAVES
        self.num_evictable = 0

    def match(self, namespace: str, tokens: list[int], limit: int) -> tuple[Node, list[int]]:
        """The node that ends the longest cached prefix of `tokens`, at most `limit` of them, and its pages.

        A node that is matched in part is split, so that the prefix ends with a node; all of the path is marked as used.
        """
        self._time += 1
        node = self._root(namespace)
        pages: list[int] = []
        for child, length in self._walk(node, tokens, limit):
            node = child if length == len(child.pages) else self._split(child, length)
            node.last_used = self._time
            pages += node.pages
        self._offer(node)
        return node, pages

    def match_length(self, namespace: str, tokens: list[int], limit: int) -> int:
        """How many tokens `match` would find; changes nothing."""
        root = self._roots.get(namespace)
        if root is None:
            return 0
        return self._page_size * sum(length for _, length in self._walk(root, tokens, limit))

    def lock(self, node: Node) -> None:
        """A request uses the prefix that ends at `node`: none of it is evicted until `unlock`."""
        at: Node | None = node
        while at is not None:
            if at.locks == 0 and not at.detached:
                self.num_evictable -= len(at.pages)
            at.locks += 1
            at = at.parent

    def unlock(self, node: Node) -> None:
        """A request is done with the prefix that ends at `node`."""
        at: Node | None = node
        while at is not None:
            at.locks -= 1
            if at.locks == 0:
                if at.detached:
                    self._pool.release(at.pages)
                    self._detached.discard(at)
                else:
                    self.num_evictable += len(at.pages)
                    self._offer(at)
            at = at.parent

    def extend(self, node: Node, tokens: list[int], pages: list[int]) -> tuple[Node, int]:
        """Take over `pages`, which hold the whole pages `tokens` that follow the locked `node`.

        Returns the locked node that ends them, with `node` unlocked, and how many pages were taken over. Fewer, where
        the tree has other pages for these tokens already, or a flush has cut `node` off: the rest stays the caller's.
        """
        if self._disabled or node.detached or not pages or tuple(tokens[: self._page_size]) in node.children:
            return node, 0
        self._time += 1
        if node.parent is not None and node.locks == 1 and not node.children:
            # The request's own leaf: it grows, so that a prompt in chunks doesn't become a chain of nodes.
            node.tokens += tokens
            node.pages += pages
            node.last_used = self._time
            return node, len(pages)
        child = Node(node, tokens, pages)
        child.last_used = self._time
        child.locks = 1
        node.children[tuple(tokens[: self._page_size])] = child
        return child, len(pages)

    def adopt(self, namespace: str, tokens: list[int], pages: list[int], start: int) -> None:
        """Take over what the tree lacks of a sequence that has ended, and release the rest.

        `tokens` are those of whole pages from the sequence's first on; `pages` hold them from page `start` on.
        """
        if self._disabled or not pages:
            self._pool.release(pages)
            return
        node, found = self.match(namespace, tokens, len(tokens))
        known = len(found) - start
        if known < 0:  # what came before has been evicted or flushed, and these pages are of no use without it
            self._pool.release(pages)
            return
        self._pool.release(pages[:known])
        if pages[known:]:
            child = Node(node, tokens[len(found) * self._page_size :], pages[known:])
            child.last_used = self._time
            node.children[tuple(child.tokens[: self._page_size])] = child
            self.num_evictable += len(child.pages)
            self._offer(child)

    def evict(self, num_pages: int) -> int:
        """Give up to `num_pages` pages back to the pool, the least recently used first; returns how many."""
        left = num_pages
        while left > 0 and self._leaves:
            last_used, _, node = heapq.heappop(self._leaves)
            if node.last_used != last_used or not _is_evictable(node):
                continue
            cut = max(len(node.pages) - left, 0)
            freed = node.pages[cut:]
            left -= len(freed)
            self._pool.release(freed)
            self.num_evictable -= len(freed)
            key = tuple(node.tokens[: self._page_size])
            del node.pages[cut:], node.tokens[cut * self._page_size :]
            if node.pages:
                self._offer(node)
            else:
                parent = node.parent
                assert parent is not None
                del parent.children[key]
                self._offer(parent)
        return num_pages - left

    def flush(self) -> int:
        """Forget everything; pages that nobody uses go back to the pool, and their number is returned."""
        freed = 0
        for root in self._roots.values():
            for node in list(_below(root)):
                node.detached = True
                if node.locks:
                    self._detached.add(node)
                else:
                    freed += len(node.pages)
                    self._pool.release(node.pages)
            root.detached = True
        self._roots.clear()
        self._leaves.clear()
        self.num_evictable = 0
        return freed

    def pages(self) -> Iterator[int]:
        """Every page the cache owns."""
        for root in self._roots.values():
            for node in _below(root):
                yield from node.pages
        for node in self._detached:
            yield from node.pages

    def check(self, ends: list[Node]) -> list[str]:
        """What is wrong with the tree, as sentences; `ends` are the nodes that running requests have locked."""
        problems = []
        expected: dict[int, int] = {}
        for end in ends:
            at: Node | None = end
            while at is not None:
                expected[id(at)] = expected.get(id(at), 0) + 1
                at = at.parent
        evictable = 0
        for root in self._roots.values():
            for node in _below(root):
                if node.locks != expected.get(id(node), 0):
                    problems.append(f"a cached run of {len(node.pages)} pages counts {node.locks} locks, not "
                                    f"{expected.get(id(node), 0)}")  # fmt: skip
                if len(node.tokens) != len(node.pages) * self._page_size or not node.pages:
                    problems.append(f"a cached run has {len(node.tokens)} tokens in {len(node.pages)} pages")
                evictable += 0 if node.locks else len(node.pages)
        if evictable != self.num_evictable:
            problems.append(f"{self.num_evictable} cached pages are said to be evictable, but {evictable} are")
        return problems

    def _root(self, namespace: str) -> Node:
        root = self._roots.get(namespace)
        if root is None:
            root = self._roots[namespace] = Node(None, [], [])
        return root

    def _walk(self, node: Node, tokens: list[int], limit: int) -> Iterator[tuple[Node, int]]:
        """The nodes along `tokens` and how many pages of each agree with them; only the last may agree in part."""
        size = self._page_size
        end = min(len(tokens), limit) // size * size
        at = 0
        while at < end:
            child = node.children.get(tuple(tokens[at : at + size]))
            if child is None:
                return
            pages = self._agreeing(child, tokens, at, end)
            yield child, pages
            if pages < len(child.pages):
                return
            at += pages * size
            node = child

    def _agreeing(self, node: Node, tokens: list[int], at: int, end: int) -> int:
        """How many whole pages of `node` are `tokens` from `at` on; at least one. Compares runs, halving where they
        differ: comparing lists is what Python does fast."""
        size = self._page_size
        most = min(len(node.pages), (end - at) // size)
        if node.tokens[: most * size] == tokens[at : at + most * size]:
            return most
        low, high = 1, most  # the first page agrees, all of `high` don't
        while high - low > 1:
            middle = (low + high) // 2
            if node.tokens[low * size : middle * size] == tokens[at + low * size : at + middle * size]:
                low = middle
            else:
                high = middle
        return low

    def _split(self, node: Node, length: int) -> Node:
        """Cut a node after `length` pages; returns the first part, which takes the node's place."""
        size, parent = self._page_size, node.parent
        assert parent is not None
        upper = Node(parent, node.tokens[: length * size], node.pages[:length])
        upper.locks = node.locks
        upper.last_used = node.last_used
        parent.children[tuple(upper.tokens[:size])] = upper
        node.tokens, node.pages, node.parent = node.tokens[length * size :], node.pages[length:], upper
        upper.children[tuple(node.tokens[:size])] = node
        return upper

    def _offer(self, node: Node) -> None:
        """A node may have become a leaf that can be evicted, or one that was used again."""
        if not _is_evictable(node):
            return
        heapq.heappush(self._leaves, (node.last_used, id(node), node))
        if len(self._leaves) > self._compact_at:
            self._leaves = [entry for entry in set(self._leaves) if entry[0] == entry[2].last_used]
            heapq.heapify(self._leaves)
            self._compact_at = 2 * len(self._leaves) + _FEW_LEAVES


def _is_evictable(node: Node) -> bool:
    return not node.locks and not node.children and bool(node.pages) and not node.detached


def _below(root: Node) -> Iterator[Node]:
    stack = list(root.children.values())
    while stack:
        node = stack.pop()
        yield node
        stack.extend(node.children.values())
