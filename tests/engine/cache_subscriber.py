"""What a router knows of a prefix cache from its events alone."""

from __future__ import annotations

from collections.abc import Iterable

from jaxserve.engine.kv_cache.cache_events import IN_HOST_MEMORY, ON_DEVICE, CacheCleared, CacheEvent, PagesStored


class CacheSubscriber:
    """The hashes of the pages that can be found, by medium, after all events so far."""

    def __init__(self) -> None:
        self.hashes: dict[str, set[int]] = {}
        self._clear()

    def receive(self, events: Iterable[CacheEvent]) -> None:
        """Apply events; each must follow from those before."""
        for event in events:
            if isinstance(event, CacheCleared):
                self._clear()
                continue
            held, found = self.hashes[event.medium], set(event.block_hashes)
            assert len(found) == len(event.block_hashes) > 0
            if isinstance(event, PagesStored):
                assert not found & held, "a page is stored twice"
                assert len(event.token_ids) == len(found) * event.block_size
                parents = held if event.medium == ON_DEVICE else set.union(*self.hashes.values())
                assert event.parent_block_hash is None or event.parent_block_hash in parents, (
                    "a page without its prefix"
                )
                held |= found
            else:
                assert found <= held, "a page is removed that was never stored"
                held -= found

    def _clear(self) -> None:
        self.hashes = {ON_DEVICE: set(), IN_HOST_MEMORY: set()}
