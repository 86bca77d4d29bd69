"""The sequences of one HTTP request, from submit to their last event. Owns their end: whatever happens to the request
(an error, a sibling's error, the client's leaving) nothing of it runs on in the engine.

Knows text and engine, not HTTP and not OpenAI's shapes.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import msgspec

from jaxserve.api_types import EngineRequest, FinishReason, TokenEvent, Usage
from jaxserve.errors import RequestFailedError
from jaxserve.server.errors import failure_of
from jaxserve.server.server_state import Loaded, Serving
from jaxserve.text.output import OutputDelta, OutputProcessor

# Called with the index of the sequence and what is new of it.
Emit = Callable[[int, OutputDelta], Awaitable[None]]


class Generation:
    """Runs `requests` and gives what comes of them to a callback, interleaved as it comes."""

    def __init__(self, serving: Serving, loaded: Loaded, requests: list[EngineRequest], arrival: float) -> None:
        self._serving = serving
        self._engine = loaded.engine
        self._tokenizer = loaded.tokenizer
        self._requests = requests
        self._arrival = arrival
        self._running: set[str] = set()

    def abort(self) -> int:
        """Asks the engine to end what still runs; each such sequence ends with finish reason `abort`."""
        self._engine.abort(list(self._running))
        return len(self._running)

    async def run(self, emit: Emit) -> list[Usage]:
        """Returns the token counts of each sequence. Raises the first sequence's error, having aborted the others."""
        self._running.update(request.request_id for request in self._requests)
        try:
            if len(self._requests) == 1:
                return [await self._sequence(0, emit)]
            try:
                async with asyncio.TaskGroup() as group:
                    tasks = [group.create_task(self._sequence(index, emit)) for index in range(len(self._requests))]
            except BaseExceptionGroup as failures:
                raise failures.exceptions[0] from None
            return [task.result() for task in tasks]
        finally:
            if self._running:
                self.abort()
                self._running.clear()

    async def _sequence(self, index: int, emit: Emit) -> Usage:
        request = self._requests[index]
        name = request.request_id
        processor = OutputProcessor(self._tokenizer, request)
        clock = self._serving.metrics.clock(self._arrival, request)
        try:
            stream = self._engine.submit(request)
            async for event in stream:
                clock.tokens(len(event.token_ids), event.queue_seconds)
                delta = processor.push(event)
                reason = delta.finish_reason
                if reason is not None:
                    clock.end(reason)
                    self._running.discard(name)
                    if delta.abort:
                        self._engine.abort([name])
                        await _add_cached_tokens(delta, stream)
                    if reason is FinishReason.ERROR:
                        dead = self._engine.on_death.done()
                        raise failure_of(delta.error or "the engine gave no reason", engine_dead=dead)
                await emit(index, delta)
                if reason is not None:
                    return delta.usage or Usage(len(request.prompt_ids), 0)
            raise RequestFailedError("the engine's events ended before the last one")
        finally:
            clock.end(FinishReason.ABORT)


async def _add_cached_tokens(delta: OutputDelta, stream: AsyncIterator[TokenEvent]) -> None:
    """What only the engine knows of a sequence that a stop string ended here comes with its own last event."""
    async for event in stream:
        if event.usage is not None and delta.usage is not None:
            delta.usage = msgspec.structs.replace(delta.usage, cached_tokens=event.usage.cached_tokens)
