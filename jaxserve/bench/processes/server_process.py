"""The processes of a benchmark: a server that is ready, a client that runs to its end. Both are gone afterwards.

Owns how they are started (a session of their own, so that Ctrl-C in the terminal reaches only us), waited for and
ended, and their logs. What they are told and what they measure is the caller's.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import httpx

from jaxserve.errors import BenchRunError

SERVE = (sys.executable, "-m", "jaxserve", "serve")
BENCH_SERVE = (sys.executable, "-m", "jaxserve", "bench", "serve")

_POLL = 0.1
# A server drains before it ends; nothing is open by then, so this is for one that hangs.
_END_TIMEOUT = 30.0
_LAST_LINES = 5


class Server:
    """A server that was ready. `url` is where it listens, `log` what it wrote, `start_seconds` how long it took."""

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
        """Whether it has ended, or does so soon."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)
        return not self.is_alive

    def wait_until_ready(self, timeout: float, *, poll: float = _POLL) -> None:
        """Returns when it takes requests. Raises `BenchRunError` when it ends before that, or takes too long."""
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
    flags: Sequence[str], log: Path, *, timeout: float, command: Sequence[str] = SERVE, poll: float = _POLL
) -> Iterator[Server]:
    """`jaxserve serve` with these flags on a free port of this machine, looked at every `poll` seconds until it is
    ready. Raises `BenchRunError` if it doesn't start."""
    port = _free_port()
    with _process([*command, *flags, "--host", "127.0.0.1", "--port", str(port)], log) as process:
        server = Server(process, f"http://127.0.0.1:{port}", log)
        server.wait_until_ready(timeout, poll=poll)
        yield server


def run_client(command: Sequence[str], log: Path, *, timeout: float) -> None:
    """Runs a command to its end. Raises `BenchRunError` when it fails or takes longer than `timeout` seconds."""
    with _process(command, log) as process:
        try:
            code = process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise BenchRunError(f"the run took longer than {timeout:g} s: {last_lines(log)}") from None
    if code:
        raise BenchRunError(f"bench serve ended with code {code}: {last_lines(log)}")


def last_lines(log: Path) -> str:
    """The end of a log, on one line."""
    with contextlib.suppress(OSError):
        lines = [line.strip() for line in log.read_text(errors="replace").replace("\r", "\n").splitlines()]
        found = " | ".join([line for line in lines if line][-_LAST_LINES:])
        return f"{found} (log: {log})" if found else f"it wrote nothing (log: {log})"
    return f"its log {log} can't be read"


@contextlib.contextmanager
def _process(command: Sequence[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    tied = [sys.executable, "-m", "jaxserve.bench.processes.run_with_parent", str(os.getpid()), *command]
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as file:
        process = subprocess.Popen(
            tied, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
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


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port
