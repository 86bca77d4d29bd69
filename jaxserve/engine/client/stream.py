"""The stream of one request's events, from the client that receives them to one reader, on one asyncio loop."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Self

from jaxserve.api_types import EngineRequest, FinishReason, TokenEvent, Usage

EventObserver = Callable[[TokenEvent], None]


class RequestStream:
    """The events of one request, in order; iteration ends after the one that has a `finish_reason`.

    Events that arrived since the last read are merged into one, so that a slow reader catches up. `observe` is called
    with the first event and with the last one when they arrive, before they are read.
    """

    def __init__(
        self, request: EngineRequest, abort: Callable[[list[str]], None], observe: EventObserver | None = None
    ) -> None:
        self.request_id = request.request_id
        self._num_prompt_tokens = len(request.prompt_ids)
        self._num_tokens = 0
        self._abort = abort
        self._observe = observe
        self._events: deque[TokenEvent] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._is_over = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> TokenEvent:
        while not self._events:
            if self._is_over:
                raise StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        return self._take()

    def abort(self) -> None:
        """Ask the engine to end the request; the stream still gets its last event."""
        self._abort([self.request_id])

    def push(self, event: TokenEvent) -> None:
        """Add the next event. Only the client calls this."""
        self._events.append(event)
        self._num_tokens += len(event.token_ids)
        self._is_over = event.finish_reason is not None
        if self._observe is not None and (self._is_over or event.queue_seconds is not None):
            self._observe(event)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _take(self) -> TokenEvent:
        events = self._events
        if len(events) == 1:
            return events.popleft()
        # Keep an error for the next read: it has no tokens, and the tokens before it must be delivered first.
        held = [events.pop()] if events[-1].error is not None else []
        self._events = deque(held)
        return _merge_events(events)

    def fail(self, error: str) -> None:
        """End the stream with an error that the engine could not report. Only the client calls this."""
        usage = Usage(self._num_prompt_tokens, self._num_tokens)
        self.push(TokenEvent(self.request_id, [], finish_reason=FinishReason.ERROR, usage=usage, error=error))


def _merge_events(events: deque[TokenEvent]) -> TokenEvent:
    """Merge consecutive events of a request into one."""
    first, last = events[0], events[-1]
    if first is last:
        return first
    return TokenEvent(
        first.request_id,
        [token for event in events for token in event.token_ids],
        last.finish_reason,
        last.stop_id,
        None if first.logprobs is None else [entry for event in events for entry in event.logprobs or ()],
        first.prompt_logprobs,
        last.usage or first.usage,
        queue_seconds=first.queue_seconds,
    )
