"""The prefix cache: a radix tree over whole pages of tokens, one tree per namespace.

It owns the pages of computed sequences that may be used again. A running request locks the path to the node that ends
its cached prefix. Unlocked nodes can be evicted, leaves first, in the order of a policy. An evicted node that the host
tier has a copy of stays in the tree without pages; it is loaded into new pages when a request needs it. The cache takes
pages over from requests and returns them to the pool. It knows no requests, only nodes.

This holds for the first KV group, which keeps whole sequences. Of a group with a window, a node has pages for the end
of its run only. A prefix is found only as far as the pages of a window before its end are there: `prefix_windows`.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence

from jaxserve.engine.kv_cache.eviction import EvictionHeap, EvictionPolicy
from jaxserve.engine.kv_cache.host_tier import HostTier
from jaxserve.engine.kv_cache.page_pool import PagePool
from jaxserve.engine.kv_cache.prefix_states import PrefixStates, StateOwner
from jaxserve.engine.kv_cache.prefix_windows import PrefixWindows
from jaxserve.engine.kv_cache.radix_node import RadixNode, descendants, path_to, walk
from jaxserve.engine.kv_cache.state_pool import StatePool
from jaxserve.engine.kv_cache.window_pages import WindowPages, WindowRun


class RadixCache:
    """The cached prefixes over the pages of `pool`, and of `windows` for KV groups with a window.

    A model that keeps a state for each sequence has `states`, and no windows. When `disabled`, it holds only roots, so
    nothing is found or kept. Without a `tier`, evicted pages are lost. All of these have the same `policy`. The tier's
    recorder, if there is one, learns which pages can be found.
    """

    def __init__(
        self,
        pool: PagePool,
        tier: HostTier | None = None,
        windows: Sequence[WindowPages] = (),
        states: StatePool | None = None,
        policy: EvictionPolicy = "lru",
        *,
        disabled: bool = False,
    ) -> None:
        assert states is None or not windows, "windows beside states"
        self.tier = tier or HostTier(0, pool.page_size)
        self.windows = PrefixWindows(windows, self.tier, pool.page_size)
        self.states = None if states is None else PrefixStates(states, self.tier, pool.page_size)
        self._pool = pool
        self._page_size = pool.page_size
        self._disabled = disabled
        self._recorder = self.tier.recorder
        self._roots: dict[Hashable, RadixNode] = {}
        self._detached: set[RadixNode] = set()
        self._time = 0
        self._counts_uses = policy != "lru"
        self._evictable = EvictionHeap(_is_evictable, policy)
        self.num_evictable = 0

    def match(self, namespace: Hashable, tokens: list[int], limit: int) -> tuple[RadixNode, list[int]]:
        """Return the node that ends the longest cached prefix of `tokens[:limit]`, and the prefix's resident pages.

        The rest of the prefix, up to the node, is only in host memory: see `num_host_only` and `load`. A node that
        matches in part is split, so that the prefix ends with a node; the whole path is marked as used. With states,
        the tokens after `PrefixStates.before(node)` are to be computed again.
        """
        root = self._root(namespace)
        path = walk(root, tokens, limit, self._page_size)
        if self.states is not None:
            return self._take(root, self.states.usable(list(path)))
        return self._take(root, self.windows.usable(path))

    def match_length(self, namespace: Hashable, tokens: list[int], limit: int) -> int:
        """Return how many tokens a request would not compute after `match`, without changing anything."""
        root = self._roots.get(namespace)
        if root is None:
            return 0
        path = walk(root, tokens, limit, self._page_size)
        if self.states is not None:
            return self.states.known_length(list(path))
        return self._page_size * sum(length for _, length in self.windows.usable(path))

    def end_of(self, namespace: Hashable, tokens: list[int]) -> RadixNode | None:
        """Return the node that ends the prefix `tokens`, which is split if needed; None if pages of it are not on the
        device."""
        root = self._roots.get(namespace)
        path = [] if root is None else list(walk(root, tokens, len(tokens), self._page_size))
        if sum(length for _, length in path) * self._page_size < len(tokens) or not path[-1][0].pages:
            return None
        node, length = path[-1]
        return node if length == node.length else self._split_head(node, length)

    def num_host_only(self, node: RadixNode) -> int:
        """Return how many pages at the end of the prefix that ends at `node` are only in host memory."""
        count = 0
        while not node.pages and node.parent is not None:
            count += len(node.host_slots)
            node = node.parent
        return count

    def load(self, node: RadixNode, pages: list[int]) -> None:
        """Load the host-only part of the locked prefix that ends at `node` into `pages`, and take them over."""
        end = len(pages)
        loaded = []
        while not node.pages and node.parent is not None:
            start = end - len(node.host_slots)
            node.pages = pages[start:end]
            node.parent.num_resident_children += 1
            self.tier.load(node)
            loaded.append(node)
            node, end = node.parent, start
        assert end == 0, "more pages than there are to load"
        if self._recorder is not None:
            for node in reversed(loaded):
                self._recorder.stored(node)

    def count_use(self, node: RadixNode, priority: int) -> None:
        """Count a request that begins with the prefix that ends at `node`, if the order of eviction depends on it."""
        if self._counts_uses:
            for one in path_to(node):
                one.num_uses += 1
                one.priority = max(one.priority, priority)

    def lock(self, node: RadixNode) -> None:
        """Protect the prefix that ends at `node` from eviction until `unlock`."""
        at: RadixNode | None = node
        while at is not None:
            if at.locks == 0 and not at.detached:
                self.num_evictable -= len(at.pages)
            at.locks += 1
            at = at.parent

    def unlock(self, node: RadixNode) -> None:
        """Undo one `lock` of the prefix that ends at `node`."""
        at: RadixNode | None = node
        while at is not None:
            at.locks -= 1
            if at.locks == 0:
                if at.detached:
                    self._pool.release(at.pages)
                    self._detached.discard(at)
                else:
                    self.num_evictable += len(at.pages)
                    self._push_evictable(at)
            at = at.parent

    def extend(
        self,
        node: RadixNode,
        tokens: list[int],
        pages: list[int],
        start: int = 0,
        runs: Sequence[WindowRun] = (),
        priority: int = 0,
    ) -> tuple[RadixNode, int]:
        """Take over `pages`, which hold `tokens` (whole pages) that follow the locked `node`.

        Return the node that ends them, which is now locked in place of `node`, and the number of pages taken over. That
        is fewer than given if the tree already has pages for these tokens or a flush has detached `node`; the caller
        keeps the rest. `runs` are the request's window pages, of which the tree takes over those that it lacks. `start`
        is the index of the first of `pages` in the sequence. `priority` is the request's.
        """
        if self._disabled or node.detached or not pages:
            return node, 0
        self._time += 1
        grows = node.parent is not None and node.locks == 1 and not node.children and node.states == _NO_STATES
        if grows and node.num_uses == 1 and not self.tier.windows:
            # The leaf is used by this request only. Grow it, so that a chunked prompt doesn't become a chain of nodes.
            node.tokens += tokens
            node.pages += pages
            node.last_used = self._time
            if self._recorder is not None:
                self._recorder.stored(node, node.length - len(pages))
            self.windows.grow(node, start, len(pages), runs)
            self.tier.mark_added(node)
            return node, len(pages)
        last, taken = self._attach(node, tokens, pages, priority, locks=1)
        self._share_windows(node, tokens, start, runs)
        return last, taken

    def insert(
        self,
        namespace: Hashable,
        tokens: list[int],
        pages: list[int],
        start: int,
        runs: Sequence[WindowRun] = (),
        priority: int = 0,
    ) -> None:
        """Take over the pages of a stopped sequence that the tree lacks, and release the others.

        `tokens` are the sequence's whole pages from its beginning; `pages` hold them from page index `start` on. `runs`
        are its window pages: the tree takes over those that it lacks, and the caller releases all of them. `priority`
        is the sequence's.
        """
        if self._disabled or not (pages or runs):
            self._pool.release(pages)
            return
        root = self._root(namespace)
        node, found = self._take(root, list(walk(root, tokens, len(tokens), self._page_size)))
        known = len(found) - start
        if known < 0:  # the pages before these have been evicted or flushed, so these would never be found
            self._pool.release(pages)
            return
        self._pool.release(pages[:known])
        if pages[known:]:
            rest = tokens[len(found) * self._page_size :]
            node, taken = self._attach(_last_resident(node), rest, pages[known:], priority, locks=0)
            self.num_evictable += taken
            self._push_evictable(node)
        self._share_windows(root, tokens, 0, runs)

    def evict(self, num_pages: int) -> int:
        """Return up to `num_pages` pages to the pool, in the order of the policy; return how many."""
        left = num_pages
        while left > 0 and (node := self._evictable.pop()) is not None:
            if len(node.pages) > left:
                node = self._split_tail(node, len(node.pages) - left)
            left -= len(node.pages)
            self._evict(node)
        return num_pages - left

    def flush(self) -> int:
        """Remove all prefixes and host copies, release the unlocked pages, and return how many were released."""
        freed = 0
        if self._recorder is not None:
            self._recorder.clear()
        for root in self._roots.values():
            for node in list(descendants(root)):
                node.detached = True
                self.tier.drop(node)
                self._drop_more(node)
                if node.locks:
                    self._detached.add(node)
                else:
                    freed += len(node.pages)
                    self._pool.release(node.pages)
            root.detached = True
        self._roots.clear()
        self._evictable.clear()
        self.windows.clear()
        self.tier.clear()
        self.num_evictable = 0
        return freed

    def pages(self) -> Iterator[int]:
        """Yield every page that the cache owns."""
        for root in self._roots.values():
            for node in descendants(root):
                yield from node.pages
        for node in self._detached:
            yield from node.pages

    def check(
        self,
        ends: list[RadixNode],
        used: Sequence[Iterable[int]] = (),
        states: Sequence[StateOwner] = (),
    ) -> list[str]:
        """Return the inconsistencies found, as sentences.

        `ends` are the nodes that running requests have locked, `used` the window pages that they use, by group, and
        `states` have their rows of states.
        """
        nodes = [node for root in self._roots.values() for node in descendants(root)]
        problems = self.windows.check(used, nodes)
        if self.states is not None:
            problems += self.states.check(states, nodes)
        expected: dict[int, int] = {}
        for end in ends:
            at: RadixNode | None = end
            while at is not None:
                expected[id(at)] = expected.get(id(at), 0) + 1
                at = at.parent
        evictable = 0
        slots: list[int] = []
        for node in nodes:
            if node.locks != expected.get(id(node), 0):
                problems.append(
                    f"a cached run of {node.length} pages counts {node.locks} locks, not {expected.get(id(node), 0)}"
                )
            problems += node.check(self._page_size)
            evictable += 0 if node.locks else len(node.pages)
            slots += node.host_slots
        if evictable != self.num_evictable:
            problems.append(f"{self.num_evictable} cached pages are said to be evictable, but {evictable} are")
        if self._recorder is not None:
            problems += self._recorder.check(nodes)
        return problems + self.tier.check(slots, nodes)

    def _root(self, namespace: Hashable) -> RadixNode:
        root = self._roots.get(namespace)
        if root is None:
            root = self._roots[namespace] = RadixNode(None, [], [])
            if self._recorder is not None:
                self._recorder.add_root(root, namespace)
        return root

    def _take(self, root: RadixNode, path: list[tuple[RadixNode, int]]) -> tuple[RadixNode, list[int]]:
        """Return the node that ends a path, of which only the last one may match in part, and its resident pages."""
        self._time += 1
        node = root
        pages: list[int] = []
        for child, length in path:
            node = child if length == child.length else self._split_head(child, length)
            node.last_used = self._time
            pages += node.pages
        return node, pages

    def _share_windows(self, node: RadixNode, tokens: list[int], start: int, runs: Sequence[WindowRun]) -> None:
        """Give the nodes below `node` along `tokens` the window pages of a request that they lack.

        `node` ends before page `start` of the sequence.
        """
        if not runs:
            return
        for child, length in list(walk(node, tokens, len(tokens), self._page_size)):
            if child.pages and self.windows.lacks_any(child, start, runs):
                one = child if length == child.length else self._split_head(child, length)
                self.windows.give(one, start, runs)
                self.tier.mark_added(one)
            start += length

    def _attach(
        self, node: RadixNode, tokens: list[int], pages: list[int], priority: int, *, locks: int
    ) -> tuple[RadixNode, int]:
        """Put `pages` into the tree below `node` until a page of `tokens` is already resident there.

        Return the last node that got pages, and how many pages were put. Host-only nodes on the way become resident.
        """
        size, taken = self._page_size, 0
        while taken < len(pages):
            key = tuple(tokens[taken * size : (taken + 1) * size])
            child = node.children.get(key)
            if child is None:
                count = len(pages) - taken
                child = node.children[key] = RadixNode(node, tokens[taken * size :], pages[taken:])
                child.windows = self.windows.new_lists()
                child.priority = priority
            elif child.pages:
                break
            else:
                count = child.num_equal_pages(tokens, taken * size, len(tokens), size)
                child = child if count == child.length else self._split_head(child, count)
                child.pages = pages[taken : taken + count]
            child.locks = locks
            child.last_used = self._time
            node.num_resident_children += 1
            if self._recorder is not None:
                self._recorder.stored(child)
            self.tier.mark_added(child)
            node, taken = child, taken + count
        return node, taken

    def _evict(self, node: RadixNode) -> None:
        """Release the pages of `node`; the part that has or now gets copies in host memory stays in the tree."""
        parent = node.parent
        assert parent is not None
        self.num_evictable -= len(node.pages)
        self._pool.release(node.pages)
        kept = self.tier.save(node)
        if self._recorder is not None:
            self._recorder.evicted(node.pages)
        if kept < len(node.pages):
            # Its host-only descendants were evicted first, to make room for its copies.
            lost = self._split_tail(node, kept) if kept else node
            assert not lost.children
            lost.unlink(self._page_size)
            self._drop_more(lost)
            self.tier.drop(lost)
            lost.pages = []
        if kept:
            self.tier.save_windows(node)
            self.tier.save_state(node)
            self._drop_more(node)
            node.pages = []
            parent.num_resident_children -= 1
            self.tier.push_evictable(node)
        self._push_evictable(parent)

    def _split_head(self, node: RadixNode, length: int) -> RadixNode:
        """Split `node` after `length` pages; return the first part, a new node that takes its place in the tree."""
        size, parent = self._page_size, node.parent
        assert parent is not None
        lower_windows = node.split_windows(length)
        upper = RadixNode(parent, node.tokens[: length * size], node.pages[:length], node.host_slots[:length])
        upper.windows, node.windows = node.windows, lower_windows
        upper.locks = node.locks
        upper.take_uses(node)
        upper.num_resident_children = int(bool(node.pages))
        upper.num_states = node.num_states
        parent.children[tuple(upper.tokens[:size])] = upper
        node.tokens, node.parent = node.tokens[length * size :], upper
        node.pages, node.host_slots = node.pages[length:], node.host_slots[length:]
        upper.children[tuple(node.tokens[:size])] = node
        self.windows.split(upper, node)
        return upper

    def _drop_more(self, node: RadixNode) -> None:
        """Take from a node what it has on the device besides its pages: those of windows, and a state."""
        self.windows.drop(node)
        if self.states is not None:
            self.states.pool.drop(node)

    def _split_tail(self, node: RadixNode, length: int) -> RadixNode:
        """Split `node` after `length` pages; return the last part, a new node."""
        tail = node.split_tail(length, self._page_size)
        self.windows.split(node, tail)
        if self.states is not None:
            self.states.moved(tail)
        return tail

    def _push_evictable(self, node: RadixNode) -> None:
        """Record that `node` was used or may have become evictable."""
        if node.pages:
            self._evictable.push(node)
        else:
            self.tier.push_evictable(node)


_NO_STATES = [None, None]


def _is_evictable(node: RadixNode) -> bool:
    return not node.locks and not node.num_resident_children and bool(node.pages) and not node.detached


def _last_resident(node: RadixNode) -> RadixNode:
    """Return the deepest node on the path to `node` that has pages, or the root."""
    while not node.pages and node.parent is not None:
        node = node.parent
    return node
