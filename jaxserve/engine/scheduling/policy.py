"""In which order waiting requests start, and which running one gives way.

It owns the queue of waiting requests; of the cache it asks only how much of a prompt is there, and it knows nothing of
slots or budgets.
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

MAX_OVERTAKEN = 64
"""By how many later arrivals a request is overtaken at most, under every policy but `priority`."""

LPM_MAX_WAITING = 128
"""With more waiting, `lpm` is `fcfs`: matching all of them would cost more than it saves."""

_LOOKAHEAD = 256
_Entry = tuple[tuple[float, ...], Request]


class WaitingQueue:
    """Requests in the order of a policy. Those that were put back have run before and go first, by arrival.

    `cached` says how many tokens of a request the prefix cache holds, for `lpm`. Each operation is O(log n) in the
    number that wait; so is each step of `in_order`, but for `lpm`, which looks at all of at most 128.
    """

    def __init__(self, policy: Policy = "fcfs", cached: Callable[[Request], int] = lambda _: 0, seed: int = 0) -> None:
        self._policy = policy
        self._cached = cached
        self._random = random.Random(seed)
        self._returned: list[Request] = []
        self._arrived: OrderedDict[str, Request] = OrderedDict()
        self._heap: list[_Entry] = []
        self._entries: dict[str, _Entry] = {}
        self._num_gone = 0

    def __len__(self) -> int:
        return len(self._returned) + len(self._arrived)

    def __iter__(self) -> Iterator[Request]:
        yield from self._returned
        yield from self._arrived.values()

    def add(self, request: Request) -> None:
        """Append a request that has just arrived."""
        request.turn = self._num_gone + len(self._arrived)
        self._enter(request)

    def put_back(self, request: Request) -> None:
        """Return a request that had been running."""
        if self._policy == "priority":
            self._enter(request)
            return
        self._returned.append(request)
        self._returned.sort(key=lambda other: other.arrival)

    def remove(self, request: Request) -> None:
        """Take out a request that starts, or that gives up waiting."""
        self._entries.pop(request.request_id, None)
        if self._arrived.pop(request.request_id, None) is None:
            self._returned.remove(request)
        else:
            self._num_gone += 1

    def in_order(self) -> Iterator[Request]:
        """Those that may start now, the next one first. The caller may remove the one it was just given."""
        yield from list(self._returned)
        oldest = next(iter(self._arrived.values()), None)
        if oldest is None:
            return
        if self._policy == "fcfs" or (self._policy == "lpm" and len(self) > LPM_MAX_WAITING):
            yield from list(itertools.islice(self._arrived.values(), _LOOKAHEAD))
            return
        overdue = self._policy != "priority" and self._num_gone - oldest.turn >= MAX_OVERTAKEN
        if overdue:
            yield oldest
        if self._policy == "lpm":
            others = sorted(self._arrived.values(), key=lambda request: -self._cached(request))
            yield from (request for request in others if not (overdue and request is oldest))
        else:
            yield from self._by_heap(oldest if overdue else None)

    def _enter(self, request: Request) -> None:
        self._arrived[request.request_id] = request
        keys = {"priority": -request.priority, "shortest-prefill-first": request.num_fill_tokens}
        key = self._random.random() if self._policy == "random" else keys.get(self._policy)
        if key is not None:
            entry = self._entries[request.request_id] = ((key, request.arrival), request)
            heapq.heappush(self._heap, entry)

    def _by_heap(self, skipped: Request | None) -> Iterator[Request]:
        """Entries of requests that have left are dropped on the way; those that were only looked at go back."""
        looked_at: list[_Entry] = []
        try:
            while self._heap and len(looked_at) < _LOOKAHEAD:
                entry = heapq.heappop(self._heap)
                if self._entries.get(entry[1].request_id) is not entry:
                    continue
                looked_at.append(entry)
                if entry[1] is not skipped:
                    yield entry[1]
        finally:
            for entry in looked_at:
                if self._entries.get(entry[1].request_id) is entry:
                    heapq.heappush(self._heap, entry)


def choose_victim(running: Iterable[Request], *, by_priority: bool = False) -> Request:
    """The request to retract: fewest output tokens, then the longest prompt, then the latest arrival.

    So the one that is furthest never gives way, and somebody always gets to the end. With `by_priority` one of the
    lowest priority gives way first.
    """
    return min(
        running,
        key=lambda r: (r.priority if by_priority else 0, len(r.output_ids), -r.num_prompt_tokens, -r.arrival),
    )
