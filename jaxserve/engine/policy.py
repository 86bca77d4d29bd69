"""In which order waiting requests start, and which running one gives way: first come first served.

It owns the queue of waiting requests and knows nothing of pages, slots or budgets.
"""

from __future__ import annotations

import bisect
from collections import OrderedDict
from collections.abc import Iterable, Iterator

from jaxserve.engine.request import Request


class WaitingQueue:
    """Requests by arrival. Those that were put back all arrived before those that never ran, so they go first.

    Every operation is O(1) in the number of requests that never ran.
    """

    def __init__(self) -> None:
        self._returned: list[Request] = []
        self._arrived: OrderedDict[str, Request] = OrderedDict()

    def __len__(self) -> int:
        return len(self._returned) + len(self._arrived)

    def __iter__(self) -> Iterator[Request]:
        yield from self._returned
        yield from self._arrived.values()

    def add(self, request: Request) -> None:
        """Append a request that has just arrived."""
        self._arrived[request.request_id] = request

    def put_back(self, request: Request) -> None:
        """Return a request that had been running to the front, among others like it by arrival."""
        bisect.insort(self._returned, request, key=lambda other: other.arrival)

    def peek(self) -> Request | None:
        """The request that is to start next."""
        if self._returned:
            return self._returned[0]
        return next(iter(self._arrived.values()), None)

    def pop(self) -> Request:
        """Take the request that `peek` showed."""
        if self._returned:
            return self._returned.pop(0)
        return self._arrived.popitem(last=False)[1]

    def remove(self, request: Request) -> None:
        """Take out a request that gives up waiting."""
        if self._arrived.pop(request.request_id, None) is None:
            self._returned.remove(request)


def choose_victim(running: Iterable[Request]) -> Request:
    """The request to retract: fewest output tokens, then the longest prompt, then the latest arrival.

    So the one that is furthest never gives way, and somebody always gets to the end.
    """
    return min(running, key=lambda r: (len(r.output_ids), -r.num_prompt_tokens, -r.arrival))
