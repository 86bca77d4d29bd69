"""Chooses the replica for each request: the one that finishes it soonest at the least cost to other requests.

The unit of cost is a token to compute. The router knows only what the server's process knows: which prompts it sent to
which replica, and which of them have begun to answer or ended. Where several API processes place requests, each tells
the others. The router holds no stream. A request stays on its replica; replicas share nothing, and none waits for
another.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from jaxserve.api_types import EngineRequest, TokenEvent
from jaxserve.engine.client.placements import Began, CachesCleared, Ended, Placed, PlacementUpdate
from jaxserve.engine.client.prefix_index import PrefixIndex, page_names
from jaxserve.engine.scheduling.rank_router import CACHED_WEIGHT, CROWDED_SHARE, SEQUENCE_TOKENS

type ReplicaCost = tuple[bool, bool, int, int]


def replica_cost(
    *,
    num_open: int,
    fewest_open: int,
    num_slots: int,
    pending_tokens: int,
    cached_tokens: int,
    num_pages: int,
    crowded_share: float = CROWDED_SHARE,
) -> ReplicaCost:
    """Return the cost of a request on a replica, of which the least is best.

    It has `num_open` of its `num_slots` requests open, and `pending_tokens` of their prompts to compute; the emptiest
    replica has `fewest_open`. It has `cached_tokens` of the request's prompt, and `num_pages` pages in its cache. It is
    crowded if it has more open than the emptiest by `crowded_share` of its slots.
    """
    return (
        num_open >= num_slots,
        num_open - fewest_open > crowded_share * num_slots,
        pending_tokens - CACHED_WEIGHT * cached_tokens + SEQUENCE_TOKENS * num_open,
        num_pages,
    )


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
    origin: int | None  # the other API process that placed it


class ReplicaRouter:
    """A router over equal replicas: each runs up to `num_slots` requests at once and caches up to `num_pages` pages.

    `send_update` is called with what other API processes must know.
    """

    def __init__(
        self,
        num_replicas: int,
        *,
        num_slots: int,
        num_pages: int,
        page_size: int,
        send_update: Callable[[PlacementUpdate], None] | None = None,
    ) -> None:
        self._loads = [_ReplicaLoad(num_slots, PrefixIndex(num_pages)) for _ in range(num_replicas)]
        self._page_size = page_size
        self._open: dict[str, _PlacedRequest] = {}
        self._send_update = send_update

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
        placed = Placed(request.request_id, best, length - cached[best], names)
        self._add(placed)
        if self._send_update is not None:
            self._send_update(placed)
        return best

    def _add(self, placed: Placed, origin: int | None = None) -> None:
        load = self._loads[placed.replica]
        load.index.add(placed.page_names)
        load.num_open += 1
        load.pending_tokens += placed.pending_tokens
        self._open[placed.request_id] = _PlacedRequest(placed.replica, placed.pending_tokens, origin)

    def _best(self, cached: Sequence[int]) -> int:
        fewest = min(load.num_open for load in self._loads)

        def cost(replica: int) -> ReplicaCost:
            load = self._loads[replica]
            return replica_cost(
                num_open=load.num_open,
                fewest_open=fewest,
                num_slots=load.num_slots,
                pending_tokens=load.pending_tokens,
                cached_tokens=cached[replica],
                num_pages=len(load.index),
            )

        return min(range(len(self._loads)), key=cost)

    def observe(self, event: TokenEvent) -> None:
        """Process the first or the last event of a placed request."""
        if event.finish_reason is None:
            self._publish(Began(event.request_id))
        else:
            num_tokens = event.usage.completion_tokens if event.usage is not None else 0
            self._publish(Ended(event.request_id, num_tokens // self._page_size))

    def remove(self, request_id: str) -> None:
        """Stop counting a request that was placed but not sent."""
        self._publish(Ended(request_id))

    def clear_caches(self) -> None:
        """Forget all cached prefixes, because the replicas' caches were flushed."""
        self._publish(CachesCleared())

    def _publish(self, update: PlacementUpdate) -> None:
        self.apply(update)
        if self._send_update is not None:
            self._send_update(update)

    def apply(self, update: PlacementUpdate, origin: int | None = None) -> None:
        """Apply an update, of this API process or of the other one `origin`."""
        match update:
            case Placed():
                self._add(update, origin)
            case Began(request_id):
                if (placed := self._open.get(request_id)) is not None:
                    self._loads[placed.replica].pending_tokens -= placed.pending_tokens
                    placed.pending_tokens = 0
            case Ended(request_id, num_output_pages):
                if (placed := self._open.pop(request_id, None)) is not None:
                    load = self._loads[placed.replica]
                    load.num_open -= 1
                    load.pending_tokens -= placed.pending_tokens
                    load.index.add_outputs(num_output_pages)
            case CachesCleared():
                for load in self._loads:
                    load.index.clear()

    def forget(self, origin: int) -> None:
        """Stop counting the requests of another API process, which has ended."""
        for request_id in [name for name, placed in self._open.items() if placed.origin == origin]:
            self.apply(Ended(request_id))
