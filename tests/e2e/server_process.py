"""The real thing: `jaxserve serve` in a process of its own, with the default model."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

# Fewer programs than the default, so that the first start on a new machine is shorter.
SMALL = ["--max-running-requests", "8", "--cuda-graph-bs", "8", "--context-length", "1024",
         "--chunked-prefill-size", "64"]  # fmt: skip


class ServerProcess:
    """A running server: where it listens, what it logged, its processes."""

    def __init__(self, *arguments: str, wait: bool = True) -> None:
        self.log: list[str] = []
        if not arguments or arguments[0].startswith("-"):
            # `make test` leaves programs unoptimized, which the default model is too large for.
            environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
        else:
            environment = dict(os.environ)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "jaxserve", "serve", "--port", "0", *SMALL, *arguments],
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        self.url = ""
        self._ready = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        if wait:
            self.wait_until_ready()

    def wait_until_ready(self) -> None:
        """Until it says so, or has ended."""
        self._ready.wait()
        assert self.url, "".join(self.log)

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log.append(line)
            if found := re.search(r"Ready: (http://\S+|following)", line):
                self.url = found[1]
                self._ready.set()
        self._ready.set()

    def info(self) -> dict[str, Any]:
        answer: dict[str, Any] = httpx.get(f"{self.url}/server_info", timeout=30).json()
        return answer

    def family(self) -> list[int]:
        """The server's process and its engines'."""
        pids = [self.process.pid]
        children = Path(f"/proc/{self.process.pid}/task").glob("*/children")
        pids += [int(pid) for path in children for pid in path.read_text().split()]
        return [pid for pid in pids if not renders_templates(pid)]

    def terminate(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.wait()

    def wait(self) -> int:
        code = self.process.wait(120)
        self._reader.join()
        assert self.process.stderr is not None
        self.process.stderr.close()
        return code


@contextlib.contextmanager
def serving(*arguments: str) -> Iterator[ServerProcess]:
    """A server that is gone afterwards, whatever happens."""
    server = ServerProcess(*arguments)
    try:
        yield server
    finally:
        if server.process.poll() is None:
            server.terminate()


def renders_templates(pid: int) -> bool:
    """Whether a process is the server's third, which has no part in what these tests are about."""
    return b"jaxserve.text.template_process" in Path(f"/proc/{pid}/cmdline").read_bytes()


def has_jax(pid: int) -> bool:
    """Whether a process has jax's library mapped."""
    return "libjax_common" in Path(f"/proc/{pid}/maps").read_text()


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
