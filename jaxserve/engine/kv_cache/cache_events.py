"""Records which pages of a prefix cache can be found, as events for routers that send requests to cached prefixes.

The events have the fields and names of vLLM 0.32 on the wire, where a page is a block. A page's hash is SGLang's: it is
made from the hashes of all pages before it and from the page's tokens, and is the same in every process. The recorder
keeps the hash of each page of the first KV group, and of each copy in host memory. The radix cache and the host tier
tell it what changes; it changes neither.

In a model that keeps a state for each sequence, a page can be found if a state is at the end of its node or below.
"""

from __future__ import annotations

import array
import hashlib
from collections.abc import Hashable, Iterable, Iterator, Sequence

import msgspec

from jaxserve.engine.kv_cache.radix_node import RadixNode, path_to
from jaxserve.engine.kv_cache.state_pool import SnapshotOwner

ON_DEVICE, IN_HOST_MEMORY = "GPU", "CPU"
"""The values of `medium`."""

_WHOLE_SEQUENCES = "full_attention"
# Pages whose hashes a check calculates again.
_MAX_HASHED_PAGES = 4096


class PagesStored(msgspec.Struct, frozen=True, omit_defaults=True, gc=False, tag="BlockStored"):
    """Consecutive pages of a sequence can be found. `extra_keys` has an entry for each page, with the cache salt of a
    sequence at its first page."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str
    lora_name: str | None
    extra_keys: list[tuple[str, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None


class PagesRemoved(msgspec.Struct, frozen=True, omit_defaults=True, gc=False, tag="BlockRemoved"):
    """Pages can no longer be found in `medium`."""

    block_hashes: list[int]
    medium: str
    group_idx: int | None = None


class CacheCleared(msgspec.Struct, frozen=True, gc=False, tag="AllBlocksCleared"):
    """No page can be found any more."""


CacheEvent = PagesStored | PagesRemoved | CacheCleared


class CacheEventRecorder:
    """The hashes of the pages and copies of one prefix cache, and the events since the last `take`.

    With `needs_states`, it tells only of pages from whose node on, or below it, a state is there.
    """

    def __init__(self, page_size: int, *, needs_states: bool = False) -> None:
        self._page_size = page_size
        self._needs_states = needs_states
        self._pages: dict[int, bytes] = {}
        self._slots: dict[int, bytes] = {}
        self._namespaces: dict[RadixNode | None, Hashable] = {}
        self._events: list[CacheEvent] = []

    def take(self) -> list[CacheEvent]:
        """Return and clear the events."""
        events, self._events = self._events, []
        return events

    def add_root(self, root: RadixNode, namespace: Hashable) -> None:
        """Record that sequences of `namespace` begin below `root`."""
        self._namespaces[root] = namespace

    def stored(self, node: RadixNode, start: int = 0) -> None:
        """Record that the pages of `node` from index `start` on are on the device; those before them are known."""
        if self._is_hidden(node):
            return
        before = self._before(node, start)
        digests = [self._slots[slot] for slot in node.host_slots[start:] if slot in self._slots]
        more = node.tokens[(start + len(digests)) * self._page_size :]
        digests += self._chain(digests[-1] if digests else before, more)
        self._pages.update(zip(node.pages[start:], digests, strict=True))
        self._add(node, start, before, digests, ON_DEVICE)

    def saved(self, node: RadixNode, start: int) -> None:
        """Record that the pages of `node` from index `start` on have copies in host memory, as far as it has slots."""
        slots = node.host_slots[start:]
        if slots and not self._is_hidden(node):
            digests = [self._pages[page] for page in node.pages[start : start + len(slots)]]
            self._slots.update(zip(slots, digests))
            self._add(node, start, self._before(node, start), digests, IN_HOST_MEMORY)

    def evicted(self, pages: Sequence[int]) -> None:
        """Record that consecutive pages of a sequence are no longer on the device."""
        self._remove(self._pages, pages, ON_DEVICE)

    def dropped(self, slots: Sequence[int]) -> None:
        """Record that the copies of consecutive pages are no longer in host memory."""
        self._remove(self._slots, slots, IN_HOST_MEMORY)

    def count_state(self, owner: SnapshotOwner, change: int) -> None:
        """Record that a node got or lost a state."""
        if not isinstance(owner, RadixNode):
            return
        changed = []
        for node in path_to(owner):
            node.num_states += change
            if node.num_states == max(change, 0):
                changed.append(node)
        if change < 0:
            for node in changed:
                self.evicted(node.pages)
                self.dropped(node.host_slots)
            return
        for node in reversed(changed):
            self.stored(node)
            self.saved(node, 0)

    def clear(self) -> None:
        """Record that all nodes were removed from the tree."""
        self._pages.clear()
        self._slots.clear()
        self._namespaces.clear()
        self._events.append(CacheCleared())

    def hashes(self) -> dict[str, set[int]]:
        """Return the hashes of the pages that can be found, by medium."""
        held = {ON_DEVICE: self._pages, IN_HOST_MEMORY: self._slots}
        return {medium: set(map(_as_hash, digests.values())) for medium, digests in held.items()}

    def check(self, nodes: Sequence[RadixNode]) -> list[str]:
        """Return how the recorded pages and copies differ from those of `nodes`, all nodes of the tree, as sentences.

        The hashes of a large tree are only calculated again for a part of it, as that takes longer than a step.
        """
        miscounted = sum(node.num_states != _num_states(node) for node in nodes) if self._needs_states else 0
        nodes = [node for node in nodes if not self._is_hidden(node)]
        pages = {page for node in nodes for page in node.pages}
        slots = {slot for node in nodes for slot in node.host_slots}
        places = (("on the device", self._pages, pages), ("in host memory", self._slots, slots))
        problems = [
            f"of the {len(held)} pages {place}, the events lack {len(held - told.keys())}; and they have "
            f"{len(told.keys() - held)} others"
            for place, told, held in places
            if told.keys() != held
        ]
        problems += [f"{miscounted} cached runs have another number of states than counted"] if miscounted else []
        left = 0 if problems else _MAX_HASHED_PAGES
        for node in nodes:
            if left <= 0:
                break
            left -= node.length
            digests = list(self._chain(self._before(node, 0), node.tokens))
            told = [self._pages[page] for page in node.pages] or digests
            if told != digests or [self._slots[slot] for slot in node.host_slots] != digests[: len(node.host_slots)]:
                problems.append(f"a cached run of {node.length} pages has other hashes in the events than its tokens")
        return problems

    def _is_hidden(self, node: RadixNode) -> bool:
        return self._needs_states and not node.num_states

    def _chain(self, before: bytes, tokens: Sequence[int]) -> Iterator[bytes]:
        """Yield the digests of whole pages of tokens that follow the page with the digest `before`."""
        raw, size = array.array("I", tokens).tobytes(), 4 * self._page_size
        for at in range(0, len(raw), size):
            before = hashlib.sha256(before + raw[at : at + size]).digest()
            yield before

    def _before(self, node: RadixNode, index: int) -> bytes:
        """Return the digest of the page before the one at `index` of a node, or the seed of its namespace."""
        if not index:
            if node.parent in self._namespaces:
                return _seed(self._namespaces[node.parent])
            assert node.parent is not None
            node = node.parent
            index = node.length
        return self._pages[node.pages[index - 1]] if node.pages else self._slots[node.host_slots[index - 1]]

    def _add(self, node: RadixNode, start: int, before: bytes, digests: Sequence[bytes], medium: str) -> None:
        """Add the event of pages of a node from index `start` on, which follow the page with the digest `before`."""
        size = self._page_size
        extra_keys: list[tuple[str, ...] | None] | None = None
        namespace = None if start else self._namespaces.get(node.parent)
        if namespace is not None and (salt := _salt(namespace)):
            extra_keys = [(salt,), *[None] * (len(digests) - 1)]
        self._events.append(
            PagesStored(
                block_hashes=list(map(_as_hash, digests)),
                parent_block_hash=None if namespace is not None else _as_hash(before),
                token_ids=node.tokens[start * size : (start + len(digests)) * size],
                block_size=size,
                lora_id=None,
                medium=medium,
                lora_name=None,
                extra_keys=extra_keys,
                group_idx=0,
                kv_cache_spec_kind=_WHOLE_SEQUENCES,
            )
        )

    def _remove(self, digests: dict[int, bytes], numbers: Iterable[int], medium: str) -> None:
        # The last page first, so that no page is told of whose beginning is gone.
        known = [number for number in numbers if not self._needs_states or number in digests]
        hashes = [_as_hash(digests.pop(number)) for number in reversed(known)]
        if hashes:
            self._events.append(PagesRemoved(hashes, medium, group_idx=0))


def _num_states(node: RadixNode) -> int:
    """Return the number of states at the end of a node and below, if those of its children are counted."""
    own = sum(row is not None for row in node.states)
    return own + sum(child.num_states for child in node.children.values())


def _salt(namespace: Hashable) -> str:
    """Return the cache salt of a namespace, which is a text or begins with one."""
    return str(namespace[0] if isinstance(namespace, tuple) else namespace)


def _seed(namespace: Hashable) -> bytes:
    """Return what the hashes of a namespace begin with: nothing for the usual one, as in SGLang."""
    return b"" if namespace in ("", ("", False)) else hashlib.sha256(repr(namespace).encode()).digest()


def _as_hash(digest: bytes) -> int:
    return int.from_bytes(digest[:8], "big")
