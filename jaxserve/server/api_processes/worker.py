"""One of several API processes: it serves the connections that the first process of the server hands to it.

Owns what the process exchanges with its parent: reports, questions and placement updates of the other API processes,
and when to end. What it serves is `lifecycle`'s.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import itertools
import os
import signal
import socket
import sys
from typing import Any

from jaxserve import host
from jaxserve.engine.client import Engine, EngineEndpoint, PlacementListener, attach_engine
from jaxserve.errors import JaxserveError
from jaxserve.observability import log
from jaxserve.server.api_processes.messages import (
    Answered,
    Answers,
    Ask,
    Asked,
    Channel,
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
from jaxserve.server.lifecycle import HttpServer, Lifecycle
from jaxserve.server.loading import fetch_model
from jaxserve.server.server_state import LoadedModel, ServerState
from jaxserve.server.siblings import Question

# The parent answers before, with what it has.
_ANSWER_SECONDS = 5.0
# Seconds between two reports of this process that it is alive.
_REPORT_INTERVAL = 1.0
# A child process that has a connection too would keep it open. On Linux, none can start before this is in force.
_NOT_INHERITED = getattr(socket, "MSG_CMSG_CLOEXEC", 0)


class Worker:
    """The role of one of several API processes, its `Siblings` and its `PlacementBroadcast`."""

    def __init__(self, order: Start, parent: Channel[ToParent, ToChild]) -> None:
        self.stop = asyncio.Event()
        self.listener: PlacementListener | None = None
        self._order = order
        self._parent = parent
        self._fetched = asyncio.Event()
        self._endpoints: asyncio.Future[list[EngineEndpoint]] = asyncio.get_running_loop().create_future()
        self._engine: Engine | None = None
        self._death: str | None = None
        self._may_close = asyncio.Event()
        self._numbers = itertools.count()
        self._asked: dict[int, asyncio.Future[list[Any]]] = {}

    async def fetch_model(self) -> None:
        """Fetch the model, with a progress bar, in process 0; in the others, wait until it has."""
        if self._order.index == 0:
            await fetch_model(self._order.engine_config)
            self._parent.send(ModelFetched())
        await self._fetched.wait()

    async def start_engine(self) -> Engine:
        """Connect to the engines that the parent starts."""
        self._parent.send(EngineWanted())
        endpoints = await self._endpoints
        order = self._order
        self._engine = await attach_engine(endpoints, order.engine_config, client=order.index, broadcast=self)
        if self._death is not None:
            self._engine.end(self._death)
        return self._engine

    def report_failure(self, error: JaxserveError, exit_code: int) -> None:
        """SentUpdate the parent why this process can't serve."""
        self._parent.send(StartFailed(str(error), exit_code))

    def report_ready(self, loaded: LoadedModel, seconds: float) -> None:
        """SentUpdate the parent that requests are served."""
        _set_up_log(self._order, is_ready=True)
        self._parent.send(Ready())

    async def finish_drain(self) -> None:
        """SentUpdate the parent that no request is open, and wait for its word."""
        self._parent.send(Drained())
        await self._may_close.wait()

    async def ask(self, question: Question) -> list[Any]:
        """Return the answers of all other API processes."""
        number = next(self._numbers)
        answers = self._asked[number] = asyncio.get_running_loop().create_future()
        self._parent.send(Ask(number, question))
        try:
            async with asyncio.timeout(_ANSWER_SECONDS):
                return await answers
        except TimeoutError:
            return []
        finally:
            del self._asked[number]

    def send_update(self, update: bytes) -> None:
        """Send an update of placements to all other API processes."""
        self._parent.send(SentUpdate(update))

    async def follow(self, state: ServerState) -> None:
        """Do what the parent says until it ends, which ends this process too."""
        while (message := await self._parent.receive()) is not None:
            match message:
                case ModelFetched():
                    self._fetched.set()
                case EngineStarted(endpoints):
                    self._endpoints.set_result(endpoints)
                case EngineEnded(reason):
                    self._death = reason
                    if self._engine is not None:
                        self._engine.end(reason)
                case Drain():
                    self.stop.set()
                case Stop():
                    self.stop.set()
                    self._may_close.set()
                case Asked(asker, number, question):
                    self._parent.send(Answered(asker, number, state.answer(question)))
                case Answers(number, answers):
                    if (waiting := self._asked.get(number)) is not None and not waiting.done():
                        waiting.set_result(answers)
                case ReceivedUpdate(origin, update):
                    if self.listener is not None:
                        self.listener.apply_update(update, origin)
                case SiblingEnded(index):
                    if self.listener is not None:
                        self.listener.forget(index)
        os._exit(1)


async def _run(control: socket.socket, connections: socket.socket) -> int:
    parent = await Channel[ToParent, ToChild].open(ToChild, control)
    order = await parent.receive()
    if not isinstance(order, Start):
        sys.exit("no order came: jaxserve starts this module itself; run `jaxserve serve` instead")
    host.die_with_parent(order.parent_pid, signal.SIGKILL)
    _set_up_log(order, is_ready=False)
    module, _, name = order.loader.partition(":")
    load = getattr(importlib.import_module(module), name)
    worker = Worker(order, parent)
    state = ServerState(order.server_config, order.engine_config, worker, order.metrics_dir)
    try:
        lifecycle = Lifecycle(state, worker, load, [])
    except JaxserveError as error:  # a file of TLS, which the parent could read before
        worker.report_failure(error, 2)
        return 2
    following = asyncio.create_task(worker.follow(state))
    running = asyncio.create_task(lifecycle.run())
    await lifecycle.server.listening.wait()
    asyncio.get_running_loop().add_reader(connections, _adopt_all, connections, lifecycle.server)
    reporting = asyncio.create_task(_report_listening(parent))
    await asyncio.wait((running, following), return_when=asyncio.FIRST_COMPLETED)
    reporting.cancel()
    if following.done():
        following.result()  # raises why the parent can't be followed; the parent replaces this process
    following.cancel()
    return await running


async def _report_listening(parent: Channel[ToParent, ToChild]) -> None:
    while True:
        parent.send(Listening())
        await asyncio.sleep(_REPORT_INTERVAL)


def _adopt_all(connections: socket.socket, server: HttpServer) -> None:
    """Take the connections that the parent has handed over."""
    with contextlib.suppress(BlockingIOError):
        while True:
            _, handles, _, _ = socket.recv_fds(connections, 16, 1, _NOT_INHERITED)
            for handle in handles:
                os.set_inheritable(handle, False)
                server.adopt(socket.socket(fileno=handle))


def _set_up_log(order: Start, *, is_ready: bool) -> None:
    """Log as the settings say; until they are ready, processes after the first, which says the same, warn only.

    A file is applied once: the second time would take back the levels that `ServerConfig` has given to loggers.
    """
    config = order.engine_config
    if config.log_config_file is None:
        log.setup("warning" if order.index and not is_ready else config.log_level, f"API{order.index}")
    elif not is_ready:
        log.setup(config.log_level, config_file=config.log_config_file)


def main() -> int:
    """Run the process on the two sockets whose descriptors are its arguments; return the exit code."""
    # The parent handles Ctrl-C and SIGTERM, also when they were sent to all processes: it drains first.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    control, connections = (socket.socket(fileno=int(argument)) for argument in sys.argv[1:3])
    connections.setblocking(False)
    with asyncio.Runner(loop_factory=host.new_event_loop) as runner:
        return runner.run(_run(control, connections))


if __name__ == "__main__":
    sys.exit(main())
