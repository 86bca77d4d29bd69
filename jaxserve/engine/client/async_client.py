"""The client of an engine in its own process: it sends requests, and puts received events into one stream per request.

It belongs to one asyncio loop and knows neither text, HTTP nor the device. Every stream ends with exactly one event
that has a `finish_reason`, also when the engine dies.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import os
import time
from collections.abc import Callable, Iterable, Sequence

import msgspec

from jaxserve.api_types import EngineInfo, EngineRequest, EngineStats, ProfileInfo, ReplicaStats
from jaxserve.config.schema import EngineConfig
from jaxserve.engine.client.engine_processes import WORKER_MODULE, EngineProcesses
from jaxserve.engine.client.stream import EventObserver, RequestStream
from jaxserve.engine.process.launch_protocol import EngineEndpoint
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

Answer = EngineStats | int | ProfileInfo

# How often a call that waits for its answer checks that the engine is still responsive.
_POLL_SECONDS = 1.0
# An idle engine sends a sign of life every second. After ten seconds without one, calls fail; after thirty, `health`
# reports it. The watchdog timeout applies too, if it is shorter.
_IDLE_CALL_LIMIT, _IDLE_HEALTH_LIMIT = 10.0, 30.0


class EngineClient:
    """Client number `client` of the engine process at `endpoint`, on one event loop.

    `stats` is the last reading received. `on_death` resolves with the reason when the engine ends unexpectedly.
    `shutdown` closes the client, and ends `processes`, if they are given, which are the engine's. `clock` returns
    seconds for the watchdog.
    """

    def __init__(
        self,
        endpoint: EngineEndpoint,
        config: EngineConfig,
        *,
        client: int = 0,
        processes: EngineProcesses | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._transport = ClientTransport(endpoint.command_address, endpoint.client_addresses[client])
        self._client = client
        self._processes = processes
        self._clock = clock
        self._watchdog_timeout = config.watchdog_timeout
        self._loop = asyncio.get_running_loop()
        self._streams: dict[str, RequestStream] = {}
        self._answers: dict[int, asyncio.Future[Answer]] = {}
        # Answers to an earlier process with this client number may still arrive.
        self._numbers = itertools.count(os.getpid() << 32)
        self._last_progress = self._last_heard = clock()
        self._is_idle = True  # until the first request or command
        self._is_closed = False
        self._dead: str | None = None
        self.pid = endpoint.pid
        self.info: EngineInfo = endpoint.info
        self.stats = EngineStats()
        self.on_death: asyncio.Future[str] = self._loop.create_future()
        self._loop.add_reader(self._transport.fileno(), self._receive)
        self._receive()
        if processes is not None:
            processes.on_death.add_done_callback(lambda death: self.end(death.result()))

    @classmethod
    async def launch(
        cls,
        config: EngineConfig,
        *,
        module: str = WORKER_MODULE,
        clock: Callable[[], float] = time.monotonic,
    ) -> EngineClient:
        """Start the engine process, as `EngineProcesses.launch` does, and return its only client."""
        processes = await EngineProcesses.launch(config, module=module)
        return cls(processes.endpoints[0], config, processes=processes, clock=clock)

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
        if self._client:
            requests = [msgspec.structs.replace(request, client=self._client) for request in requests]
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
        stats = await self._call(lambda number: ReadStats(self._client, number), timeout)
        assert isinstance(stats, EngineStats)
        return stats

    async def flush_cache(self, timeout: float = 5.0) -> int:
        """Remove all cached prefixes and return how many pages this freed. Raise the errors of `refresh_stats`."""
        num_pages = await self._call(lambda number: FlushCache(self._client, number), timeout)
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
        profile = await self._call(
            lambda number: StartProfile(self._client, number, output_dir, num_steps, with_stack), timeout
        )
        assert isinstance(profile, ProfileInfo)
        return profile

    async def stop_profile(self, timeout: float = 600.0) -> ProfileInfo:
        """End the profile and wait until it is written; requests continue. Raise the errors of `start_profile`."""
        profile = await self._call(lambda number: StopProfile(self._client, number), timeout)
        assert isinstance(profile, ProfileInfo)
        return profile

    async def shutdown(self, timeout: float = 10.0) -> None:
        """Close the client; open requests and calls end with an error. End its own engine, by force after `timeout`
        seconds."""
        if self._is_closed:
            return
        self._is_closed = True
        self.mark_dead("the engine has been shut down")
        if self._processes is not None:
            await self._processes.shutdown(timeout)
        self._loop.remove_reader(self._transport.fileno())
        self._transport.close()

    def end(self, reason: str) -> None:
        """Report that the engine has ended unexpectedly: take its last messages, then end everything with `reason`."""
        if not self._is_closed:
            self._receive()
            self.mark_dead(reason)
            self.on_death.set_result(reason)

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
