"""A server process from start to exit: a real process and real signals, with a fake engine."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from jaxserve.config.schema import EngineConfig
from jaxserve.config.server_schema import ServerConfig
from jaxserve.errors import ConfigError
from jaxserve.server.serve import serve

pytestmark = pytest.mark.process

LONG = {"prompt": "a", "max_tokens": 10**8}


class ServerProcess:
    """A server process; `lines` are the lines of its stderr so far."""

    def __init__(self, scenario: str, drain_timeout: float) -> None:
        command = [sys.executable, "-m", "tests.server.serve_fake", scenario, str(drain_timeout)]
        self._process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        self.lines: list[str] = []

    def wait_for_line(self, word: str) -> str:
        """Return the next line of stderr that contains `word`."""
        for line in self._process.stderr:
            self.lines.append(line)
            if word in line:
                return line
        raise AssertionError(f"{word!r} never came; stderr: {''.join(self.lines)}")

    def url(self, word: str = "Ready: ") -> str:
        return re.search(r"http://[\d.]+:\d+", self.wait_for_line(word))[0]

    def kill(self, number: int) -> None:
        self._process.send_signal(number)

    def exit_code(self) -> int:
        self.lines += self._process.stderr.readlines()
        return self._process.wait(30)

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
        self._process.stderr.close()


@pytest.fixture
def start() -> Iterator[object]:
    processes = []

    def start(scenario: str, drain_timeout: float = 30.0) -> ServerProcess:
        processes.append(ServerProcess(scenario, drain_timeout))
        return processes[-1]

    yield start
    for process in processes:
        process.end()


def test_the_log_has_the_ready_line_and_no_more(start):
    process = start("serving")
    url = process.url()
    assert httpx.get(f"{url}/health").status_code == 200
    assert httpx.post(f"{url}/v1/completions", json={"prompt": "a"}).status_code == 200
    metrics = httpx.get(f"{url}/metrics").text
    throughput = re.search(r"^jaxserve:gen_throughput\{.*\} (.*)$", metrics, flags=re.M)
    assert float(throughput[1]) > 0, "the first scrape knows what came before it"
    process.kill(signal.SIGTERM)
    assert process.exit_code() == 0
    texts = [line.split(" INFO ")[1].strip() for line in process.lines]
    assert len(texts) == 3, texts
    assert re.fullmatch(r"Listening on http://127\.0\.0\.1:\d+, loading smollm2-135m-instruct", texts[0])
    assert re.fullmatch(rf"Ready: {url} in \d+\.\d s \(weights 0\.2 s, compile 0\.5 s\)", texts[1])


def test_the_port_answers_while_the_model_loads(start):
    process = start("starting")
    url = process.url("Listening")
    for path in ("/health", "/ready"):
        response = httpx.get(f"{url}{path}")
        assert (response.status_code, response.json()) == (503, {"status": "starting"})
    process.kill(signal.SIGTERM)
    assert process.exit_code() == 0


def test_a_model_that_cannot_be_served(start):
    process = start("broken")
    assert process.exit_code() == 2
    assert any("zebra" in line for line in process.lines)
    assert not any("Traceback" in line for line in process.lines)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_open_requests_finish(start, number: int):
    process = start("holding")
    url = process.url()
    with ThreadPoolExecutor() as pool, httpx.stream("GET", f"{url}/health") as _:
        body = {"prompt": "a", "max_tokens": 5}
        whole = pool.submit(httpx.post, f"{url}/v1/completions", json=body)
        stream = pool.submit(httpx.post, f"{url}/v1/completions", json=body | {"stream": True})
        while httpx.get(f"{url}/server_info").json()["open_requests"] < 2:
            pass
        process.kill(number)
        process.wait_for_line("Draining: 2 open requests")
        refused = httpx.post(f"{url}/v1/completions", json=body)
        assert refused.status_code == 503
        process.kill(signal.SIGUSR2)
        assert whole.result().json()["choices"][0]["text"] == "aaaaa"
        assert stream.result().text.endswith("data: [DONE]\n\n")
    assert process.exit_code() == 0


def test_the_drain_ends_at_its_timeout(start):
    process = start("serving", drain_timeout=0.2)
    url = process.url()
    with httpx.stream("POST", f"{url}/v1/completions", json=LONG | {"stream": True}, timeout=30) as response:
        lines = response.iter_lines()
        next(lines)
        process.kill(signal.SIGTERM)
        events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert events[-1]["choices"][0]["finish_reason"] == "abort"
    assert process.exit_code() == 0
    assert any("aborting 1 open requests" in line for line in process.lines)


def test_the_engines_death_is_reported_to_clients_and_probes(start):
    process = start("holding")
    url = process.url()
    with ThreadPoolExecutor() as pool:
        whole = pool.submit(httpx.post, f"{url}/v1/completions", json=LONG, timeout=30)
        while httpx.get(f"{url}/server_info").json()["open_requests"] < 1:
            pass
        process.kill(signal.SIGUSR1)
        assert whole.result().status_code == 503
        assert "code -9" in whole.result().json()["error"]["message"]
    health = httpx.get(f"{url}/health")
    assert health.status_code == 503
    assert "code -9" in health.json()["reason"]
    assert process.exit_code() == 1
    assert any("The engine has ended: engine process ended with code -9" in line for line in process.lines)


def test_an_occupied_port_is_a_config_error():
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(ConfigError, match=f"127.0.0.1:{port}.*--port"):
            serve(EngineConfig(), ServerConfig(port=port))


def test_an_invalid_address_is_a_config_error():
    with pytest.raises(ConfigError, match="--host"):
        serve(EngineConfig(), ServerConfig(host="no such host"))
