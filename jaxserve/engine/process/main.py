"""The engine process: builds an engine, executes its clients' commands, and ends when its parent does.

It owns the process (signals, lifetime, reports) and each turn of its loop: take commands, run a step, send the events
to the clients. The caller supplies the functions that build the engine, so nothing here depends on a device.
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
from collections.abc import Callable, Sequence
from concurrent.futures import Future

import msgspec

from jaxserve import host
from jaxserve.api_types import EngineInfo, EngineRequest, FinishReason, ProfileInfo, TokenEvent
from jaxserve.config.schema import EngineConfig
from jaxserve.engine.core.loop import EngineLoop
from jaxserve.engine.multihost.process_group import ProcessGroup
from jaxserve.engine.process.cache_publisher import CachePublisher, open_publishers
from jaxserve.engine.process.follower import Execute, execute_commands
from jaxserve.engine.process.launch_protocol import (
    Failed,
    LaunchOrder,
    Started,
    failure_report,
    read_order,
    write_message,
)
from jaxserve.engine.process.transport import (
    Abort,
    Add,
    CacheFlushed,
    Command,
    CommandFailed,
    EngineTransport,
    FlushCache,
    ForgetClient,
    Idle,
    Message,
    ProfileAnswer,
    Query,
    ReadStats,
    Shutdown,
    StartProfile,
    StatsReading,
    StepEvents,
    StopProfile,
    UndecodableCommand,
)
from jaxserve.engine.process.watchdog import SoftWatchdog
from jaxserve.errors import ConfigError, InvalidRequestError, JaxserveError
from jaxserve.observability import log

logger = logging.getLogger("jaxserve.engine")

# Seconds between two checks whether a profile has been written, while the engine has nothing else to do.
_PROFILE_POLL_INTERVAL = 0.05
# Seconds between two heartbeats of an idle engine; fewer where the watchdog's timeout is short.
_HEARTBEAT_INTERVAL = 1.0
_HEARTBEATS_PER_TIMEOUT = 4

Build = Callable[..., tuple[EngineLoop, EngineInfo]]
BuildFollower = Callable[[EngineConfig, ProcessGroup], tuple[Execute, EngineInfo]]


def run(build: Build, build_follower: BuildFollower | None = None) -> int:
    """Run the engine process as the launch order on stdin says, and return its exit code.

    `build` takes the configuration and, in a mesh of several processes, the `ProcessGroup`; on a follower
    `build_follower` is called instead. An error while building or running is reported to the parent, logged, and ends
    the other processes of the group too.
    """
    # The parent handles Ctrl-C and SIGTERM, also when they were sent to the whole group: it may drain first.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    faulthandler.enable()
    parent_pipe = sys.stdin.fileno()
    order = read_order(parent_pipe)
    if order is None:
        sys.exit("no launch order came on stdin: jaxserve starts this module itself; run `jaxserve serve` instead")
    os.set_inheritable(order.report_fd, False)
    # Where the kernel can't do this, the engine ends when it next reads from its parent.
    host.die_with_parent(order.parent_pid, signal.SIGKILL)
    imported = time.monotonic()
    group: ProcessGroup | None = None
    watchdog = SoftWatchdog(order.config.soft_watchdog_timeout)
    try:
        log.setup(order.config.log_level, order.resources.name, order.config.log_config_file)
        if order.config.nnodes > 1:
            group = ProcessGroup.connect(order.config, lambda reason: write_message(order.report_fd, Failed(reason)))
        if group is not None and not group.is_leader:
            assert build_follower is not None, "this worker can't build a follower"
            execute, info = build_follower(order.config, group)
            write_message(order.report_fd, Started(_with_startup_times(info, order, imported)))
            watchdog.start()
            execute_commands(group, execute, parent_pipe, watchdog)
        with open_publishers(order.config, order.resources.index) as publishers:
            loop, info = build(order.config) if group is None else build(order.config, group)
            info = _with_startup_times(info, order, imported)
            with EngineTransport(order.command_address, order.client_addresses, parent_pipe) as transport:
                write_message(order.report_fd, Started(info))
                # Objects made at start-up live as long as the process: the garbage collector need not scan them again.
                gc.collect()
                gc.freeze()
                interval = min(_HEARTBEAT_INTERVAL, order.config.watchdog_timeout / _HEARTBEATS_PER_TIMEOUT)
                watchdog.start()
                _CommandServer(loop, transport, interval, publishers, watchdog).run()
    except Exception as error:
        if group is not None and not isinstance(error, ConfigError):
            group.wait_for_cause()
        if not isinstance(error, JaxserveError) or error.__cause__ is not None:
            logger.exception("the engine has failed")
        write_message(order.report_fd, failure_report(error))
        if group is not None:
            group.leave(str(error), failed=True)
            os._exit(1)
        return 1
    if group is not None:
        group.leave("node rank 0 was asked to stop")
        # jax's exit handlers would wait for processes that have ended.
        os._exit(0)
    return 0


class _CommandServer:
    """Executes commands on the engine, and sends each client one message per step with its events.

    An error of a command is sent as its answer; only a failed step ends the process. While there is nothing to do,
    every client gets a heartbeat each `heartbeat_interval` seconds. The `publishers` of the ranks, if
    there are any, publish the events of their prefix caches. `watchdog` is told of each step.
    """

    def __init__(
        self,
        loop: EngineLoop,
        transport: EngineTransport,
        heartbeat_interval: float = _HEARTBEAT_INTERVAL,
        publishers: Sequence[CachePublisher] = (),
        watchdog: SoftWatchdog | None = None,
    ) -> None:
        self._loop = loop
        self._transport = transport
        self._heartbeat_interval = heartbeat_interval
        self._publishers = publishers
        self._watchdog = watchdog or SoftWatchdog(None)
        self._owners: dict[str, int] = {}
        self._outbox: list[list[TokenEvent]] = [[] for _ in range(transport.num_clients)]
        self._num_steps = 0
        self._profiles: list[tuple[StopProfile, Future[ProfileInfo]]] = []

    def run(self) -> None:
        """Serve until a `Shutdown` comes or the parent ends."""
        loop, transport = self._loop, self._transport
        while True:
            is_idle = not loop.has_work
            self._watchdog.note(self._num_steps, has_work=not is_idle)
            timeout = _PROFILE_POLL_INTERVAL if self._profiles else self._heartbeat_interval
            commands = transport.receive(wait=is_idle, timeout=timeout)
            if commands is None or not all(self._execute(command) for command in commands):
                loop.profiling.close()
                return
            if loop.has_work:
                self._watchdog.note(self._num_steps, has_work=True)
                self._route(loop.step())
            elif is_idle and not commands:
                for client in range(transport.num_clients):
                    transport.send(client, Idle())
            self._send_step()
            if self._publishers:
                self._publish_cache_events()
            if self._profiles:
                self._send_profiles()

    def _execute(self, command: Command | UndecodableCommand) -> bool:
        """Execute a command. Return False for `Shutdown`."""
        match command:
            case Shutdown():
                return False
            case Add(requests):
                for request in requests:
                    self._add(request)
            case Abort(request_ids):
                self._abort(request_ids)
            case ForgetClient(client):
                self._abort([request_id for request_id, owner in self._owners.items() if owner == client])
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
            case UndecodableCommand(problem, requests, query):
                logger.error("a command can't be decoded: %s", problem)
                for client, request_id in requests:
                    self._outbox[client].append(_rejection(request_id, problem))
                if query is not None:
                    client, number = query
                    self._transport.send(client, CommandFailed(number, problem, refused=False))
        return True

    def _add(self, request: EngineRequest) -> None:
        try:
            rejection = self._loop.add(request)
        except Exception as error:
            logger.exception("adding a request has failed")
            rejection = _rejection(request.request_id, f"{type(error).__name__}: {error}")
        if rejection is None:
            self._owners[request.request_id] = request.client
        else:
            self._outbox[request.client].append(rejection)

    def _abort(self, request_ids: list[str]) -> None:
        try:
            self._route(self._loop.abort(request_ids))
        except Exception:
            logger.exception("aborting requests has failed")

    def _answer(self, query: Query, work: Callable[[], Message | None]) -> None:
        """Send the message that `work` returns, if any, or the error that it raises."""
        try:
            message = work()
            if message is not None:
                self._transport.send(query.client, message)
        except Exception as error:
            if not isinstance(error, JaxserveError):
                logger.exception("%s has failed", type(query).__name__)
            self._transport.send(query.client, _failed(query.number, error))

    def _send_profiles(self) -> None:
        """Answer the queries whose profiles have been written meanwhile."""
        pending = self._profiles
        self._profiles = [(query, written) for query, written in pending if not written.done()]
        for query, written in pending:
            if written.done():
                self._answer(query, functools.partial(_profile_answer, query.number, written))

    def _route(self, events: list[TokenEvent]) -> None:
        owners, outbox = self._owners, self._outbox
        for event in events:
            request_id = event.request_id
            outbox[owners[request_id]].append(event)
            if event.finish_reason is not None:
                del owners[request_id]

    def _send_step(self) -> None:
        """Send every client a message of a finished step, even without events: its watchdog expects messages."""
        stats = self._loop.stats()
        if stats.num_steps == self._num_steps and not any(self._outbox):
            return
        self._num_steps = stats.num_steps
        with self._loop.timeline.span("serialize"):
            for client, events in enumerate(self._outbox):
                self._transport.send(client, StepEvents(events, stats))
                self._outbox[client] = []

    def _publish_cache_events(self) -> None:
        for publisher, events in zip(self._publishers, self._loop.take_cache_events(), strict=True):
            if events:
                publisher.publish(events)


def _failed(number: int, error: Exception) -> CommandFailed:
    text = str(error) if isinstance(error, JaxserveError) else f"{type(error).__name__}: {error}"
    # A path in it may hold bytes that are no valid text.
    message = text.encode(errors="backslashreplace").decode()
    refused = isinstance(error, InvalidRequestError)
    return CommandFailed(number, message, refused, error.param if isinstance(error, InvalidRequestError) else None)


def _rejection(request_id: str, problem: str) -> TokenEvent:
    return TokenEvent(
        request_id, [], finish_reason=FinishReason.ERROR, error=f"the engine can't take the request: {problem}"
    )


def _profile_answer(number: int, written: Future[ProfileInfo]) -> ProfileAnswer:
    return ProfileAnswer(number, written.result())


def _with_startup_times(info: EngineInfo, order: LaunchOrder, imported: float) -> EngineInfo:
    """Add the seconds from the start of the process until this module was imported, and until the engine was built."""
    imports, engine = (round(at - order.spawned_at, 3) for at in (imported, time.monotonic()))
    seconds = {"imports": imports, **info.startup_seconds, "engine": engine}
    return msgspec.structs.replace(info, startup_seconds=seconds)
