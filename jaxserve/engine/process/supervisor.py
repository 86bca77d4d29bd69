"""The parent's hold on an engine process: start it, wait for its report, learn of its end, end it, clean up.

It owns the process, the directory of its sockets and the pipe of its reports; what is said over the sockets it never
sees. A thread does the waiting, as it works the same on every platform and under every event loop.
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
    ASKED_TO_END,
    WHOLE_MACHINE,
    Ended,
    LaunchOrder,
    Share,
    Started,
    read_report,
    start_error,
    write_frame,
)
from jaxserve.errors import EngineDeadError

_STDERR = 2


class EngineProcess:
    """A child that runs `python -m module`. Belongs to the event loop it was started in."""

    def __init__(self, config: EngineConfig, module: str, share: Share = WHOLE_MACHINE) -> None:
        self._loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[str] = self._loop.create_future()
        self._started: asyncio.Future[EngineInfo] = self._loop.create_future()
        # Nobody but this user may speak to the engine: the directory is private.
        self._directory = host.make_socket_folder("commands")
        self.command_address = f"ipc://{self._directory}/commands"
        self.client_address = f"ipc://{self._directory}/client-0"
        self._reports, report_fd = os.pipe()
        spawned_at = time.monotonic()
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module],
                stdin=subprocess.PIPE,
                stdout=_STDERR,  # what libraries print there is no answer of ours
                pass_fds=[report_fd],
                env=os.environ | share.environment,
                # Ctrl-C in a terminal reaches the foreground group, and this child must outlive the parent's draining.
                process_group=0,
            )
        finally:
            os.close(report_fd)
        assert self._process.stdin is not None
        self._stdin = self._process.stdin
        order = LaunchOrder(
            config=config,
            share=share,
            command_address=self.command_address,
            client_addresses=[self.client_address],
            report_fd=report_fd,
            parent_pid=os.getpid(),
            spawned_at=spawned_at,
        )
        with contextlib.suppress(BrokenPipeError):
            write_frame(self._stdin.fileno(), order)
        self._watcher = threading.Thread(target=self._watch, name="jaxserve-engine-watcher", daemon=True)
        self._watcher.start()

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """How it ended, if it has."""
        return self._process.returncode

    async def started(self) -> EngineInfo:
        """Wait until the engine is ready. Raises what kept it from starting."""
        return await asyncio.shield(self._started)

    async def stop(self, timeout: float) -> None:
        """Wait for an end that was asked for, enforce it after `timeout` seconds, and clean up. May be repeated."""
        with contextlib.suppress(BrokenPipeError, ValueError):  # it may be closed already
            self._stdin.write(ASKED_TO_END)
        with contextlib.suppress(BrokenPipeError):
            self._stdin.close()
        try:
            await asyncio.wait_for(asyncio.shield(self.ended), timeout)
        except TimeoutError:
            self._process.kill()
            await asyncio.shield(self.ended)
        self._watcher.join()
        if self._started.done() and not self._started.cancelled():
            self._started.exception()  # seen: launch may have been cancelled before it could raise it
        shutil.rmtree(self._directory, ignore_errors=True)

    def _watch(self) -> None:
        report = read_report(self._reports)
        self._tell(lambda: self._on_report(report))
        code = self._process.wait()
        # A grandchild may hold the pipe open for ever; what the engine itself wrote is there already.
        os.set_blocking(self._reports, False)
        last = read_report(self._reports)
        os.close(self._reports)
        reason = f"engine process ended with code {code}{_signal_name(code)}"
        for words in (report, last):
            if isinstance(words, Ended):
                reason += f": {words.message}"
        self._tell(lambda: self._on_end(reason))

    def _tell(self, call: Callable[[], None]) -> None:
        with contextlib.suppress(RuntimeError):  # the event loop is closed: nobody is left to be told
            self._loop.call_soon_threadsafe(call)

    def _on_report(self, report: Started | Ended | None) -> None:
        if isinstance(report, Started):
            self._started.set_result(report.info)
        elif report is not None:
            self._started.set_exception(start_error(report))

    def _on_end(self, reason: str) -> None:
        if not self._started.done():
            self._started.set_exception(EngineDeadError(f"{reason} before it was ready; its log above says why"))
        self.ended.set_result(reason)


def _signal_name(code: int) -> str:
    if code >= 0:
        return ""
    try:
        return f" ({signal.Signals(-code).name})"
    except ValueError:
        return ""
