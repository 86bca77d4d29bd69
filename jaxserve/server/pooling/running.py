"""Runs the pooled requests of one HTTP request. If it ends early, none of them keeps running in the engine."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import NamedTuple

from jaxserve.api_types import EngineRequest, FinishReason, TokenEvent, Usage
from jaxserve.errors import QueueFullError, RequestFailedError
from jaxserve.server.errors import HttpError, UnavailableError, request_error
from jaxserve.server.generation.logged import logged_request
from jaxserve.server.http.exchange import HttpExchange
from jaxserve.server.pooling.bodies import PooledUsage
from jaxserve.server.request_log import LoggedRequest
from jaxserve.server.server_state import LoadedModel, ServerState
from jaxserve.text.pooled_vectors import Vector, read_vector
from jaxserve.text.requests import pooled_requests


class PooledResult(NamedTuple):
    """The vector of a prompt, and its token counts."""

    vector: Vector
    usage: Usage


class PooledRun:
    """Pooled `requests` that run together. `logged` is their log, if any."""

    def __init__(
        self,
        state: ServerState,
        loaded: LoadedModel,
        requests: list[EngineRequest],
        arrival: float,
        logged: LoggedRequest | None = None,
    ) -> None:
        self._state = state
        self._engine = loaded.engine
        self._requests = requests
        self._arrival = arrival
        self._logged = logged
        self._running: set[str] = set()

    def abort(self, indexes: Sequence[int] | None = None) -> int:
        """Abort the requests that still run, all or those of these indexes, and return their number. The HTTP request
        ends with an error."""
        running = set(self._running)
        if indexes is not None:
            running &= {self._requests[index].request_id for index in indexes}
        self._engine.abort(list(running))
        return len(running)

    async def run(self) -> list[PooledResult]:
        """Return the result of each request. On an error, abort the others and raise it."""
        with self._logged or contextlib.nullcontext():
            return await self._run()

    async def _run(self) -> list[PooledResult]:
        self._running.update(request.request_id for request in self._requests)
        try:
            streams = self._engine.submit_all(self._requests)
            try:
                async with asyncio.TaskGroup() as group:
                    tasks = [
                        group.create_task(self._result(request, stream))
                        for request, stream in zip(self._requests, streams, strict=True)
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

    async def _result(self, request: EngineRequest, stream: AsyncIterator[TokenEvent]) -> PooledResult:
        clock = self._state.metrics.clock(self._arrival, request)
        try:
            async for event in stream:
                clock.record_tokens(0, event.queue_seconds, event.usage)
                if self._logged is not None:
                    self._logged.record(request.sample, event, event.queue_seconds)
                reason = event.finish_reason
                if reason is None:
                    continue
                clock.record_end(reason)
                self._running.discard(request.request_id)
                if reason is FinishReason.ERROR:
                    dead = self._engine.on_death.done()
                    raise request_error(event.error or "the engine gave no reason", engine_dead=dead)
                if reason is FinishReason.ABORT:
                    if self._state.phase == "draining":
                        raise UnavailableError("The server is shutting down")
                    raise HttpError(499, "The request was aborted", type="request_aborted")
                return PooledResult(read_vector(event.pooled), event.usage or Usage(len(request.prompt_ids), 0))
            raise RequestFailedError("the engine's events ended before the last one")
        finally:
            clock.record_end(FinishReason.ABORT)


async def run_prompts(
    state: ServerState,
    loaded: LoadedModel,
    exchange: HttpExchange,
    prompts: list[list[int]],
    *,
    ids: tuple[str, ...],
    second_starts: Sequence[int | None] | None = None,
    parts: Mapping[str, tuple[int, ...]] | None = None,
    priority: int | None,
    cache_salt: str | None = None,
) -> list[PooledResult]:
    """Return the result of each prompt. `second_starts` says of pairs where the second text begins.

    `/abort_request` finds the request by each of `ids`, of which the first is the id of the response, and by the id of
    the HTTP request. It finds single prompts by the ids in `parts`.
    """
    name = f"{ids[0]}-{uuid.uuid4().hex}"
    requests = pooled_requests(
        name, prompts, loaded.engine.info, second_starts=second_starts, priority=priority, cache_salt=cache_salt
    )
    logged = logged_request(state, loaded, exchange, requests, ids, stream=False)
    run = PooledRun(state, loaded, requests, exchange.arrival, logged)
    with state.abortable((*ids, exchange.request_id), run, parts):
        return await run.run()


def total_usage(results: Sequence[PooledResult]) -> PooledUsage:
    """Return the token counts of all results together."""
    tokens = sum(result.usage.prompt_tokens for result in results)
    return PooledUsage(tokens, tokens)
