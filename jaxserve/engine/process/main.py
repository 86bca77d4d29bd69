"""The engine process: builds an engine, serves its clients' commands, and lives no longer than its parent.

It owns the process (signals, lifetime, reports) and the turn of its loop: take commands, run a step, tell each client.
What the engine is made of comes from the caller, so that nothing here knows a device.
"""

from __future__ import annotations

import faulthandler
import functools
import gc
import logging
import os
import signal
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future

import msgspec

from jaxserve import host
from jaxserve.api_types import EngineInfo, EngineRequest, FinishReason, Profile, TokenEvent
from jaxserve.config.schema import EngineConfig
from jaxserve.engine.core.loop import EngineLoop
from jaxserve.engine.multihost.process_group import Nodes
from jaxserve.engine.process.follower import Obey, follow
from jaxserve.engine.process.launch_protocol import Ended, LaunchOrder, Started, ended_by, read_order, write_frame
from jaxserve.engine.process.transport import (
    Abort,
    Add,
    CacheFlushed,
    Command,
    CommandFailed,
    EngineTransport,
    FlushCache,
    Idle,
    Message,
    ProfileAnswer,
    Question,
    ReadStats,
    Shutdown,
    StartProfile,
    StatsReading,
    StepEvents,
    StopProfile,
    Unreadable,
)
from jaxserve.errors import ConfigError, InvalidRequestError, JaxserveError
from jaxserve.observability import log

logger = logging.getLogger("jaxserve.engine")

# How long an engine with nothing to do goes without a look whether a profile has been written.
_PROFILE_POLL = 0.05
# How often one with nothing to do says that it lives; a short watchdog wants to hear it several times.
_MOST_SILENT = 1.0
_SIGNS_BEFORE_ALARM = 4

Build = Callable[..., tuple[EngineLoop, EngineInfo]]
BuildFollower = Callable[[EngineConfig, Nodes], tuple[Obey, EngineInfo]]


def run(build: Build, build_follower: BuildFollower | None = None) -> int:
    """Be the engine process that the order on stdin asks for; returns the exit code when it has ended.

    `build` takes the configuration, and in a mesh of several processes `Nodes`, where `build_follower` makes what
    follows. An error while building or running is reported to the parent, written to the log, and ends the others too.
    """
    # Whether Ctrl-C or a SIGTERM to the whole group ends the service, and when, is the parent's to say: it may drain.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    faulthandler.enable()
    lifeline = sys.stdin.fileno()
    order = read_order(lifeline)
    if order is None:
        sys.exit("no order to start came on stdin: this module is run by jaxserve itself, see `jaxserve serve`")
    os.set_inheritable(order.report_fd, False)
    _die_with(order.parent_pid)
    log.setup(order.config.log_level, order.share.name)
    imported = time.monotonic()
    nodes: Nodes | None = None
    try:
        if order.config.nnodes > 1:
            nodes = Nodes.meet(order.config, lambda reason: write_frame(order.report_fd, Ended(reason)))
        if nodes is not None and not nodes.is_leader:
            assert build_follower is not None, "a worker that can't follow"
            obey, info = build_follower(order.config, nodes)
            write_frame(order.report_fd, Started(_timed(info, order, imported)))
            follow(nodes, obey, lifeline)
        loop, info = build(order.config) if nodes is None else build(order.config, nodes)
        info = _timed(info, order, imported)
        with EngineTransport(order.command_address, order.client_addresses, lifeline) as transport:
            write_frame(order.report_fd, Started(info))
            # What start-up left will never be garbage; there is no need to look through it again and again.
            gc.collect()
            gc.freeze()
            silence = min(_MOST_SILENT, order.config.watchdog_timeout / _SIGNS_BEFORE_ALARM)
            _Server(loop, transport, silence).run()
    except Exception as error:
        if nodes is not None and not isinstance(error, ConfigError):
            nodes.wait_for_cause()
        if not isinstance(error, JaxserveError) or error.__cause__ is not None:
            logger.exception("the engine has failed")
        write_frame(order.report_fd, ended_by(error))
        if nodes is not None:
            nodes.leave(str(error), failed=True)
            os._exit(1)
        return 1
    if nodes is not None:
        nodes.leave("it was told to end")
        # What jax does at the exit waits for processes that have gone already.
        os._exit(0)
    return 0


