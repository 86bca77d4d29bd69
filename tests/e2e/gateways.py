"""Public gateways in processes of their own, before servers with a fake device."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import httpx

KEY = "key-of-the-workers"
HEADERS = {"authorization": f"Bearer {KEY}"}

# The module of each gateway that starts it, and its own flags.
GATEWAYS = {
    "sglang_router": ["sglang_router", "launch"],
    "smg": ["smg", "launch", "--load-monitor-interval", "1"],
    "vllm_router": ["vllm_router.launch_router"],
}
# A worker that answers no more is left out within a second or two, and back as soon.
_HEALTH = ["--health-check-interval-secs", "1", "--health-check-timeout-secs", "1", "--health-failure-threshold", "1",
           "--health-success-threshold", "1", "--health-check-endpoint", "/ready", "--cb-failure-threshold", "2",
           "--cb-timeout-duration-secs", "1", "--worker-startup-check-interval", "1"]  # fmt: skip


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


class Worker:
    """A server that can be killed and started again at its address."""

    def __init__(self) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.events = f"tcp://127.0.0.1:{free_port()}"
        self.start()

    def start(self) -> None:
        """Starts it; `wait_until_ready` tells when it answers."""
        events = json.dumps({"publisher": "zmq", "endpoint": self.events, "bind": True})
        command = [sys.executable, "-m", "tests.e2e.fake_device", "serve", "--model", "slow", "--port", str(self.port),
                   "--served-model-name", "fake", "--page-size", "4", "--api-key", KEY,
                   "--kv-events-config", events]  # fmt: skip
        self._process = subprocess.Popen(command, stderr=subprocess.DEVNULL)

    def wait_until_ready(self) -> None:
        until(lambda: httpx.get(f"{self.url}/ready").status_code == 200)

    def kill(self) -> None:
        """Ends the server at once, and with it its engine."""
        self._process.kill()
        self._process.wait()

    def num_running(self) -> int:
        loads = httpx.get(f"{self.url}/v1/loads", headers=HEADERS).json()
        count: int = loads["aggregate"]["total_running_reqs"]
        return count

    def answered(self, handler: str, status: str = "2xx") -> float:
        """How many requests to a route it has answered so."""
        text = httpx.get(f"{self.url}/metrics").text
        labels = rf'handler="{re.escape(handler)}",[^}}]*status="{status}"'
        return sum(map(float, re.findall(rf"^jaxserve:http_requests_total\{{{labels}\}} (\S+)$", text, flags=re.M)))


@contextlib.contextmanager
def gateway(name: str, workers: list[Worker], policy: str) -> Iterator[str]:
    """A gateway's address, once it has an answer from one of the workers."""
    port = free_port()
    command = [sys.executable, "-m", *GATEWAYS[name], "--host", "127.0.0.1", "--port", str(port), "--policy", policy,
               "--prometheus-port", str(free_port()), "--api-key", KEY, *_HEALTH,
               "--worker-urls", *(worker.url for worker in workers)]  # fmt: skip
    if policy == "kv_aware":
        command += ["--kv-event-block-size", "4", "--kv-event-model", "fake"]
        for worker in workers:
            command += ["--kv-event-source", f"{worker.url}={worker.events}"]
    url = f"http://127.0.0.1:{port}"
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            until(lambda: ask(url) == 200)
            yield url
        finally:
            process.kill()


def ask(url: str) -> int:
    """Sends a short prompt, and returns the status of the answer."""
    body = {"model": "fake", "prompt": "abc", "max_tokens": 1}
    return httpx.post(f"{url}/v1/completions", json=body, headers=HEADERS).status_code


def reach(url: str, workers: list[Worker]) -> None:
    """Returns once each of these workers has answered a request to a gateway that takes them in turn."""
    before = [worker.answered("/v1/completions") for worker in workers]

    def reached() -> bool:
        ask(url)
        return all(worker.answered("/v1/completions") > count for worker, count in zip(workers, before))

    until(reached)


def until(holds: Callable[[], bool]) -> None:
    """Returns once it holds; a server that doesn't answer yet counts as no."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        with contextlib.suppress(httpx.TransportError):
            if holds():
                return
    raise AssertionError("it does not come to hold within 60 s")
