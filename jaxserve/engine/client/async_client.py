"""The client of an engine in its own process: it sends requests, and puts received events into one stream per request.

It belongs to one asyncio loop and knows neither text, HTTP nor the device. Every stream ends with exactly one event
that has a `finish_reason`, also when the engine dies.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any

from jaxserve.api_types import EngineInfo, EngineRequest, EngineStats, ProfileInfo, ReplicaStats
from jaxserve.config.schema import EngineConfig
from jaxserve.engine.client.stream import EventObserver, RequestStream
from jaxserve.engine.process.launch_protocol import WHOLE_MACHINE, ReplicaResources
from jaxserve.engine.process.supervisor import EngineProcess
from jaxserve.engine.process.transport import (
    Abort,
    Add,
    CacheFlushed,
    ClientTransport,
    Command,
    CommandFailed,
    FlushCache,
    Idle,
    ProfileAnswer,
    ReadStats,
    Shutdown,
    StartProfile,
    StatsReading,
    StepEvents,
    StopProfile,
)
from jaxserve.errors import (
    EngineDeadError,
    EngineUnresponsiveError,
    InvalidRequestError,
    JaxserveError,
    RequestFailedError,
)

WORKER_MODULE = "jaxserve.worker"

Answer = EngineStats | int | ProfileInfo

# How often a call that waits for its answer checks that the engine is still responsive.
_POLL_SECONDS = 1.0
# An idle engine sends a sign of life every second. After ten seconds without one, calls fail; after thirty, `health`
# reports it. The watchdog timeout applies too, if it is shorter.
_IDLE_CALL_LIMIT, _IDLE_HEALTH_LIMIT = 10.0, 30.0


class EngineClient:
    """An engine in its own process. `launch` starts it, `shutdown` ends it; it belongs to one event loop.

    `stats` is the last reading received. `on_death` resolves with the reason when the process ends unexpectedly.
    """

    def __init__(
        self, process: EngineProcess, transport: ClientTransport, config: EngineConfig, clock: Callable[[], float]
    ) -> None:
        self._process = process
        self._transport = transport
        self._clock = clock
        self._watchdog_timeout = config.watchdog_timeout
        self._loop = asyncio.get_running_loop()
        self._streams: dict[str, RequestStream] = {}
        self._answers: dict[int, asyncio.Future[Answer]] = {}
        self._numbers = itertools.count()
        self._last_progress = self._last_heard = clock()
        self._is_idle = True  # until the first request or command
        self._is_closed = False
        self._dead: str | None = None
        self.info: EngineInfo
        self.stats = EngineStats()
        self.on_death: asyncio.Future[str] = self._loop.create_future()

    @classmethod
    async def launch(
        cls,
        config: EngineConfig,
        *,
        module: str = WORKER_MODULE,
        resources: ReplicaResources = WHOLE_MACHINE,
        clock: Callable[[], float] = time.monotonic,
    ) -> EngineClient:
        """Start the engine process and wait until it is ready. `clock` returns seconds for the watchdog.

        Raise the engine's own `ConfigError` or `ModelNotFoundError`, and `EngineDeadError` for any other failure.
        """
        process = EngineProcess(config, module, resources)
        try:
            transport = ClientTransport(process.command_address, process.client_address)
        except BaseException:
            await run_to_completion(process.stop(timeout=0.0))
            raise
        client = cls(process, transport, config, clock)
        try:
            client.info = await process.started()
        except BaseException:
            await run_to_completion(client.shutdown(timeout=0.0))
            raise
        client._last_heard = clock()
        client._loop.add_reader(transport.fileno(), client._receive)
        client._receive()
        process.ended.add_done_callback(lambda ended: client._on_exit(ended.result()))
        return client

    @property
    def pid(self) -> int:
        """The process id of the engine."""
        return self._process.pid

    @property
    def replicas(self) -> tuple[ReplicaStats, ...]:
        """This engine process and its last reading, as a tuple of one."""
        return (ReplicaStats(self.pid, self.stats),)

    @property
    def health(self) -> str | None:
        """None while the engine makes progress or reports that it is idle, else a description of the problem."""
        return self._problem(_IDLE_HEALTH_LIMIT)

    def submit(self, request: EngineRequest) -> RequestStream:
        """Submit a request; the stream receives its events, also a rejection (such as a full queue).

        Raise `EngineDeadError` if the engine has ended, `EngineUnresponsiveError` if `health` reports a problem, and
        `InvalidRequestError` if the id is open.
        """
        [stream] = self.submit_all([request])
        return stream

    def submit_all(
        self, requests: Sequence[EngineRequest], observe: EventObserver | None = None
    ) -> list[RequestStream]:
        """Submit several requests in one message, so that they can start in one step. Raise the errors of `submit`.

        `observe` is called with the first event of each request and with the last, which may be the same.
        """
        self._check_responsive()
        if not self._streams:
            self._last_progress = self._clock()
        streams: dict[str, RequestStream] = {}
        for request in requests:
            name = request.request_id
            if name in self._streams or name in streams:
                raise InvalidRequestError(f"a request with the id {name!r} is open already", param="request_id")
            streams[name] = RequestStream(request, self.abort, observe)
        self._transport.send(Add(list(requests)))
        self._streams |= streams
        self._is_idle = False
        return list(streams.values())

    def abort(self, request_ids: Iterable[str]) -> None:
        """Ask the engine to end requests; each still gets its last event. Ignore ids that are not open."""
        open_ids = [request_id for request_id in request_ids if request_id in self._streams]
        if open_ids:
            self._transport.send(Abort(open_ids))

    async def refresh_stats(self, timeout: float = 5.0) -> EngineStats:
        """Request a reading of the engine, with integrity errors.

        Raise `TimeoutError`, `EngineUnresponsiveError` if waiting is useless, or `EngineDeadError`.
        """
        stats = await self._call(lambda number: ReadStats(0, number), timeout)
        assert isinstance(stats, EngineStats)
        return stats

    async def flush_cache(self, timeout: float = 5.0) -> int:
        """Remove all cached prefixes and return how many pages this freed. Raise the errors of `refresh_stats`."""
        num_pages = await self._call(lambda number: FlushCache(0, number), timeout)
        assert isinstance(num_pages, int)
        return num_pages

    async def start_profile(
        self,
        output_dir: str | None = None,
        *,
        num_steps: int | None = None,
        with_stack: bool = False,
        timeout: float = 60.0,
    ) -> ProfileInfo:
        """Record a profile from the next step on, until `stop_profile` or for `num_steps` steps.

        `output_dir` is a folder within `profile_dir`. Raise the engine's own `InvalidRequestError` or
        `RequestFailedError`, or the errors of `refresh_stats`.
        """
        profile = await self._call(lambda number: StartProfile(0, number, output_dir, num_steps, with_stack), timeout)
        assert isinstance(profile, ProfileInfo)
        return profile

    async def stop_profile(self, timeout: float = 600.0) -> ProfileInfo:
        """End the profile and wait until it is written; requests continue. Raise the errors of `start_profile`."""
        profile = await self._call(lambda number: StopProfile(0, number), timeout)
        assert isinstance(profile, ProfileInfo)
        return profile

    async def shutdown(self, timeout: float = 10.0) -> None:
        """End the engine, by force after `timeout` seconds; open requests and calls end with an error."""
        if self._is_closed:
            return
        self._is_closed = True
        if not self._process.ended.done():
            with contextlib.suppress(OSError):
                self._transport.send(Shutdown())
        self.mark_dead("the engine has been shut down")
        await self._process.stop(timeout)
        self._loop.remove_reader(self._transport.fileno())
        self._transport.close()

    def mark_dead(self, reason: str) -> None:
        """Reject all further calls with `reason`; end open streams and calls with it."""
        self._dead = reason
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            stream.fail(reason)
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(EngineDeadError(reason))

    def _receive(self) -> None:
        messages = self._transport.receive()
        if messages:
            self._last_heard = self._clock()
        for message in messages:
            match message:
                case Idle():
                    self._is_idle = True
                case StepEvents(events, stats):
                    self.stats = stats
                    self._last_progress = self._clock()
                    streams = self._streams
                    for event in events:
                        stream = streams.get(event.request_id)
                        if stream is None:
                            continue
                        if event.finish_reason is not None:
                            del streams[event.request_id]
                        stream.push(event)
                case StatsReading(number, stats):
                    self.stats = stats
                    self._answer(number, stats)
                case CacheFlushed(number, num_pages):
                    self._answer(number, num_pages)
                case ProfileAnswer(number, profile):
                    self._answer(number, profile)
                case CommandFailed(number, why, refused, param):
                    self._answer(number, InvalidRequestError(why, param=param) if refused else RequestFailedError(why))

    def _seconds_silent(self) -> float:
        """Return the seconds since the last message from the engine."""
        if self._clock() - self._last_heard > _POLL_SECONDS:
            self._receive()  # messages may have arrived while this process itself was busy
        return self._clock() - self._last_heard

    def _problem(self, idle_limit: float) -> str | None:
        """Describe what is wrong, or return None; an idle engine may be silent for `idle_limit` seconds."""
        if self._dead is not None:
            return self._dead
        limit, silence = self._watchdog_timeout, self._seconds_silent()
        if self._streams and self._clock() - self._last_progress > limit:
            return f"no step finished for {limit:g} s while {len(self._streams)} requests are open"
        if silence > limit:
            return f"the engine sent nothing for {limit:g} s"
        if self._is_idle and not self._streams and silence > idle_limit:
            return f"the idle engine sent no sign of life for {idle_limit:g} s"
        return None

    def _check_responsive(self, idle_limit: float = math.inf) -> None:
        """Raise `EngineDeadError` or `EngineUnresponsiveError` if the engine can't be expected to answer."""
        problem = self._problem(idle_limit)
        if problem is not None:
            raise EngineDeadError(problem) if self._dead is not None else EngineUnresponsiveError(problem)

    async def _call(self, command: Callable[[int], Command], timeout: float) -> Answer:
        """Send `command(number)` and wait for the answer with this number."""
        self._check_responsive(_IDLE_CALL_LIMIT)
        number = next(self._numbers)
        message = command(number)
        if isinstance(message, StartProfile):
            self._is_idle = False  # a profiler may take long to start, and the engine is silent meanwhile
        answer = self._answers[number] = self._loop.create_future()
        try:
            self._transport.send(message)
            async with asyncio.timeout(timeout):
                while not answer.done():
                    await asyncio.wait((answer,), timeout=_POLL_SECONDS)
                    if not answer.done():
                        self._check_responsive(_IDLE_CALL_LIMIT)
            return answer.result()
        finally:
            del self._answers[number]

    def _answer(self, number: int, answer: Answer | JaxserveError) -> None:
        waiting = self._answers.get(number)
        if waiting is None or waiting.done():
            return
        if isinstance(answer, JaxserveError):
            waiting.set_exception(answer)
        else:
            waiting.set_result(answer)

    def _on_exit(self, reason: str) -> None:
        if self._is_closed:
            return
        self._receive()
        self.mark_dead(reason)
        self.on_death.set_result(reason)


async def run_to_completion(work: Coroutine[Any, Any, None]) -> None:
    """Finish `work` even if the caller is cancelled meanwhile: an incomplete clean-up would leave a process behind."""
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError as error:
            cancelled = error
    task.result()
    if cancelled is not None:
        raise cancelled
