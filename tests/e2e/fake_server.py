"""Starts `fake_device` servers and waits for what their metrics say."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import httpx


@contextlib.contextmanager
def serving(*flags: str, model: str = "fake") -> Iterator[str]:
    """A server's address; its log goes nowhere."""
    command = [sys.executable, "-m", "tests.e2e.fake_device", "serve", "--model", model, "--port", "0", *flags]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        lines = []
        for line in process.stderr:
            lines.append(line)
            if found := re.search(r"Ready: (http://\S+)", line):
                break
        else:
            raise AssertionError("".join(lines))
        reader = threading.Thread(target=process.stderr.read)  # a full pipe would stop it
        reader.start()
        try:
            yield found[1]
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
