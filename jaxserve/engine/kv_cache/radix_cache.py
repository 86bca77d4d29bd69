"""The prefix cache: a radix tree over whole pages of tokens, one tree a namespace.

It owns the pages of sequences that were computed and may be used again. A running request locks the path to the node
that ends its cached prefix; what nobody has locked can be evicted, least recently used ends first. What the host tier
has a copy of stays in the tree without its pages, and is loaded into others when a request needs it. Pages come to it
from requests and go back to the pool; it never allocates. It knows no requests, only nodes.
"""

from __future__ import annotations

from collections.abc import Iterator

from jaxserve.engine.kv_cache.host_tier import HostTier
from jaxserve.engine.kv_cache.page_pool import PagePool
from jaxserve.engine.kv_cache.radix_node import ByLastUse, Node, below


class RadixCache:
    """`disabled`, it holds roots alone, so that nothing is ever found or kept. Without a `tier`, what is evicted is
    gone."""

    def __init__(self, pool: PagePool, tier: HostTier | None = None, *, disabled: bool = False) -> None:
        self.tier = tier or HostTier(0, pool.page_size)
        self._pool = pool
        self._page_size = pool.page_size
        self._disabled = disabled
        self._roots: dict[str, Node] = {}
        self._detached: set[Node] = set()
        self._time = 0
        self._ends = ByLastUse(_is_evictable)
        self.num_evictable = 0

    def match(self, namespace: str, tokens: list[int], limit: int) -> tuple[Node, list[int]]:
        """The node that ends the longest cached prefix of `tokens`, at most `limit` of them, and its pages.

        What comes after these, up to the node, only the host has: see `num_absent` and `load`. A node that is matched
        in part is split, so that the prefix ends with a node; all of the path is marked as used.
        """
        self._time += 1
        node = self._root(namespace)
        pages: list[int] = []
        for child, length in self._walk(node, tokens, limit):
            node = child if length == child.length else self._split(child, length)
            node.last_used = self._time
            pages += node.pages
        self._offer(node)
        if not node.pages:
            self._offer(_resident(node))
        return node, pages

    def match_length(self, namespace: str, tokens: list[int], limit: int) -> int:
        """How many tokens `match` would find; changes nothing."""
        root = self._roots.get(namespace)
        if root is None:
            return 0
        return self._page_size * sum(length for _, length in self._walk(root, tokens, limit))

    def num_absent(self, node: Node) -> int:
        """How many pages at the end of the prefix that ends at `node` only the host has."""
        count = 0
        while not node.pages and node.parent is not None:
            count += len(node.host)
            node = node.parent
        return count

    def load(self, node: Node, pages: list[int]) -> None:
        """Take over `pages`, into which the next plan loads what is absent of the locked prefix that ends at `node`."""
        end = len(pages)
        while not node.pages and node.parent is not None:
            start = end - len(node.host)
            node.pages = pages[start:end]
            node.parent.num_resident += 1
            self.tier.load(node)
            node, end = node.parent, start
        assert end == 0, "pages that nothing is loaded into"

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
        if self._disabled or node.detached or not pages:
            return node, 0
        self._time += 1
        if node.parent is not None and node.locks == 1 and not node.children:
            # The request's own leaf: it grows, so that a prompt in chunks doesn't become a chain of nodes.
            node.tokens += tokens
            node.pages += pages
            node.last_used = self._time
            self.tier.entered(node)
            return node, len(pages)
        return self._hang(node, tokens, pages, locks=1)

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
            rest = tokens[len(found) * self._page_size :]
            node, taken = self._hang(_resident(node), rest, pages[known:], locks=0)
            self.num_evictable += taken
            self._offer(node)

    def evict(self, num_pages: int) -> int:
        """Give up to `num_pages` pages back to the pool, the least recently used first; returns how many."""
        left = num_pages
        while left > 0 and (node := self._ends.pop()) is not None:
            if len(node.pages) > left:
                node = node.cut(len(node.pages) - left, self._page_size)
            left -= len(node.pages)
            self._evict(node)
        return num_pages - left

    def flush(self) -> int:
        """Forget everything, copies too; pages that nobody uses go back to the pool, and their number is returned."""
        freed = 0
        for root in self._roots.values():
            for node in list(below(root)):
                node.detached = True
                self.tier.forget(node)
                if node.locks:
                    self._detached.add(node)
                else:
                    freed += len(node.pages)
                    self._pool.release(node.pages)
            root.detached = True
        self._roots.clear()
        self._ends.clear()
        self.tier.clear()
        self.num_evictable = 0
        return freed

    def pages(self) -> Iterator[int]:
        """Every page the cache owns."""
        for root in self._roots.values():
            for node in below(root):
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
        slots: list[int] = []
        for root in self._roots.values():
            for node in below(root):
                if node.locks != expected.get(id(node), 0):
                    problems.append(f"a cached run of {node.length} pages counts {node.locks} locks, not "
                                    f"{expected.get(id(node), 0)}")  # fmt: skip
                problems += self._check_node(node)
                evictable += 0 if node.locks else len(node.pages)
                slots += node.host
        if evictable != self.num_evictable:
            problems.append(f"{self.num_evictable} cached pages are said to be evictable, but {evictable} are")
        return problems + self.tier.check(slots)

    def _check_node(self, node: Node) -> list[str]:
        problems = []
        if len(node.tokens) != node.length * self._page_size or not node.length:
            problems.append(f"a cached run has {len(node.tokens)} tokens in {node.length} pages")
        if len(node.host) > node.length:
            problems.append(f"a cached run of {node.length} pages has {len(node.host)} copies")
        resident = sum(bool(child.pages) for child in node.children.values())
        if resident != node.num_resident or (resident and not node.pages):
            problems.append(f"a cached run of {len(node.pages)} pages on the device counts {node.num_resident} runs "
                            f"after it on the device, which are {resident}")  # fmt: skip
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
            is_whole = pages == child.length  # asked now: whoever gets it may split it
            yield child, pages
            if not is_whole:
                return
            at += pages * size
            node = child

    def _agreeing(self, node: Node, tokens: list[int], at: int, end: int) -> int:
        """How many whole pages of `node` are `tokens` from `at` on; at least one. Compares runs, halving where they
        differ: comparing lists is what Python does fast."""
        size = self._page_size
        most = min(node.length, (end - at) // size)
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

    def _hang(self, node: Node, tokens: list[int], pages: list[int], *, locks: int) -> tuple[Node, int]:
        """Put `pages` into the tree after `node`, as far as it has none for `tokens`; returns the node that ends them,
        and how many were put there. Where only the host had these tokens, they have pages then."""
        size, taken = self._page_size, 0
        while taken < len(pages):
            key = tuple(tokens[taken * size : (taken + 1) * size])
            child = node.children.get(key)
            if child is None:
                count = len(pages) - taken
                child = node.children[key] = Node(node, tokens[taken * size :], pages[taken:])
            elif child.pages:
                break
            else:
                count = self._agreeing(child, tokens, taken * size, len(tokens))
                child = child if count == child.length else self._split(child, count)
                child.pages = pages[taken : taken + count]
            child.locks = locks
            child.last_used = self._time
            node.num_resident += 1
            self.tier.entered(child)
            node, taken = child, taken + count
        return node, taken

    def _evict(self, node: Node) -> None:
        """A run leaves the device; as much of it as the host has a copy of, or gets one, stays in the tree."""
        parent = node.parent
        assert parent is not None
        self.num_evictable -= len(node.pages)
        self._pool.release(node.pages)
        kept = self.tier.keep(node)
        if kept < len(node.pages):
            # What only the host had after it was given up first.
            gone = node.cut(kept, self._page_size) if kept else node
            assert not gone.children
            gone.unlink(self._page_size)
            gone.pages = []
        if kept:
            node.pages = []
            parent.num_resident -= 1
            self.tier.offer(node)
        self._offer(parent)

    def _split(self, node: Node, length: int) -> Node:
        """Cut a node after `length` pages; returns the first part, which takes the node's place."""
        size, parent = self._page_size, node.parent
        assert parent is not None
        upper = Node(parent, node.tokens[: length * size], node.pages[:length], node.host[:length])
        upper.locks = node.locks
        upper.last_used = node.last_used
        upper.num_resident = int(bool(node.pages))
        parent.children[tuple(upper.tokens[:size])] = upper
        node.tokens, node.parent = node.tokens[length * size :], upper
        node.pages, node.host = node.pages[length:], node.host[length:]
        upper.children[tuple(node.tokens[:size])] = node
        return upper

    def _offer(self, node: Node) -> None:
        """A node may have become one that can be given up, or was used again."""
        if node.pages:
            self._ends.offer(node)
        else:
            self.tier.offer(node)


def _is_evictable(node: Node) -> bool:
    return not node.locks and not node.num_resident and bool(node.pages) and not node.detached


def _resident(node: Node) -> Node:
    """The last node on the way to this one that has pages, or the root."""
    while not node.pages and node.parent is not None:
        node = node.parent
    return node
