"""To which replica a request goes: where it is done soonest and costs the others least, reckoned in tokens to compute.

It knows what a server's process knows: which prompts it sent where, and which of them have begun and ended. It sends
nothing and holds no stream. A request stays where it was put; replicas share nothing, and none waits for another.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from jaxserve.api_types import EngineRequest, TokenEvent
from jaxserve.engine.client.prefix_index import PrefixIndex, page_names
from jaxserve.engine.scheduling.rank_router import CACHED_WEIGHT, CROWDED_SHARE, SEQUENCE_TOKENS


@dataclasses.dataclass(slots=True)
class _Load:
    """One replica: requests open there, and prompt tokens yet to be computed of those that have not begun to answer."""

    num_slots: int
    index: PrefixIndex
    num_open: int = 0
    pending_tokens: int = 0


@dataclasses.dataclass(slots=True)
class _Placed:
    replica: int
    pending_tokens: int


class ReplicaPlacement:
    """Over replicas that are all alike: each runs `num_slots` requests at once and caches `num_pages` pages, none where
    `num_pages` is 0."""

    def __init__(self, num_replicas: int, *, num_slots: int, num_pages: int, page_size: int) -> None:
        self._loads = [_Load(num_slots, PrefixIndex(num_pages)) for _ in range(num_replicas)]
        self._page_size = page_size
        self._open: dict[str, _Placed] = {}

    @property
    def num_open(self) -> int:
        """Requests that were placed and have not ended."""
        return len(self._open)

    def replica_of(self, request_id: str) -> int | None:
        """Where an open request is."""
        placed = self._open.get(request_id)
        return None if placed is None else placed.replica

    def place(self, request: EngineRequest) -> int:
        """Choose the replica for a request, and count it there until it `ends`."""
        length = len(request.prompt_ids)
        # The last token is always computed, and all of them where log probabilities of all are wanted.
        reusable = 0 if request.sampling.prompt_logprobs is not None else max(length - 1, 0) // self._page_size
        names = page_names(request.namespace, request.prompt_ids, self._page_size)
        cached = [load.index.match(names[:reusable]) * self._page_size for load in self._loads]
        best = self._best(cached)
        load = self._loads[best]
        load.index.use(names)
        load.num_open += 1
        load.pending_tokens += length - cached[best]
        self._open[request.request_id] = _Placed(best, length - cached[best])
        return best

    def _best(self, cached: Sequence[int]) -> int:
        fewest = min(load.num_open for load in self._loads)

        def cost(replica: int) -> tuple[bool, bool, int, int, int]:
            load = self._loads[replica]
            return (
                load.num_open >= load.num_slots,
                load.num_open - fewest > CROWDED_SHARE * load.num_slots,
                load.pending_tokens - CACHED_WEIGHT * cached[replica] + SEQUENCE_TOKENS * load.num_open,
                len(load.index),
                replica,
            )

        return min(range(len(self._loads)), key=cost)

    def watch(self, event: TokenEvent) -> None:
        """The first event of a request that was placed, or its last."""
        placed = self._open.get(event.request_id)
        if placed is None:
            return
        load = self._loads[placed.replica]
        load.pending_tokens -= placed.pending_tokens
        placed.pending_tokens = 0
        if event.finish_reason is not None:
            self.withdraw(event.request_id)
            if event.usage is not None:
                load.index.fill(event.usage.completion_tokens // self._page_size)

    def withdraw(self, request_id: str) -> None:
        """A request has ended, or was placed and never handed over."""
        placed = self._open.pop(request_id, None)
        if placed is not None:
            load = self._loads[placed.replica]
            load.num_open -= 1
            load.pending_tokens -= placed.pending_tokens

    def forget(self) -> None:
        """All caches have been emptied."""
        for load in self._loads:
            load.index.clear()
