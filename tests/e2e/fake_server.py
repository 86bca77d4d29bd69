"""Starts `fake_device` servers and waits for what their metrics say."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import httpx


@dataclasses.dataclass
class FakeServer:
    """A running server; `log` grows until it ends."""

    url: str
    process: subprocess.Popen[str]
    log: list[str]

    def wait(self) -> int:
        """The exit code, once it has one."""
        return self.process.wait(60)

    def until_logged(self, text: str) -> None:
        """Returns once a line of the log has this text."""
        deadline = time.monotonic() + 60
        while not any(text in line for line in self.log):
            assert time.monotonic() < deadline, "".join(self.log)
            time.sleep(0.01)


@contextlib.contextmanager
def serving(*flags: str, model: str = "fake") -> Iterator[str]:
    """A server's address."""
    with running(*flags, model=model) as server:
        yield server.url


@contextlib.contextmanager
def running(*flags: str, model: str = "fake") -> Iterator[FakeServer]:
    """A server that is gone afterwards."""
    command = [sys.executable, "-m", "tests.e2e.fake_device", "serve", "--model", model, "--port", "0", *flags]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        lines = []
        for line in process.stderr:
            lines.append(line)
            if found := re.search(r"Ready: (\S+) in", line):
                break
        else:
            raise AssertionError("".join(lines))
        stderr = process.stderr
        reader = threading.Thread(target=lambda: lines.extend(iter(stderr.readline, "")))
        reader.start()
        try:
            yield FakeServer(found[1], process, lines)
        finally:
            process.kill()
            reader.join()


def until(url: str, metric: str, value: float) -> None:
    """Returns once a metric has reached `value`."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        text = httpx.get(f"{url}/metrics").text
        [reached] = re.findall(rf"^{re.escape(metric)}\{{[^}}]*\}} (\S+)$", text, flags=re.M)
        if float(reached) >= value:
            return
    raise AssertionError(f"{metric} stands at {reached} and never reached {value}")
