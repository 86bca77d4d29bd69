"""The processes of a benchmark: a server that is ready, and a client that runs to its end. Neither outlives its caller.

This module starts them (in sessions of their own, so that Ctrl-C in the terminal reaches only the benchmark), waits for
them, ends them and keeps their logs. Callers choose the flags and read the results.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import httpx

from jaxserve import host
from jaxserve.errors import BenchRunError

SERVE = (sys.executable, "-m", "jaxserve", "serve")
BENCH_SERVE = (sys.executable, "-m", "jaxserve", "bench", "serve")

_POLL_INTERVAL = 0.1
# By then no request is open, so a server that takes longer to end hangs.
_END_TIMEOUT = 30.0
_LAST_LINES = 5


class ServerProcess:
    """A running server: its URL, its log file, and how many seconds it took to become ready."""

    def __init__(self, process: subprocess.Popen[bytes], url: str, log: Path) -> None:
        self._process = process
        self.url = url
        self.log = log
        self.start_seconds = 0.0

    @property
    def is_alive(self) -> bool:
        """Whether the process still runs."""
        return self._process.poll() is None

    def ends_within(self, seconds: float) -> bool:
        """Wait up to `seconds` for the process to end; return whether it has."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)
        return not self.is_alive

    def wait_until_ready(self, timeout: float, *, poll: float = _POLL_INTERVAL) -> None:
        """Wait until it accepts requests. Raises `BenchRunError` when it ends first, or after `timeout` seconds."""
        start = time.monotonic()
        with httpx.Client(timeout=5.0) as client:
            while not _answers(client, f"{self.url}/ready"):
                if not self.is_alive:
                    code = self._process.returncode
                    raise BenchRunError(
                        f"the server ended with code {code} before it was ready: {last_lines(self.log)}"
                    )
                if time.monotonic() - start > timeout:
                    raise BenchRunError(f"the server was not ready after {timeout:g} s: {last_lines(self.log)}")
                time.sleep(poll)
        self.start_seconds = time.monotonic() - start


@contextlib.contextmanager
def serving(
    flags: Sequence[str], log: Path, *, timeout: float, command: Sequence[str] = SERVE, poll: float = _POLL_INTERVAL
) -> Iterator[ServerProcess]:
    """Run `jaxserve serve` with these flags on a free port of this machine, and yield it when it is ready, which is
    checked every `poll` seconds. Raises `BenchRunError` if it doesn't start."""
    port = host.free_port()
    with _process([*command, *flags, "--host", "127.0.0.1", "--port", str(port)], log) as process:
        server = ServerProcess(process, f"http://127.0.0.1:{port}", log)
        server.wait_until_ready(timeout, poll=poll)
        yield server


def run_client(command: Sequence[str], log: Path, *, timeout: float) -> None:
    """Run a command to its end. Raises `BenchRunError` when it fails or takes longer than `timeout` seconds."""
    with _process(command, log) as process:
        try:
            code = process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise BenchRunError(f"the run took longer than {timeout:g} s: {last_lines(log)}") from None
    if code:
        raise BenchRunError(f"bench serve ended with code {code}: {last_lines(log)}")


def last_lines(log: Path) -> str:
    """Return the last lines of a log, joined to one."""
    with contextlib.suppress(OSError):
        lines = [line.strip() for line in log.read_text(errors="replace").replace("\r", "\n").splitlines()]
        text = " | ".join([line for line in lines if line][-_LAST_LINES:])
        return f"{text} (log: {log})" if text else f"it wrote nothing (log: {log})"
    return f"its log {log} can't be read"


@contextlib.contextmanager
def _process(command: Sequence[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    command_with_parent = [sys.executable, "-m", "jaxserve.bench.processes.run_with_parent", str(os.getpid()), *command]
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as file:
        process = subprocess.Popen(
            command_with_parent,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_END_TIMEOUT)
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _answers(client: httpx.Client, url: str) -> bool:
    try:
        return client.get(url).status_code == 200
    except httpx.HTTPError:
        return False
