"""A small engine without a model, with the interface of `jaxserve.engine.client`. A rule gives the tokens.

It makes one step per turn of the event loop. A test can hold the steps and make them itself, so it needs no sleep.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import os
from collections.abc import AsyncIterator, Callable, Iterable, Sequence

import msgspec
import numpy as np

from jaxserve.api_types import (
    EngineInfo,
    EngineRequest,
    EngineStats,
    FinishReason,
    ProfileInfo,
    ReplicaStats,
    TokenEvent,
    TokenLogprobs,
    Usage,
)
from jaxserve.engine.core.profiling import Profiling
from jaxserve.engine.kv_cache.page_pool import PagePool
from jaxserve.engine.kv_cache.radix_cache import RadixCache
from jaxserve.errors import EngineDeadError, QueueFullError

MAX_MODEL_LEN = 512
QUEUE_FULL = str(QueueFullError("max_num_queued_reqs", 8, 8))


def alphabet_rule(request: EngineRequest) -> Iterable[int]:
    """Return the alphabet's letters as tokens, starting at the last prompt id plus the sample's number."""
    start = request.prompt_ids[-1] + request.sample
    return (ord("a") + (start + step) % 26 for step in itertools.count())


def logprobs_of(token: int, count: int) -> TokenLogprobs:
    """Return made-up log probabilities that depend only on the token; the second most likely has probability 0."""
    alternatives = [token, *((token + 1 + other) % 256 for other in range(count))][:count]
    values = [-token / 100, float("-inf"), *(-9.0 - other for other in range(count))][:count]
    return TokenLogprobs(token, -token / 100, alternatives, values)


def vector_of(ids: Sequence[int]) -> np.ndarray:
    """Return the vector of a pooled request, which depends on all its ids and their order."""
    return np.asarray(
        [math.sin(sum((at + number) * token for at, token in enumerate(ids, 1))) for number in range(4)], np.float32
    )


class _RunningRequest:
    def __init__(self, request: EngineRequest, tokens: Iterable[int], cached_tokens: int) -> None:
        self.request = request
        self.tokens = iter(tokens)
        self.cached_tokens = cached_tokens
        self.output: list[int] = []
        self.num_tokens = 0
        self.events: asyncio.Queue[TokenEvent] = asyncio.Queue()


class FakeEngine:
    """A fake engine. `rule` gives the tokens of a request, `vector` the vector of a pooled one; if `refuse` returns a
    reason, the request fails with it.

    Each request finds `cached_tokens`, or with None what the real prefix cache has of requests that ended before.
    """

    def __init__(
        self,
        vocab_size: int,
        *,
        rule: Callable[[EngineRequest], Iterable[int]] = alphabet_rule,
        refuse: Callable[[EngineRequest], str | None] = lambda _: None,
        max_model_len: int = MAX_MODEL_LEN,
        cached_tokens: int | None = 0,
        schedule_policy: str = "fcfs",
        tokens_per_step: int = 1,
        vector: Callable[[Sequence[int]], np.ndarray] = vector_of,
    ) -> None:
        self.info = self.info_of(vocab_size, max_model_len=max_model_len, schedule_policy=schedule_policy)
        self.stats = EngineStats(num_pages=64, num_free_pages=64)
        self.health: str | None = None
        self.on_death: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.submitted: list[EngineRequest] = []
        self.aborted: list[str] = []
        self.changed = asyncio.Condition()
        self.shut_down = False
        self.num_flushes = 0
        self.profiling = Profiling()
        self._rule = rule
        self._refuse = refuse
        self._vector = vector
        self._cached_tokens = cached_tokens
        self._pool = PagePool(4096, self.info.page_size)
        self._cache = RadixCache(self._pool)
        self._tokens_per_step = tokens_per_step
        self._running: dict[str, _RunningRequest] = {}
        self._go = asyncio.Event()
        self._go.set()
        self._steps_allowed = 0
        self._task: asyncio.Task[None] | None = None

    @staticmethod
    def info_of(vocab_size: int, *, max_model_len: int, schedule_policy: str = "fcfs") -> EngineInfo:
        return EngineInfo(
            max_model_len=max_model_len,
            vocab_size=vocab_size,
            page_size=16,
            num_pages=64,
            max_running_requests=32,
            chunked_prefill_size=512,
            device="fake",
            dtype="float32",
            attention_backend="reference",
            num_programs=1,
            startup_seconds={"weights": 0.25, "compile": 0.5},
            schedule_policy=schedule_policy,
            uses_priorities=schedule_policy == "priority",
        )

    @property
    def replicas(self) -> tuple[ReplicaStats, ...]:
        return (ReplicaStats(os.getpid(), self.stats),)

    @property
    def num_running(self) -> int:
        return len(self._running)

    def submit(self, request: EngineRequest) -> AsyncIterator[TokenEvent]:
        if self.on_death.done():
            raise EngineDeadError(self.on_death.result())
        assert request.request_id not in {earlier.request_id for earlier in self.submitted}
        cached = self._cached_tokens
        if cached is None:
            cached = self._cache.match_length("", request.prompt_ids, len(request.prompt_ids) - 1)
        running = _RunningRequest(request, self._rule(request), cached)
        self.submitted.append(request)
        reason = self._refuse(request)
        if len(request.prompt_ids) >= self.info.max_model_len + request.pooled:
            reason = "the prompt leaves no room for output, as the real engine says"
        if reason is not None:
            running.events.put_nowait(TokenEvent(request.request_id, [], FinishReason.ERROR, error=reason))
        else:
            self._running[request.request_id] = running
            if self._task is None or self._task.done():
                self._task = asyncio.create_task(self._loop())
        self._notify()
        return self._events(running)

    def submit_all(self, requests: Sequence[EngineRequest]) -> list[AsyncIterator[TokenEvent]]:
        return [self.submit(request) for request in requests]

    def abort(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            self.aborted.append(request_id)
            running = self._running.pop(request_id, None)
            if running is not None:
                running.events.put_nowait(self._last(running, [], FinishReason.ABORT))
        self._notify()

    def fail(self, request_id: str, reason: str) -> None:
        """End one request with an error."""
        running = self._running.pop(request_id)
        running.events.put_nowait(TokenEvent(request_id, [], FinishReason.ERROR, error=reason))

    def die(self, reason: str) -> None:
        """Fail all requests, as the client does when the engine process has ended."""
        self.health = reason
        self.on_death.set_result(reason)
        for request_id in list(self._running):
            self.fail(request_id, reason)

    async def refresh_stats(self, timeout: float = 5.0) -> EngineStats:
        if self.on_death.done():
            raise EngineDeadError(self.on_death.result())
        self.stats = msgspec.structs.replace(self.stats, num_running=len(self._running))
        return self.stats

    async def flush_cache(self, timeout: float = 5.0) -> int:
        if self.on_death.done():
            raise EngineDeadError(self.on_death.result())
        self.num_flushes += 1
        return 12

    async def start_profile(
        self, output_dir: str | None = None, *, num_steps: int | None = None, with_stack: bool = False
    ) -> ProfileInfo:
        if self.on_death.done():
            raise EngineDeadError(self.on_death.result())
        return self.profiling.start(output_dir, num_steps=num_steps, with_stack=with_stack)

    async def stop_profile(self) -> ProfileInfo:
        return await asyncio.wrap_future(self.profiling.stop())

    async def shutdown(self) -> None:
        self.shut_down = True
        self.abort(list(self._running))

    def hold(self) -> None:
        """Stop stepping, except for calls of `step`."""
        self._go.clear()

    def release(self) -> None:
        """Step freely again."""
        self._go.set()

    async def step(self) -> None:
        """Make one step, and give its readers a turn of the event loop."""
        self._step()
        for _ in range(5):
            await asyncio.sleep(0)

    async def wait_for(self, condition: Callable[[], bool]) -> None:
        """Return once `condition` holds after a submission, a step or an abort."""
        async with self.changed, asyncio.timeout(30):
            await self.changed.wait_for(condition)

    async def _loop(self) -> None:
        while self._running:
            await self._go.wait()
            self._step()
            await asyncio.sleep(0)

    def _step(self) -> None:
        for running in list(self._running.values()):
            self._advance(running)
        self.stats = msgspec.structs.replace(
            self.stats, num_steps=self.stats.num_steps + 1, num_running=len(self._running)
        )
        self._notify()

    def _advance(self, running: _RunningRequest) -> None:
        request, sampling = running.request, running.request.sampling
        if request.pooled:
            self._pool_vector(running)
            return
        tokens: list[int] = []
        reason: FinishReason | None = FinishReason.LENGTH if sampling.max_tokens == 0 else None
        while len(tokens) < self._tokens_per_step and reason is None:
            token = next(running.tokens)
            tokens.append(token)
            if token in request.stop_ids and running.num_tokens + len(tokens) > sampling.min_tokens:
                reason = FinishReason.STOP
            elif running.num_tokens + len(tokens) >= sampling.max_tokens:
                reason = FinishReason.LENGTH
        first = running.num_tokens == 0
        running.num_tokens += len(tokens)
        running.output += tokens
        self.stats = msgspec.structs.replace(
            self.stats,
            generation_tokens=self.stats.generation_tokens + len(tokens),
            prompt_tokens=self.stats.prompt_tokens + (len(request.prompt_ids) if first else 0),
        )
        event = TokenEvent(request.request_id, tokens)
        if reason is not None:
            del self._running[request.request_id]
            event = self._last(running, tokens, reason)
        elif first:
            event = msgspec.structs.replace(event, usage=Usage(len(request.prompt_ids), 0, running.cached_tokens))
        running.events.put_nowait(
            msgspec.structs.replace(
                event,
                logprobs=None
                if sampling.logprobs is None
                else [logprobs_of(token, sampling.logprobs) for token in tokens],
                prompt_logprobs=self._prompt_logprobs(request) if first else None,
                queue_seconds=0.25 if first else None,
            )
        )

    def _pool_vector(self, running: _RunningRequest) -> None:
        """End a pooled request with its vector."""
        request = running.request
        del self._running[request.request_id]
        num_tokens = self.stats.prompt_tokens + len(request.prompt_ids)
        self.stats = msgspec.structs.replace(self.stats, prompt_tokens=num_tokens)
        running.events.put_nowait(
            TokenEvent(
                request.request_id,
                [],
                FinishReason.STOP,
                usage=Usage(len(request.prompt_ids), 0, running.cached_tokens),
                queue_seconds=0.25,
                pooled=self._vector(request.prompt_ids).tobytes(),
            )
        )

    def _prompt_logprobs(self, request: EngineRequest) -> list[TokenLogprobs | None] | None:
        count = request.sampling.prompt_logprobs
        if count is None:
            return None
        return [None, *(logprobs_of(token, count) for token in request.prompt_ids[1:])]

    def _last(self, running: _RunningRequest, tokens: list[int], reason: FinishReason) -> TokenEvent:
        usage = Usage(len(running.request.prompt_ids), running.num_tokens, running.cached_tokens)
        if self._cached_tokens is None:
            self._keep([*running.request.prompt_ids, *running.output])
        stop_id = tokens[-1] if reason is FinishReason.STOP else None
        return TokenEvent(running.request.request_id, tokens, reason, stop_id, usage=usage)

    def _keep(self, tokens: list[int]) -> None:
        """Keep the whole pages of an output, whose last token was never computed, as the engine does."""
        count = (len(tokens) - 1) // self.info.page_size
        tokens = tokens[: count * self.info.page_size]
        node, pages = self._cache.match("", tokens, len(tokens))
        self._cache.lock(node)
        self._cache.insert("", tokens, self._pool.allocate(count - len(pages)), len(pages))
        self._cache.unlock(node)

    async def _events(self, running: _RunningRequest) -> AsyncIterator[TokenEvent]:
        while True:
            event = await running.events.get()
            yield event
            if event.finish_reason is not None:
                return

    def _notify(self) -> None:
        async def notify() -> None:
            async with self.changed:
                self.changed.notify_all()

        self._notifying = asyncio.ensure_future(notify())
