"""The parent's side of an engine process: starts it, waits for its reports and its end, stops it and cleans up.

It owns the process, the directory of its sockets and the pipe of its reports; it never sees messages on the sockets.
A thread waits for the process, which works the same on every platform and under every event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable

from jaxserve import host
from jaxserve.api_types import EngineInfo
from jaxserve.config.schema import EngineConfig
from jaxserve.engine.process.launch_protocol import (
    STOP_MESSAGE,
    WHOLE_MACHINE,
    EngineEndpoint,
    Failed,
    LaunchOrder,
    ReplicaResources,
    Started,
    read_report,
    startup_error,
    write_message,
)
from jaxserve.errors import EngineDeadError

_STDERR = 2


class EngineProcess:
    """A child process that runs `python -m module` for a number of API processes, used from the event loop in which it
    was started. `ended` is resolved with the reason when the process has ended."""

    def __init__(
        self, config: EngineConfig, module: str, resources: ReplicaResources = WHOLE_MACHINE, num_clients: int = 1
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[str] = self._loop.create_future()
        self._started: asyncio.Future[EngineInfo] = self._loop.create_future()
        # The directory is private, so that no other user can connect to the engine.
        self._directory = host.make_socket_folder("commands")
        self._resources = resources
        self.command_address = f"ipc://{self._directory}/commands"
        self._client_addresses = [f"ipc://{self._directory}/client-{number}" for number in range(num_clients)]
        self._reports, report_fd = os.pipe()
        spawned_at = time.monotonic()
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module],
                stdin=subprocess.PIPE,
                stdout=_STDERR,  # libraries may print to stdout; ours holds only answers
                pass_fds=[report_fd],
                env=os.environ | resources.environment,
                # Ctrl-C in a terminal signals the foreground group; this child must run until the parent has drained.
                process_group=0,
            )
        finally:
            os.close(report_fd)
        assert self._process.stdin is not None
        self._stdin = self._process.stdin
        order = LaunchOrder(
            config=config,
            resources=resources,
            command_address=self.command_address,
            client_addresses=self._client_addresses,
            report_fd=report_fd,
            parent_pid=os.getpid(),
            spawned_at=spawned_at,
        )
        with contextlib.suppress(BrokenPipeError):
            write_message(self._stdin.fileno(), order)
        self._watcher = threading.Thread(target=self._watch, name="jaxserve-engine-watcher", daemon=True)
        self._watcher.start()

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """The exit code, or None while the process runs."""
        return self._process.returncode

    async def started(self) -> EngineEndpoint:
        """Wait until the engine is ready. Raises the error that kept it from starting."""
        info = await asyncio.shield(self._started)
        return EngineEndpoint(self.pid, self.command_address, tuple(self._client_addresses), info, self._resources.name)

    async def stop(self, timeout: float) -> None:
        """Ask the process to end, kill it after `timeout` seconds, and clean up. May be called again."""
        with contextlib.suppress(BrokenPipeError, ValueError):  # it may have been closed
            self._stdin.write(STOP_MESSAGE)
        with contextlib.suppress(BrokenPipeError):
            self._stdin.close()
        try:
            await asyncio.wait_for(asyncio.shield(self.ended), timeout)
        except TimeoutError:
            self._process.kill()
            await asyncio.shield(self.ended)
        self._watcher.join()
        if self._started.done() and not self._started.cancelled():
            self._started.exception()  # mark it as retrieved: a cancelled launch never raised it
        shutil.rmtree(self._directory, ignore_errors=True)

    def _watch(self) -> None:
        report = read_report(self._reports)
        self._call_in_loop(lambda: self._on_report(report))
        code = self._process.wait()
        # Don't wait for the end of the pipe: a grandchild may hold it open. What the engine wrote can be read now.
        os.set_blocking(self._reports, False)
        last = read_report(self._reports)
        os.close(self._reports)
        reason = f"engine process ended with code {code}{_signal_name(code)}"
        for found in (report, last):
            if isinstance(found, Failed):
                reason += f": {found.message}"
        self._call_in_loop(lambda: self._on_end(reason))

    def _call_in_loop(self, call: Callable[[], None]) -> None:
        with contextlib.suppress(RuntimeError):  # the event loop is closed
            self._loop.call_soon_threadsafe(call)

    def _on_report(self, report: Started | Failed | None) -> None:
        if isinstance(report, Started):
            self._started.set_result(report.info)
        elif report is not None:
            self._started.set_exception(startup_error(report))

    def _on_end(self, reason: str) -> None:
        if not self._started.done():
            self._started.set_exception(EngineDeadError(f"{reason} before it was ready; see its log above"))
        self.ended.set_result(reason)


def _signal_name(code: int) -> str:
    if code >= 0:
        return ""
    try:
        return f" ({signal.Signals(-code).name})"
    except ValueError:
        return ""
