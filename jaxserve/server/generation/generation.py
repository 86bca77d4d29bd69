"""The sequences of one HTTP request, from submission to their last event.

Owns their end: if the request ends early (its own error, another sequence's error, a disconnect), none of its sequences
keeps running in the engine. Knows text and engine, but neither HTTP nor OpenAI's shapes.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

import msgspec

from jaxserve.api_types import EngineRequest, FinishReason, TokenEvent, Usage
from jaxserve.errors import QueueFullError, RequestFailedError
from jaxserve.server.errors import request_error
from jaxserve.server.request_log import LoggedRequest
from jaxserve.server.server_state import LoadedModel, ServerState
from jaxserve.text.output import OutputDelta, OutputProcessor

# Called with the index of a sequence and its new output.
OnDelta = Callable[[int, OutputDelta], Awaitable[None]]


class Generation:
    """Runs `requests` together and passes each new output to a callback as it arrives.

    An output of a sequence has at least as many tokens as its one of `intervals` says, but for the first and the last.
    `logged` is their log, if requests are logged.
    """

    def __init__(
        self,
        state: ServerState,
        loaded: LoadedModel,
        requests: list[EngineRequest],
        arrival: float,
        intervals: Sequence[int],
        logged: LoggedRequest | None = None,
    ) -> None:
        self._state = state
        self._engine = loaded.engine
        self._tokenizer = loaded.tokenizer
        self._requests = requests
        self._arrival = arrival
        self._intervals = intervals
        self._logged = logged
        self._running: set[str] = set()

    def abort(self, indexes: Sequence[int] | None = None) -> int:
        """Ask the engine to end the running sequences, or those of these indexes, and return their number. They end
        with finish reason `abort`."""
        running = set(self._running)
        if indexes is not None:
            running &= {self._requests[index].request_id for index in indexes}
        self._engine.abort(list(running))
        return len(running)

    async def run(self, on_delta: OnDelta) -> list[Usage]:
        """Run all sequences and return the token counts of each. On an error, abort the others and raise it.

        A `QueueFullError` says when to return.
        """
        with self._logged or contextlib.nullcontext():
            return await self._run(on_delta)

    async def _run(self, on_delta: OnDelta) -> list[Usage]:
        self._running.update(request.request_id for request in self._requests)
        try:
            if len(self._requests) == 1:
                return [await self._run_sequence(0, on_delta)]
            try:
                async with asyncio.TaskGroup() as group:
                    tasks = [
                        group.create_task(self._run_sequence(index, on_delta)) for index in range(len(self._requests))
                    ]
            except BaseExceptionGroup as failures:
                raise failures.exceptions[0] from None
            return [task.result() for task in tasks]
        except QueueFullError as error:
            self._state.refusals.count(error, self._requests)
            raise
        finally:
            if self._running:
                self.abort()
                self._running.clear()

    async def _run_sequence(self, index: int, on_delta: OnDelta) -> Usage:
        request, interval = self._requests[index], self._intervals[index]
        name = request.request_id
        processor = OutputProcessor(self._tokenizer, request)
        clock = self._state.metrics.clock(self._arrival, request)
        has_begun, held = False, None
        try:
            stream = self._engine.submit(request)
            async for event in stream:
                clock.record_tokens(len(event.token_ids), event.queue_seconds, event.usage)
                delta = processor.push(event)
                reason = delta.finish_reason
                if reason is not None:
                    clock.record_end(reason)
                    self._running.discard(name)
                    if delta.abort:
                        self._engine.abort([name])
                        await _add_cached_tokens(delta, stream)
                if self._logged is not None:
                    self._logged.record(index, delta, event.queue_seconds, delta.text)
                if reason is FinishReason.ERROR:
                    dead = self._engine.on_death.done()
                    raise request_error(delta.error or "the engine gave no reason", engine_dead=dead)
                if held is not None:
                    held.extend(delta)
                    delta, held = held, None
                if has_begun and reason is None and len(delta.token_ids) < interval:
                    held = delta
                    continue
                has_begun = has_begun or bool(delta.token_ids)
                await on_delta(index, delta)
                if reason is not None:
                    return delta.usage or Usage(len(request.prompt_ids), 0)
            raise RequestFailedError("the engine's events ended before the last one")
        finally:
            clock.record_end(FinishReason.ABORT)


async def _add_cached_tokens(delta: OutputDelta, stream: AsyncIterator[TokenEvent]) -> None:
    """Add the number of cached tokens, which only the engine's last event has, to the end of an aborted sequence."""
    async for event in stream:
        if event.usage is not None and delta.usage is not None:
            delta.usage = msgspec.structs.replace(delta.usage, cached_tokens=event.usage.cached_tokens)
