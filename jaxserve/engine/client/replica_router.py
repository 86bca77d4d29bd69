"""Chooses the replica for each request: the one that finishes it soonest at the least cost to other requests.

The unit of cost is a token to compute. The router knows only what the server's process knows: which prompts it sent to
which replica, and which of them have begun to answer or ended. It sends nothing and holds no stream. A request stays on
its replica; replicas share nothing, and none waits for another.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from jaxserve.api_types import EngineRequest, TokenEvent
from jaxserve.engine.client.prefix_index import PrefixIndex, page_names
from jaxserve.engine.scheduling.rank_router import CACHED_WEIGHT, CROWDED_SHARE, SEQUENCE_TOKENS


@dataclasses.dataclass(slots=True)
class _ReplicaLoad:
    """One replica: its open requests, and the prompt tokens to compute of those that have not begun to answer."""

    num_slots: int
    index: PrefixIndex
    num_open: int = 0
    pending_tokens: int = 0


@dataclasses.dataclass(slots=True)
class _PlacedRequest:
    replica: int
    pending_tokens: int


class ReplicaRouter:
    """A router over equal replicas: each runs up to `num_slots` requests at once and caches up to `num_pages` pages."""

    def __init__(self, num_replicas: int, *, num_slots: int, num_pages: int, page_size: int) -> None:
        self._loads = [_ReplicaLoad(num_slots, PrefixIndex(num_pages)) for _ in range(num_replicas)]
        self._page_size = page_size
        self._open: dict[str, _PlacedRequest] = {}

    @property
    def num_open(self) -> int:
        """The number of requests that were placed and have not ended."""
        return len(self._open)

    @property
    def pending_tokens(self) -> int:
        """The prompt tokens to compute of all requests that have not begun to answer."""
        return sum(load.pending_tokens for load in self._loads)

    def replica_of(self, request_id: str) -> int | None:
        """Return the replica of an open request, or None."""
        placed = self._open.get(request_id)
        return None if placed is None else placed.replica

    def place(self, request: EngineRequest) -> int:
        """Choose the replica for a request, and count the request there until it ends."""
        length = len(request.prompt_ids)
        # The last token is always computed, and every token if prompt log probabilities are requested.
        reusable = 0 if request.sampling.prompt_logprobs is not None else max(length - 1, 0) // self._page_size
        names = page_names(request.namespace, request.prompt_ids, self._page_size)
        cached = [load.index.match(names[:reusable]) * self._page_size for load in self._loads]
        best = self._best(cached)
        load = self._loads[best]
        load.index.add(names)
        load.num_open += 1
        load.pending_tokens += length - cached[best]
        self._open[request.request_id] = _PlacedRequest(best, length - cached[best])
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

    def observe(self, event: TokenEvent) -> None:
        """Process the first or the last event of a placed request."""
        placed = self._open.get(event.request_id)
        if placed is None:
            return
        load = self._loads[placed.replica]
        load.pending_tokens -= placed.pending_tokens
        placed.pending_tokens = 0
        if event.finish_reason is not None:
            self.remove(event.request_id)
            if event.usage is not None:
                load.index.add_outputs(event.usage.completion_tokens // self._page_size)

    def remove(self, request_id: str) -> None:
        """Stop counting a request that has ended, or that was placed but not sent."""
        placed = self._open.pop(request_id, None)
        if placed is not None:
            load = self._loads[placed.replica]
            load.num_open -= 1
            load.pending_tokens -= placed.pending_tokens

    def clear_caches(self) -> None:
        """Forget all cached prefixes, because the replicas' caches were flushed."""
        for load in self._loads:
            load.index.clear()
