"""The cache's second tier: which slots of host memory hold copies of cached pages, and which copies to make next.

It owns the host slots, the order in which host-only nodes are evicted, and the copies for the next plan: first all
saves, then all loads, then the step. So the plan that saves a page may reuse it, and the plan that loads a page may
read it. The radix cache owns the tree; this module never touches memory.

`write_through` saves pages in the plan that follows the one that computes them: eviction is immediate, but pages occupy
both memories. `write_back` saves pages when they are evicted: the two memories hold different pages. Of a window group
it saves the last window of a node. States at the ends of nodes are saved like pages.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

from jaxserve.engine.kv_cache.cache_events import CacheEventRecorder
from jaxserve.engine.kv_cache.eviction import EvictionHeap, EvictionPolicy
from jaxserve.engine.kv_cache.page_pool import PagePool
from jaxserve.engine.kv_cache.radix_node import RadixNode
from jaxserve.engine.kv_cache.state_pool import IN_HOST_MEMORY, ON_DEVICE, StatePool
from jaxserve.engine.kv_cache.window_pages import WindowPages

WritePolicy = Literal["write_through", "write_back"]
_Copy = tuple[int, int, int]


class HostTier:
    """Host memory of `num_pages` slots, one page each; with 0 slots nothing is saved.

    `windows` are the slots for pages of KV groups with a window, and there are `num_states` for states. It tells the
    `recorder`, if any, which pages of whole sequences have copies.
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        policy: WritePolicy = "write_through",
        windows: Sequence[WindowPages] = (),
        recorder: CacheEventRecorder | None = None,
        num_states: int = 0,
        eviction: EvictionPolicy = "lru",
    ) -> None:
        self.windows = tuple(windows)
        self.states = StatePool(
            num_states, IN_HOST_MEMORY, None if recorder is None else recorder.count_state, eviction
        )
        self.recorder = recorder
        self._slots = PagePool(num_pages, page_size)
        self._writes_through = num_pages > 0 and policy == "write_through"
        self._added: list[RadixNode] = []
        self._evictable = EvictionHeap(_is_evictable, eviction)
        self._state_group = 1 + len(self.windows)
        self._saves: dict[tuple[int, int], int] = {}
        self._loads: list[_Copy] = []
        self._loading: list[tuple[int, list[int]]] = []
        # Pages of whole sequences
        self.num_saved = 0
        self.num_loaded = 0

    @property
    def num_pages(self) -> int:
        """The capacity in pages."""
        return self._slots.num_pages

    @property
    def num_used(self) -> int:
        """The number of pages held now."""
        return self._slots.num_pages - self._slots.num_free

    def mark_added(self, node: RadixNode) -> None:
        """Record that `node` received pages, which the current plan or an earlier one computes."""
        if self._writes_through:
            self._added.append(node)

    def save_added(self) -> None:
        """Save the pages that earlier plans computed, starting at the beginning of each sequence.

        Call it at the start of a plan.
        """
        for node in self._added:
            unsaved = []
            at = node
            while at.parent is not None and not at.detached and self._is_unsaved(at):
                unsaved.append(at)
                at = at.parent
            for one in reversed(unsaved):
                if self.save(one) < len(one.pages):
                    break  # a lookup can't pass the gap, so the nodes after it would not be found
                self.save_windows(one)
            else:
                if not node.detached:
                    self.save_state(node)
        self._added.clear()

    def save(self, node: RadixNode) -> int:
        """Save the pages of `node` that have no copy, as many as fit; return how many pages then have one."""
        start = len(node.host_slots)
        pages = node.pages[start:]
        slots = self._allocate(len(pages))
        self._saves.update(((0, slot), page) for slot, page in zip(slots, pages))
        node.host_slots += slots
        if self.recorder is not None:
            self.recorder.saved(node, start)
        return len(node.host_slots)

    def save_windows(self, node: RadixNode) -> None:
        """Save the window pages of `node` that have no copy, as many as fit."""
        for group, window in enumerate(self.windows):
            saved = list(window.of(node))
            pages = node.windows[group]
            end = len(pages) - len(saved)
            if end > 0:
                window.use(saved)  # to make room, others are evicted
                count = min(end, window.num_available)
                window.make_room(count)
                slots = window.allocate(count)
                self._saves.update(
                    ((group + 1, slot), page) for slot, page in zip(slots, pages[end - len(slots) : end])
                )
                window.prepend(node, slots)
                window.release(slots + saved)

    def save_evicted_window(self, node: RadixNode) -> None:
        """Save the window pages of `node` before it loses some, unless all were saved when they were computed."""
        if not self._writes_through:
            self.save_windows(node)

    def save_state(self, node: RadixNode) -> None:
        """Save the state of `node` on the device, if it has one without a copy and there is a slot for it."""
        row = node.states[ON_DEVICE]
        if row is not None and node.states[IN_HOST_MEMORY] is None and (slot := self.states.take()) is not None:
            self._saves[self._state_group, slot] = row
            self.states.give(node, slot)

    def load_state(self, node: RadixNode, row: int) -> None:
        """Load the copy of the state of `node`, which is held for this plan, into a row."""
        slot = node.states[IN_HOST_MEMORY]
        assert slot is not None
        self._loads.append((self._state_group, slot, row))

    def load(self, node: RadixNode) -> None:
        """Load the copies of `node`, which was host-only, into its pages."""
        self._loads += ((0, slot, page) for slot, page in zip(node.host_slots, node.pages, strict=True))

    def window_slots(self, group: int, node: RadixNode) -> list[int]:
        """Return the copies of the last pages of `node`, of a group with a window."""
        return self.windows[group].of(node) if self.windows else []

    def use_window(self, group: int, slots: list[int]) -> None:
        """Keep these slots until `release_window`, or until the plan that loads them is made."""
        if slots:
            self.windows[group].use(slots)

    def release_window(self, group: int, slots: list[int]) -> None:
        """Undo a `use_window`."""
        if slots:
            self.windows[group].release(slots)

    def load_window(self, group: int, slots: list[int], pages: list[int]) -> None:
        """Load slots, which are kept by `use_window`, into pages."""
        self._loads += ((group + 1, slot, page) for slot, page in zip(slots, pages, strict=True))
        self._loading.append((group, slots))

    def push_evictable(self, node: RadixNode) -> None:
        """Record that `node` was used or may have become evictable."""
        self._evictable.push(node)

    def drop(self, node: RadixNode) -> None:
        """Free the copies of `node`."""
        self._release(node.host_slots)
        node.host_slots = []
        self.drop_state(node)
        for window in self.windows:
            window.drop(node)

    def drop_state(self, node: RadixNode) -> None:
        """Free the copy of the state of `node`."""
        if (slot := node.states[IN_HOST_MEMORY]) is not None:
            self._saves.pop((self._state_group, slot), None)
            self.states.drop(node)

    def take_copies(self) -> tuple[list[_Copy], list[_Copy]]:
        """Return and reset the copies for the plan being made.

        Those to save are (KV group, page, slot), those to load (KV group, slot, page).
        """
        if not self._saves and not self._loads:
            return [], []
        saves, loads = [(group, page, slot) for (group, slot), page in self._saves.items()], self._loads
        self._saves, self._loads = {}, []
        for group, slots in self._loading:
            self.release_window(group, slots)
        self._loading.clear()
        self.num_saved += sum(group == 0 for group, *_ in saves)
        self.num_loaded += sum(group == 0 for group, *_ in loads)
        return saves, loads

    def clear(self) -> None:
        """Forget all nodes after the tree was flushed and `drop` was called on each of them."""
        self._added.clear()
        self._evictable.clear()

    def check(self, owned: Iterable[int], nodes: list[RadixNode]) -> list[str]:
        """Return the inconsistencies found, as sentences; `owned` are the slots of all `nodes` of the tree."""
        problems = [f"in host memory, {problem}" for problem in self._slots.check(owned)]
        problems += [f"in host memory, {problem}" for problem in self.states.check((), nodes)]
        for window in self.windows:
            problems += [f"in host memory for a window, {problem}" for problem in window.check((), nodes)]
        if self._loads or self._loading:
            problems.append(f"{len(self._loads)} pages were to be loaded by a plan that was never made")
        return problems

    def _allocate(self, count: int) -> list[int]:
        """Allocate up to `count` slots; evict host-only nodes if needed."""
        while self._slots.num_free < count and (node := self._evictable.pop()) is not None:
            self._truncate(node, count - self._slots.num_free)
        return self._slots.allocate(min(count, self._slots.num_free))

    def _truncate(self, node: RadixNode, count: int) -> None:
        """Free up to `count` slots from the end of a host-only leaf."""
        size = self._slots.page_size
        kept = max(len(node.host_slots) - count, 0)
        parent = None if kept else node.unlink(size)
        for window in self.windows:
            window.drop_end(node, len(node.host_slots) - kept)
        self.drop_state(node)
        self._release(node.host_slots[kept:])
        if self.recorder is not None:
            self.recorder.dropped(node.host_slots[kept:])
        del node.host_slots[kept:], node.tokens[kept * size :]
        self._evictable.push(parent or node)

    def _release(self, slots: list[int]) -> None:
        self._slots.release(slots)
        for slot in slots:
            self._saves.pop((0, slot), None)

    def _is_unsaved(self, node: RadixNode) -> bool:
        """Return whether a node has pages without a copy."""
        if len(node.host_slots) < len(node.pages):
            return True
        return any(len(self.window_slots(group, node)) < len(node.windows[group]) for group in range(len(self.windows)))


def _is_evictable(node: RadixNode) -> bool:
    """Return whether `node` is an unlocked host-only leaf."""
    return not node.locks and not node.children and not node.pages and bool(node.host_slots)
