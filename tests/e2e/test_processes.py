"""The real thing on two processes: answers, drains, and how it ends when any part of it is killed, cut off or wrong."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import socket
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import psutil
import pytest

from jaxserve import host
from tests.e2e.server_process import ServerProcess, kill, serving
from tests.selection import grid
from tests.tiny_model import VOCAB_SIZE, write_tiny_model

pytestmark = pytest.mark.process

FLAGS = ["--load-format", "dummy", "--dtype", "float32", "--device", "cpu", "--context-length", "1024",
         "--max-running-requests", "4", "--cuda-graph-bs", "4", "--chunked-prefill-size", "32",
         "--page-size", "4", "--max-total-tokens", "4096", "--drain-timeout", "100"]  # fmt: skip
# One shard for each process; and, where answers are compared, one of two ranks for each.
MESH = ["--tp-size", "2", "--nnodes", "2"]
RANKS = ["--tp-size", "2", "--dp-size", "2", "--nnodes", "2"]
# A pipeline stage for each process; and two devices for each stage.
STAGES = ["--pp-size", "2", "--nnodes", "2"]
WIDE_STAGES = ["--pp-size", "2", "--tp-size", "2", "--nnodes", "2"]
STREAM = {"prompt": [1, 2, 3], "temperature": 0, "ignore_eos": True, "stream": True}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder; programs are kept in it, so that the first of these services alone compiles."""
    folder = write_tiny_model(tmp_path_factory.mktemp("tiny"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 1024}))
    return str(folder)


class Service:
    """Both processes of a mesh: the leader, with its URL, and the follower."""

    def __init__(self, model: str, follower_port: int, leader_port: int, mesh: list[str]) -> None:
        common = [model, *FLAGS, "--program-cache-dir", f"{model}/programs", *mesh]
        self.follower = ServerProcess(
            *common, "--node-rank", "1", "--dist-init-addr", f"127.0.0.1:{follower_port}", wait=False
        )
        self.leader = ServerProcess(*common, "--dist-init-addr", f"127.0.0.1:{leader_port}", wait=False)
        self.both = (self.leader, self.follower)

    @property
    def url(self) -> str:
        return self.leader.url

    def family(self) -> dict[str, int]:
        """Process ids by what they are."""
        api, engine = self.leader.family()
        watcher, follower = self.follower.family()
        return {"api": api, "engine": engine, "watcher": watcher, "follower": follower}

    def log(self, number: int) -> str:
        return "".join(self.both[number].log)


@contextlib.contextmanager
def service(
    model: str,
    monkeypatch: pytest.MonkeyPatch,
    relay: Relay | None = None,
    mesh: list[str] = MESH,
) -> Iterator[Service]:
    """Ready, and gone afterwards with all of its processes."""
    devices = f"--xla_force_host_platform_device_count={2 if mesh in (RANKS, WIDE_STAGES) else 1}"
    monkeypatch.setenv("XLA_FLAGS", f"{devices} --xla_backend_optimization_level=0")
    port = relay.target if relay is not None else host.free_port()
    made = Service(model, relay.port if relay is not None else port, port, mesh)
    try:
        for one in made.both:
            one.wait_until_ready()
        family = [psutil.Process(pid) for pid in made.family().values()]
        yield made
    finally:
        for one in made.both:
            if one.process.poll() is None:
                one.process.kill()
    psutil.wait_procs(family, timeout=60)
    assert not [process for process in family if process.is_running()]


