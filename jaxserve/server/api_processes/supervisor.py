"""The first process of a server with several API processes: it accepts connections and hands them over round robin.

It owns the port, the API processes and the engine processes, and the order of their start and end. An API process that
ends is replaced: the engine aborts its requests, and all others go on. It relays questions and placement updates
between the API processes, and speaks no HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
import secrets
import shutil
import signal
import socket
import tempfile
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from prometheus_client.multiprocess import mark_process_dead

from jaxserve.config.schema import EngineConfig
from jaxserve.config.server_schema import ServerConfig
from jaxserve.engine.client import EngineProcesses
from jaxserve.errors import JaxserveError
from jaxserve.observability.metrics import FILES_VARIABLE
from jaxserve.server.api_processes.child import ApiProcess
from jaxserve.server.api_processes.messages import (
    Answered,
    Answers,
    Ask,
    Asked,
    Drain,
    Drained,
    EngineEnded,
    EngineStarted,
    EngineWanted,
    Listening,
    ModelFetched,
    Ready,
    ReceivedUpdate,
    SentUpdate,
    SiblingEnded,
    Start,
    StartFailed,
    Stop,
    ToChild,
    ToParent,
)
from jaxserve.server.lifecycle import FLUSH_SECONDS, log_ready
from jaxserve.server.listener import url_of

logger = logging.getLogger("jaxserve.server")

# How long an API process may take to answer a question of another.
_ANSWER_SECONDS = 2.0
# How long API processes may take to end once they have nothing to do: slow clients are given FLUSH_SECONDS.
_END_SECONDS = FLUSH_SECONDS + 5.0
# An API process that says nothing for so long is stuck: it gets no connections, and nobody waits for its answers.
_SILENT_SECONDS = 5.0
# How long to wait after a connection that no API process takes, and after one that can't be accepted.
_RETRY_SECONDS = 0.01
_PAUSE_SECONDS = 1.0
# How many connections are accepted before other work is done.
_MOST_ACCEPTS = 64


@dataclasses.dataclass
class _OpenQuestion:
    """A question of an API process, and those whose answers are missing."""

    missing: set[int]
    answers: list[Any] = dataclasses.field(default_factory=list)


class Supervisor:
    """Serves on `listener` with `server_config.api_server_count` API processes, which load the model with the function
    that `loader` names. The engine processes run `engine_module`."""

    def __init__(
        self,
        engine_config: EngineConfig,
        server_config: ServerConfig,
        listener: socket.socket,
        loader: str,
        engine_module: str,
    ) -> None:
        self._engine_config = engine_config
        self._config = server_config
        self._listener = listener
        self._loader = loader
        self._engine_module = engine_module
        self._loop = asyncio.get_running_loop()
        self._children: dict[int, ApiProcess] = {}
        self._followers: set[asyncio.Task[None]] = set()
        self._metrics_dir = tempfile.mkdtemp(prefix="jaxserve-")
        # Names of pages are hashes, which all API processes must compute alike.
        self._environment = {FILES_VARIABLE: self._metrics_dir, "PYTHONHASHSEED": str(secrets.randbits(32))}
        self._engines: EngineProcesses | None = None
        self._known: list[ToChild] = []
        self._waiting: deque[socket.socket] = deque()
        self._questions: dict[tuple[int, int], _OpenQuestion] = {}
        self._turn = 0
        self._is_ending = False
        self._engine_wanted = asyncio.Event()
        self._stop = asyncio.Event()
        self._changed = asyncio.Event()
        self._failed: asyncio.Future[int] = self._loop.create_future()

    async def run(self) -> int:
        """Run the server and return the exit code."""
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, self._on_signal, number)
        url = url_of(self._listener, self._config)
        logger.info("Listening on %s, loading %s", url, self._engine_config.model)
        try:
            return await self._serve(url)
        finally:
            self._is_ending = True
            self._loop.remove_reader(self._listener)
            self._listener.close()
            self._broadcast(Stop())
            await asyncio.gather(*(child.stop(_END_SECONDS) for child in self._children.values()))
            if self._engines is not None:
                await self._engines.shutdown()
            shutil.rmtree(self._metrics_dir, ignore_errors=True)

    async def _serve(self, url: str) -> int:
        started = time.perf_counter()
        for index in range(self._config.api_server_count):
            await self._start_child(index)
        self._loop.add_reader(self._listener, self._accept)
        stopping = asyncio.create_task(self._stop.wait())
        loading = asyncio.create_task(self._load())
        await asyncio.wait((loading, stopping, self._failed), return_when=asyncio.FIRST_COMPLETED)
        if not loading.done():
            loading.cancel()
            await asyncio.gather(loading, return_exceptions=True)
            if self._failed.done():
                return self._failed.result()
            logger.info("Stopped while loading")
            return 0
        try:
            engines = loading.result()
        except JaxserveError as error:
            logger.error("Can't start: %s", error)
            return 2 if isinstance(error, ValueError) else 1
        log_ready(url, time.perf_counter() - started, engines.endpoints[0].info)
        death = engines.on_death
        await asyncio.wait((death, stopping, self._failed), return_when=asyncio.FIRST_COMPLETED)
        if not death.done():
            await self._drain(death)
        if death.done():
            logger.error("The engine has ended: %s", death.result())
            self._is_ending = True
            self._broadcast_to_later_ones_too(EngineEnded(death.result()))
            ends = [child.ended for child in self._children.values()]
            await asyncio.wait(ends, timeout=_END_SECONDS + 2 * FLUSH_SECONDS)
            return 1
        return self._failed.result() if self._failed.done() else 0

    async def _load(self) -> EngineProcesses:
        """Start the engine, and return when all API processes are ready."""
        await self._engine_wanted.wait()
        count = self._config.api_server_count
        self._engines = await EngineProcesses.launch(self._engine_config, module=self._engine_module, num_clients=count)
        self._broadcast_to_later_ones_too(EngineStarted(list(self._engines.endpoints)))
        await self._until(lambda child: child.is_ready)
        return self._engines

    async def _drain(self, death: asyncio.Future[str]) -> None:
        timeout = self._config.drain_timeout
        logger.info("Draining %d API processes: open requests have up to %g s", len(self._children), timeout)
        self._is_ending = True
        self._broadcast_to_later_ones_too(Drain())
        drained = asyncio.create_task(self._until(lambda child: child.is_drained or child.ended.done()))
        await asyncio.wait((drained, death), timeout=timeout + _END_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        drained.cancel()

    async def _until(self, condition: Callable[[ApiProcess], bool]) -> None:
        """Wait until all API processes meet a condition."""
        while not all(map(condition, self._children.values())):
            self._changed.clear()
            await self._changed.wait()

    async def _start_child(self, index: int) -> None:
        order = Start(index, self._engine_config, self._config, self._loader, self._metrics_dir, os.getpid())
        child = self._children[index] = await ApiProcess.start(order, self._environment)
        for message in self._known:
            child.send(message)
        task = asyncio.create_task(self._follow(child))
        self._followers.add(task)
        task.add_done_callback(self._on_followed)

    def _on_followed(self, task: asyncio.Task[None]) -> None:
        """End the server if following an API process has failed, since it would run on without control."""
        self._followers.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None and not self._failed.done():
            logger.error("following an API process has failed", exc_info=error)
            self._failed.set_result(1)

    async def _follow(self, child: ApiProcess) -> None:
        async for message in child.messages():
            self._on_message(child, message)
            self._changed.set()
        code = await child.ended
        self._changed.set()
        if self._is_ending or self._failed.done():
            return
        if not child.is_ready:
            logger.error("API process %d ended with code %d before it was ready", child.index, code)
            self._failed.set_result(1)
            return
        logger.error(
            "API process %d (pid %d) ended with code %d: its open requests and stored responses are lost; it is "
            "started again",
            child.index,
            child.pid,
            code,
        )
        await child.stop(0.0)
        mark_process_dead(child.pid, self._metrics_dir)
        if self._engines is not None:
            self._engines.forget_client(child.index)
        self._forget(child.index)
        await self._start_child(child.index)

    def _on_message(self, child: ApiProcess, message: ToParent) -> None:
        match message:
            case ModelFetched():
                self._broadcast_to_later_ones_too(message)
            case EngineWanted():
                self._engine_wanted.set()
            case Listening():
                child.last_seen = self._loop.time()
            case Ready():
                child.is_ready = True
            case Drained():
                child.is_drained = True
            case StartFailed(text, exit_code):
                if not self._failed.done():
                    logger.error("Can't start: %s", text)
                    self._failed.set_result(exit_code)
            case Ask(number, question):
                others = [other for other in self._children.values() if other.is_ready and other is not child]
                expected = {other.index for other in others if not self._is_stuck(other)}
                self._questions[child.index, number] = _OpenQuestion(expected)
                for other in others:
                    other.send(Asked(child.index, number, question))
                self._answer_if_complete(child.index, number)
                self._loop.call_later(_ANSWER_SECONDS, self._answer, child.index, number)
            case Answered(asker, number, answer):
                if (asked := self._questions.get((asker, number))) is not None:
                    asked.missing.discard(child.index)
                    asked.answers.append(answer)
                    self._answer_if_complete(asker, number)
            case SentUpdate(update):
                for other in self._children.values():
                    if other is not child:
                        other.send(ReceivedUpdate(child.index, update))

    def _answer_if_complete(self, asker: int, number: int) -> None:
        if not self._questions[asker, number].missing:
            self._answer(asker, number)

    def _answer(self, asker: int, number: int) -> None:
        """Send the answers so far, unless they are sent."""
        if (asked := self._questions.pop((asker, number), None)) is not None:
            self._children[asker].send(Answers(number, asked.answers))

    def _forget(self, index: int) -> None:
        """Stop waiting for answers of an API process that has ended, and tell the others."""
        for asker, number in list(self._questions):
            if asker == index:
                del self._questions[asker, number]
            else:
                self._questions[asker, number].missing.discard(index)
                self._answer_if_complete(asker, number)
        self._broadcast(SiblingEnded(index))

    def _broadcast(self, message: ToChild) -> None:
        for child in self._children.values():
            child.send(message)

    def _broadcast_to_later_ones_too(self, message: ToChild) -> None:
        self._known.append(message)
        self._broadcast(message)

    def _accept(self) -> None:
        for _ in range(_MOST_ACCEPTS):
            try:
                connection, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:  # too many open files, or the client has gone
                logger.warning("can't accept a connection: %s", error)
                self._pause(_PAUSE_SECONDS)
                return
            with contextlib.suppress(OSError):
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if not self._hand_over(connection):
                self._waiting.append(connection)
                self._pause(_RETRY_SECONDS)
                return

    def _hand_over(self, connection: socket.socket) -> bool:
        """Give a connection to the next API process that takes it: one that is ready and not stuck, if there is one."""
        listening = [child for child in self._children.values() if child.last_seen and not child.ended.done()]
        ready = [child for child in listening if child.is_ready] or listening
        able = [child for child in ready if not self._is_stuck(child)] or ready
        for _ in able:
            self._turn += 1
            if able[self._turn % len(able)].send_connection(connection):
                connection.close()  # the API process has its own handle of it
                return True
        return False

    def _is_stuck(self, child: ApiProcess) -> bool:
        return child.last_seen < self._loop.time() - _SILENT_SECONDS

    def _pause(self, seconds: float) -> None:
        """Leave further connections in the kernel's queue for a time."""
        self._loop.remove_reader(self._listener)
        self._loop.call_later(seconds, self._resume)

    def _resume(self) -> None:
        while self._waiting:
            if not self._hand_over(self._waiting[0]):
                self._loop.call_later(_RETRY_SECONDS, self._resume)
                return
            self._waiting.popleft()
        if self._listener.fileno() >= 0:
            self._loop.add_reader(self._listener, self._accept)

    def _on_signal(self, number: int) -> None:
        if not self._stop.is_set():
            self._stop.set()
            return
        logger.warning("Second signal: exiting at once")
        for child in self._children.values():
            child.kill()
        for endpoint in self._engines.endpoints if self._engines is not None else ():
            with contextlib.suppress(ProcessLookupError):
                os.kill(endpoint.pid, signal.SIGKILL)
        os._exit(128 + number)
