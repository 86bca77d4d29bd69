"""An engine in a process of its own: requests go out over the wire, events come back into a stream for each.

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

from jaxserve.api_types import EngineInfo, EngineRequest, EngineStats, Profile, ReplicaReading
from jaxserve.config.schema import EngineConfig
from jaxserve.engine.client.stream import RequestStream, Watch
from jaxserve.engine.process.launch_protocol import WHOLE_MACHINE, Share
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

WORKER = "jaxserve.worker"

Answer = EngineStats | int | Profile

# How often a wait for an answer checks whether there can be one.
_LOOK = 1.0
# An engine with nothing to do says every second that it lives. After ten without, no answer of it is waited for, and
# after thirty its health is bad, if the watchdog isn't quicker.
_IDLE_SILENCE, _IDLE_ALARM = 10.0, 30.0


class EngineClient:
    """An engine in its own process. `launch` starts it, `shutdown` ends it; between them it belongs to one event loop.

    `stats` is the last reading received. `on_death` resolves with the reason when the process ends unasked.
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
        self._is_idle = True  # until something is asked of it
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
        module: str = WORKER,
        share: Share = WHOLE_MACHINE,
        clock: Callable[[], float] = time.monotonic,
    ) -> EngineClient:
        """Start the engine process and wait until it is ready.

        Raises `ConfigError` or `ModelNotFoundError` as the engine did, `EngineDeadError` for any other failure.
        `clock` is what the watchdog goes by.
        """
        process = EngineProcess(config, module, share)
        try:
            transport = ClientTransport(process.command_address, process.client_address)
        except BaseException:
            await to_the_end(process.stop(timeout=0.0))
            raise
        client = cls(process, transport, config, clock)
        try:
            client.info = await process.started()
        except BaseException:
            await to_the_end(client.shutdown(timeout=0.0))
            raise
        client._last_heard = clock()
        client._loop.add_reader(transport.fileno(), client._receive)
        client._receive()
        process.ended.add_done_callback(lambda ended: client._on_end(ended.result()))
        return client

    @property
    def pid(self) -> int:
        """Process id of the engine."""
        return self._process.pid

    @property
    def replicas(self) -> tuple[ReplicaReading, ...]:
        """Each engine process and its last reading: this one."""
        return (ReplicaReading(self.pid, self.stats),)

    @property
    def health(self) -> str | None:
        """None while the engine makes progress or says that it has nothing to do, else what is wrong."""
        return self._problem(_IDLE_ALARM)

    def submit(self, request: EngineRequest) -> RequestStream:
        """Hand a request over; its events come through the stream, a refusal (such as a full queue) too.

        Raises `EngineDeadError` when there is no engine, `EngineUnresponsiveError` when `health` says that it is stuck,
        `InvalidRequestError` when the id is open.
        """
        [stream] = self.submit_all([request])
        return stream

    def submit_all(self, requests: Sequence[EngineRequest], watch: Watch | None = None) -> list[RequestStream]:
        """Hand several over in one message, so that they can start in one step. Raises as `submit` does.

        `watch` is called with the first event of each and with the last, which may be the same.
        """
        self._require()
        if not self._streams:
            self._last_progress = self._clock()
        streams: dict[str, RequestStream] = {}
        for request in requests:
            name = request.request_id
            if name in self._streams or name in streams:
                raise InvalidRequestError(f"a request with the id {name!r} is open already", param="request_id")
            streams[name] = RequestStream(request, self.abort, watch)
        self._transport.send(Add(list(requests)))
        self._streams |= streams
        self._is_idle = False
        return list(streams.values())

    def abort(self, request_ids: Iterable[str]) -> None:
        """Ask the engine to end these requests; each still gets its last event. Ids that are not open are ignored."""
        open_ids = [request_id for request_id in request_ids if request_id in self._streams]
        if open_ids:
            self._transport.send(Abort(open_ids))

    async def refresh_stats(self, timeout: float = 5.0) -> EngineStats:
        """Ask for a reading, for which the engine audits its books.

        Raises `TimeoutError`, `EngineUnresponsiveError` (when there is no use in waiting), `EngineDeadError`.
        """
        stats = await self._ask(lambda number: ReadStats(0, number), timeout)
        assert isinstance(stats, EngineStats)
        return stats

    async def flush_cache(self, timeout: float = 5.0) -> int:
        """Forget every cached prefix; how many pages that gave back. Raises as `refresh_stats` does."""
        num_pages = await self._ask(lambda number: FlushCache(0, number), timeout)
        assert isinstance(num_pages, int)
        return num_pages

    async def start_profile(
        self,
        output_dir: str | None = None,
        *,
        num_steps: int | None = None,
        with_stack: bool = False,
        timeout: float = 60.0,
    ) -> Profile:
        """Record a profile from the next step on, until `stop_profile` or for `num_steps` steps.

        `output_dir` is a folder within `profile_dir`. Raises `InvalidRequestError`, `RequestFailedError` as the engine
        did, else as `refresh_stats` does.
        """
        profile = await self._ask(lambda number: StartProfile(0, number, output_dir, num_steps, with_stack), timeout)
        assert isinstance(profile, Profile)
        return profile

    async def stop_profile(self, timeout: float = 600.0) -> Profile:
        """End the profile and wait until it is written; requests go on. Raises as `start_profile` does."""
        profile = await self._ask(lambda number: StopProfile(0, number), timeout)
        assert isinstance(profile, Profile)
        return profile

    async def shutdown(self, timeout: float = 10.0) -> None:
        """End the engine, by force after `timeout` seconds, and whatever is still open with an error."""
        if self._is_closed:
            return
        self._is_closed = True
        if not self._process.ended.done():
            with contextlib.suppress(OSError):
                self._transport.send(Shutdown())
        self.bury("the engine has been shut down")
        await self._process.stop(timeout)
        self._loop.remove_reader(self._transport.fileno())
        self._transport.close()

    def bury(self, reason: str) -> None:
        """Take nothing more from the engine, and say so to everybody who waits."""
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

    def _silence(self) -> float:
        """Seconds since something was heard of the engine."""
        if self._clock() - self._last_heard > _LOOK:
            self._receive()  # what has come while this process itself was busy
        return self._clock() - self._last_heard

    def _problem(self, idle_limit: float) -> str | None:
        """What is wrong; an engine that has nothing to do may be silent for `idle_limit` seconds."""
        if self._dead is not None:
            return self._dead
        limit, silence = self._watchdog_timeout, self._silence()
        if self._streams and self._clock() - self._last_progress > limit:
            return f"no step finished for {limit:g} s while {len(self._streams)} requests are open"
        if silence > limit:
            return f"the engine was not heard for {limit:g} s"
        if self._is_idle and not self._streams and silence > idle_limit:
            return f"the engine was not heard for {idle_limit:g} s, with nothing to do"
        return None

    def _require(self, idle_limit: float = math.inf) -> None:
        """Raises where nothing can be expected of the engine."""
        problem = self._problem(idle_limit)
        if problem is not None:
            raise EngineDeadError(problem) if self._dead is not None else EngineUnresponsiveError(problem)

    async def _ask(self, command: Callable[[int], Command], timeout: float) -> Answer:
        """Send a command that is answered under the number given to it."""
        self._require(_IDLE_SILENCE)
        number = next(self._numbers)
        question = command(number)
        if isinstance(question, StartProfile):
            self._is_idle = False  # a profiler may take its time to start
        answer = self._answers[number] = self._loop.create_future()
        try:
            self._transport.send(question)
            async with asyncio.timeout(timeout):
                while not answer.done():
                    await asyncio.wait((answer,), timeout=_LOOK)
                    if not answer.done():
                        self._require(_IDLE_SILENCE)
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

    def _on_end(self, reason: str) -> None:
        if self._is_closed:
            return
        self._receive()
        self.bury(reason)
        self.on_death.set_result(reason)


async def to_the_end(work: Coroutine[Any, Any, None]) -> None:
    """Do all of `work`, also when who waits for it is cancelled meanwhile: half a clean-up leaves a process behind."""
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