class Relay:
    """Carries TCP connections from `port` to `target` until it is cut: then nothing passes, and nobody is told."""

    def __init__(self) -> None:
        self.target = host.free_port()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._is_cut = False
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        self._is_cut = True

    def _accept(self) -> None:
        while True:
            near, _ = self._listener.accept()
            try:
                far = socket.create_connection(("127.0.0.1", self.target))
            except OSError:
                near.close()
                continue
            threading.Thread(target=self._carry, args=(near, far), daemon=True).start()
            threading.Thread(target=self._carry, args=(far, near), daemon=True).start()

    def _carry(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while part := source.recv(65536):
                if not self._is_cut:
                    target.sendall(part)
        if not self._is_cut:
            with contextlib.suppress(OSError):
                target.shutdown(socket.SHUT_WR)
        source.close()


def _streamed(url: str, started: threading.Event | None = None, **fields: Any) -> list[dict[str, Any]]:
    """The events of a streamed completion, until it ends; a break of the connection ends it too."""
    events: list[dict[str, Any]] = []
    with (
        contextlib.suppress(httpx.TransportError),
        httpx.stream("POST", f"{url}/v1/completions", json=STREAM | fields, timeout=120) as answer,
    ):
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                events.append(json.loads(line.removeprefix("data: ")))
                if started is not None:
                    started.set()
    return events


@contextlib.contextmanager
def _open_streams(url: str, count: int) -> Iterator[list[list[dict[str, Any]]]]:
    """Requests that have begun to answer; at the end of the block, their events."""
    found: list[list[dict[str, Any]]] = [[] for _ in range(count)]
    begun = [threading.Event() for _ in range(count)]

    def ask(i: int) -> None:
        found[i] += _streamed(url, begun[i], prompt=[1 + i, 2, 3], max_tokens=1000)

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for one in begun:
        assert one.wait(60)
    yield found
    for thread in threads:
        thread.join(120)


def _texts(url: str) -> list[str]:
    prompts = [[(7 * i + j * (i // 3)) % (VOCAB_SIZE - 2) for j in range(5 + 2 * i)] for i in range(9)]
    samplings: list[dict[str, Any]] = [{"temperature": 0}, {"temperature": 0.8, "top_p": 0.9, "seed": 5, "logprobs": 2}]
    texts = []
    for i, prompt in enumerate(prompts):
        body = {"prompt": prompt, "max_tokens": 20, **samplings[i % 2]}
        answer = httpx.post(f"{url}/v1/completions", json=body, timeout=120)
        assert answer.status_code == 200, answer.text
        texts.append(answer.json()["choices"][0]["text"])
    return texts


@pytest.mark.grid
@pytest.mark.parametrize(("mesh", "tokens"), [(RANKS, 8192), (STAGES, 4096), (WIDE_STAGES, 4096)], ids=str)
def test_it_answers_as_one_device_does_and_drains(
    mesh: list[str], tokens: int, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XLA_FLAGS", "--xla_backend_optimization_level=0")
    with serving(model, *FLAGS, "--program-cache-dir", f"{model}/programs") as alone:
        expected = _texts(alone.url)
    with service(model, monkeypatch, mesh=mesh) as made:
        assert _texts(made.url) == expected
        assert made.leader.info()["engine"]["max_total_num_tokens"] == tokens
        metrics = httpx.get(f"{made.url}/metrics").text.splitlines()
        [compiles] = [line for line in metrics if line.startswith("jaxserve:compiles_after_ready")]
        assert compiles.endswith(" 0.0")
        with _open_streams(made.url, 2) as streams:
            made.leader.process.send_signal(signal.SIGTERM)
        assert [events[-1]["choices"][0]["finish_reason"] for events in streams] == ["length"] * 2
        assert [one.wait() for one in made.both] == [0, 0]
        assert "The service has ended" in made.log(1)


VICTIMS = [(victim, mesh) for victim in ("api", "engine", "watcher", "follower") for mesh in (MESH, STAGES)]


@pytest.mark.parametrize(("victim", "mesh"), grid(VICTIMS, lambda case: case == ("follower", STAGES)), ids=str)
def test_a_killed_process_ends_all(victim: str, mesh: list[str], model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with service(model, monkeypatch, mesh=mesh) as made:
        with _open_streams(made.url, 3) as streams:
            kill(made.family()[victim])
        assert all(one.wait() != 0 for one in made.both)
        if victim != "api":
            assert ["error" in events[-1] for events in streams] == [True] * 3
            assert all(sum("error" in event for event in events) == 1 for events in streams)
        if victim in ("api", "engine"):
            assert re.search(r"node rank 0 \(.*\) is lost: its connection", made.log(1))
        else:
            why = r"(is lost: its connection|has ended: its parent process, `jaxserve serve`, is gone)"
            assert re.search(rf"The engine has ended: .*node rank 1 \(.*\) {why}", made.log(0))


@pytest.mark.grid
def test_a_follower_that_is_told_to_end_ends_all(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with service(model, monkeypatch) as made:
        with _open_streams(made.url, 2) as streams:
            made.follower.process.send_signal(signal.SIGTERM)
        assert ["error" in events[-1] for events in streams] == [True] * 2
        assert [one.wait() for one in made.both] == [1, 0]
        assert re.search(r"node rank 1 \(.*\) has ended: it was asked to stop", made.log(0))


@pytest.mark.parametrize("mesh", grid([MESH, STAGES], lambda mesh: mesh is MESH), ids=str)
def test_a_connection_that_is_cut_without_a_word_ends_both(
    mesh: list[str], model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    relay = Relay()
    with service(model, monkeypatch, relay=relay, mesh=mesh) as made:
        with _open_streams(made.url, 1) as [events]:
            relay.cut()
        assert "error" in events[-1]
        assert [one.wait() for one in made.both] == [1, 1]
        for number in (0, 1):
            assert re.search(rf"node rank {1 - number} \(.*\) is lost: nothing was heard", made.log(number))


def test_processes_that_were_started_otherwise_refuse_each_other(model: str) -> None:
    where = f"127.0.0.1:{host.free_port()}"
    common = [model, *FLAGS, *MESH, "--dist-init-addr", where]
    leader = ServerProcess(*common, "--dist-timeout", "15", wait=False)
    follower = ServerProcess(*common, "--node-rank", "1", "--page-size", "8", wait=False)
    assert [leader.wait(), follower.wait()] == [2, 2]
    assert "page_size is 8 there and 4 on node rank 0" in "".join(follower.log)
    assert "did not join" in "".join(leader.log)
    assert "page_size is 8 there and 4 on node rank 0" in "".join(leader.log)
    assert not any("Traceback" in line for line in leader.log + follower.log)