class _Server:
    """Turns commands into calls of the engine, and its events into one message a step for each client.

    Only a failed step ends it: whatever a command raises is answered. While there is nothing to do, all clients hear
    from it every `silence` seconds.
    """

    def __init__(self, loop: EngineLoop, transport: EngineTransport, silence: float = _MOST_SILENT) -> None:
        self._loop = loop
        self._transport = transport
        self._silence = silence
        self._owners: dict[str, int] = {}
        self._outbox: list[list[TokenEvent]] = [[] for _ in range(transport.num_clients)]
        self._num_steps = 0
        self._profiles: list[tuple[StopProfile, Future[Profile]]] = []

    def run(self) -> None:
        """Serve until told to end, or the parent is gone."""
        loop, transport = self._loop, self._transport
        while True:
            is_idle = not loop.has_work
            commands = transport.receive(wait=is_idle, timeout=_PROFILE_POLL if self._profiles else self._silence)
            if commands is None or not all(self._obey(command) for command in commands):
                loop.profiling.close()
                return
            if loop.has_work:
                self._route(loop.step())
            elif is_idle and not commands:
                for client in range(transport.num_clients):
                    transport.send(client, Idle())
            self._publish()
            if self._profiles:
                self._hand_out_profiles()

    def _obey(self, command: Command | Unreadable) -> bool:
        """Whether to go on."""
        match command:
            case Shutdown():
                return False
            case Add(requests):
                for request in requests:
                    self._add(request)
            case Abort(request_ids):
                try:
                    self._route(self._loop.abort(request_ids))
                except Exception:
                    logger.exception("requests can't be aborted")
            case ReadStats(_, number):
                self._answer(command, lambda: StatsReading(number, self._loop.stats(check=True)))
            case FlushCache(_, number):
                self._answer(command, lambda: CacheFlushed(number, self._loop.flush_cache()))
            case StartProfile(_, number, output_dir, num_steps, with_stack):
                start = self._loop.profiling.start
                self._answer(
                    command,
                    lambda: ProfileAnswer(number, start(output_dir, num_steps=num_steps, with_stack=with_stack)),
                )
            case StopProfile():
                self._answer(command, lambda: self._profiles.append((command, self._loop.profiling.stop())))
            case Unreadable(problem, requests, question):
                logger.error("a command can't be read: %s", problem)
                for client, request_id in requests:
                    self._outbox[client].append(_refusal(request_id, problem))
                if question is not None:
                    client, number = question
                    self._transport.send(client, CommandFailed(number, problem, refused=False))
        return True

    def _add(self, request: EngineRequest) -> None:
        try:
            refusal = self._loop.add(request)
        except Exception as error:
            logger.exception("a request can't be let in")
            refusal = _refusal(request.request_id, f"{type(error).__name__}: {error}")
        if refusal is None:
            self._owners[request.request_id] = request.client
        else:
            self._outbox[request.client].append(refusal)

    def _answer(self, question: Question, work: Callable[[], Message | None]) -> None:
        """Send what `work` returns, if anything, or what it raises."""
        try:
            message = work()
            if message is not None:
                self._transport.send(question.client, message)
        except Exception as error:
            if not isinstance(error, JaxserveError):
                logger.exception("%s has failed", type(question).__name__)
            self._transport.send(question.client, _failed(question.number, error))

    def _hand_out_profiles(self) -> None:
        """Answer for those that have been written meanwhile."""
        waiting = self._profiles
        self._profiles = [(question, written) for question, written in waiting if not written.done()]
        for question, written in waiting:
            if written.done():
                self._answer(question, functools.partial(_profile_answer, question.number, written))

    def _route(self, events: list[TokenEvent]) -> None:
        owners, outbox = self._owners, self._outbox
        for event in events:
            request_id = event.request_id
            outbox[owners[request_id]].append(event)
            if event.finish_reason is not None:
                del owners[request_id]

    def _publish(self) -> None:
        """Tell every client of a finished step, even one that has no event in it: it watches the progress."""
        stats = self._loop.stats()
        if stats.num_steps == self._num_steps and not any(self._outbox):
            return
        self._num_steps = stats.num_steps
        with self._loop.timeline.span("serialize"):
            for client, events in enumerate(self._outbox):
                self._transport.send(client, StepEvents(events, stats))
                self._outbox[client] = []


def _failed(number: int, error: Exception) -> CommandFailed:
    words = str(error) if isinstance(error, JaxserveError) else f"{type(error).__name__}: {error}"
    # A path may hold what is no text.
    message = words.encode(errors="backslashreplace").decode()
    refused = isinstance(error, InvalidRequestError)
    return CommandFailed(number, message, refused, error.param if isinstance(error, InvalidRequestError) else None)


def _refusal(request_id: str, problem: str) -> TokenEvent:
    return TokenEvent(
        request_id, [], finish_reason=FinishReason.ERROR, error=f"the engine can't take the request: {problem}"
    )


def _profile_answer(number: int, written: Future[Profile]) -> ProfileAnswer:
    return ProfileAnswer(number, written.result())


def _timed(info: EngineInfo, order: LaunchOrder, imported: float) -> EngineInfo:
    """With what only this module sees of the start: until the first line ran here, and until the engine stood, both
    since the parent started the process."""
    imports, engine = (round(at - order.spawned_at, 3) for at in (imported, time.monotonic()))
    seconds = {"imports": imports, **info.startup_seconds, "engine": engine}
    return msgspec.structs.replace(info, startup_seconds=seconds)


def _die_with(parent_pid: int) -> None:
    """End with the parent, so that no engine is left behind even by kill -9. (Where the kernel doesn't see to it, the
    engine ends when it next listens to its parent.)"""
    host.die_with_parent(signal.SIGKILL)
    if os.getppid() != parent_pid:
        sys.exit("the parent process has ended before the engine started")
