"""The order in which waiting requests start, and the choice of the running request to retract.

It owns the queue of waiting requests. It asks the cache only how much of a prompt is cached, and knows nothing of slots
or budgets.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from typing import Literal

from jaxserve.engine.scheduling.request import Request

Policy = Literal["lpm", "fcfs", "priority", "shortest-prefill-first", "random"]
RetractionPolicy = Literal["length", "priority"]

MAX_OVERTAKEN = 64
"""The most later arrivals that may start before a request, under every policy but `priority`."""

LPM_MAX_WAITING = 128
"""While more requests wait, `lpm` works as `fcfs`: matching all of them would cost more than it saves."""

_LOOKAHEAD = 256
_Entry = tuple[tuple[float, ...], Request]


class WaitingQueue:
    """Waiting requests in the order of a policy. Retracted requests go first, by arrival (except under `priority`).

    `cached` returns how many tokens of a request the prefix cache holds, for `lpm`. Each operation is O(log n) in the
    number of waiting requests. So is each step of `in_order`, except under `lpm`, which looks at up to 128 requests.
    """

    def __init__(self, policy: Policy = "fcfs", cached: Callable[[Request], int] = lambda _: 0, seed: int = 0) -> None:
        self._policy = policy
        self._cached = cached
        self._random = random.Random(seed)
        self._retracted: list[Request] = []
        self._arrived: OrderedDict[str, Request] = OrderedDict()
        self._heap: list[_Entry] = []
        self._entries: dict[str, _Entry] = {}
        self._num_removed = 0
        self.num_tokens = 0
        """The tokens to compute of all waiting requests; what the prefix cache has of them is not known yet."""

    def __len__(self) -> int:
        return len(self._retracted) + len(self._arrived)

    def __iter__(self) -> Iterator[Request]:
        yield from self._retracted
        yield from self._arrived.values()

    def add(self, request: Request) -> None:
        """Append a request that has just arrived."""
        request.queue_index = self._num_removed + len(self._arrived)
        self.num_tokens += request.num_fill_tokens
        self._push(request)

    def requeue(self, request: Request) -> None:
        """Put a retracted request back into the queue."""
        self.num_tokens += request.num_fill_tokens
        if self._policy == "priority":
            self._push(request)
            return
        self._retracted.append(request)
        self._retracted.sort(key=lambda other: other.arrival)

    def remove(self, request: Request) -> None:
        """Remove a request that starts or ends."""
        self.num_tokens -= request.num_fill_tokens
        self._entries.pop(request.request_id, None)
        if self._arrived.pop(request.request_id, None) is None:
            self._retracted.remove(request)
        else:
            self._num_removed += 1

    def in_order(self) -> Iterator[Request]:
        """Yield the requests in the order in which they should start. The caller may remove the one it just got."""
        yield from list(self._retracted)
        oldest = next(iter(self._arrived.values()), None)
        if oldest is None:
            return
        if self._policy == "fcfs" or (self._policy == "lpm" and len(self) > LPM_MAX_WAITING):
            yield from list(itertools.islice(self._arrived.values(), _LOOKAHEAD))
            return
        overdue = self._policy != "priority" and self._num_removed - oldest.queue_index >= MAX_OVERTAKEN
        if overdue:
            yield oldest
        if self._policy == "lpm":
            others = sorted(self._arrived.values(), key=lambda request: -self._cached(request))
            yield from (request for request in others if not (overdue and request is oldest))
        else:
            yield from self._in_heap_order(oldest if overdue else None)

    def _push(self, request: Request) -> None:
        self._arrived[request.request_id] = request
        keys = {"priority": -request.priority, "shortest-prefill-first": request.num_fill_tokens}
        key = self._random.random() if self._policy == "random" else keys.get(self._policy)
        if key is not None:
            entry = self._entries[request.request_id] = ((key, request.arrival), request)
            heapq.heappush(self._heap, entry)

    def _in_heap_order(self, skipped: Request | None) -> Iterator[Request]:
        """Yield requests but `skipped` by popping the heap; at the end, push back the entries that are still valid."""
        popped: list[_Entry] = []
        try:
            while self._heap and len(popped) < _LOOKAHEAD:
                entry = heapq.heappop(self._heap)
                if self._entries.get(entry[1].request_id) is not entry:
                    continue
                popped.append(entry)
                if entry[1] is not skipped:
                    yield entry[1]
        finally:
            for entry in popped:
                if self._entries.get(entry[1].request_id) is entry:
                    heapq.heappush(self._heap, entry)


def choose_victim(running: Iterable[Request], *, by_priority: bool = False) -> Request:
    """Return the request to retract: fewest output tokens, then the longest prompt, then the latest arrival.

    So the request with the most output is never retracted while others run, and one always finishes. With
    `by_priority`, the lowest priority comes first.
    """
    return min(
        running,
        key=lambda r: (r.priority if by_priority else 0, len(r.output_ids), -r.num_prompt_tokens, -r.arrival),
    )
