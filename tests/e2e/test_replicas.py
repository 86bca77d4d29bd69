"""The real server with two replicas: it answers as one engine does, adds up, drains, and ends when one of them is
killed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import psutil
import pytest

from tests.e2e.server_process import ServerProcess, kill, renders_templates, serving
from tests.selection import grid
from tests.tiny_model import VOCAB_SIZE, write_tiny_model

pytestmark = pytest.mark.process

FLAGS = ["--load-format", "dummy", "--dtype", "float32", "--device", "cpu", "--context-length", "2048",
         "--max-running-requests", "4", "--cuda-graph-bs", "4", "--chunked-prefill-size", "64",
         "--page-size", "4", "--max-total-tokens", "8192", "--drain-timeout", "100"]  # fmt: skip
SAMPLING: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0, "presence_penalty": 0.5, "logprobs": 2},
    {"temperature": 0.8, "top_p": 0.9, "seed": 5},
]
STREAM = {"prompt": [1, 2, 3], "temperature": 0, "ignore_eos": True, "stream": True}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder; programs are kept in it, so that the first of these servers alone compiles."""
    folder = write_tiny_model(tmp_path_factory.mktemp("tiny"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 2048}))
    return str(folder)


@contextlib.contextmanager
def replicas(model: str, count: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[ServerProcess]:
    monkeypatch.setenv("XLA_FLAGS", "--xla_backend_optimization_level=0")
    monkeypatch.setenv("NPROC", str(2 * count))  # programs are made for a number of threads
    with serving(model, *FLAGS, "--program-cache-dir", f"{model}/programs", "--dp-size", str(count)) as server:
        children = [psutil.Process(pid) for pid in server.family()]
        yield server
    psutil.wait_procs(children, timeout=30)
    assert not [child for child in children if child.is_running()]


async def _answers(url: str) -> list[dict[str, Any]]:
    """Of prompts that share beginnings, all at once."""
    prompts = [[(7 * i + j * (i // 3)) % (VOCAB_SIZE - 2) for j in range(5 + 2 * i)] for i in range(18)]
    async with httpx.AsyncClient(base_url=url, timeout=120) as http:
        asked = [
            http.post("/v1/completions", json={"prompt": prompt, "max_tokens": 20, **SAMPLING[i % len(SAMPLING)]})
            for i, prompt in enumerate(prompts)
        ]
        answers = await asyncio.gather(*asked)
    assert {answer.status_code for answer in answers} == {200}
    return [answer.json()["choices"][0] for answer in answers]


def _metric(url: str, name: str) -> float:
    [value] = re.findall(rf"^jaxserve:{name}\{{[^}}]*\}} (\S+)$", httpx.get(f"{url}/metrics").text, flags=re.M)
    return float(value)


def _cached(url: str, prompt: list[int]) -> int:
    answer = httpx.post(f"{url}/v1/completions", json={"prompt": prompt, "max_tokens": 1, "temperature": 0}).json()
    count: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return count


@pytest.mark.grid
def test_it_answers_as_one_engine_does_adds_up_and_drains(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with replicas(model, 1, monkeypatch) as server:
        assert len(server.info()["replicas"]) == 1
        alone = asyncio.run(_answers(server.url))
    with replicas(model, 2, monkeypatch) as server:
        assert len(server.family()) == 3
        together = asyncio.run(_answers(server.url))
        assert [choice["text"] for choice in together] == [choice["text"] for choice in alone]
        for one, two in zip(alone, together):
            if one["logprobs"] is not None:
                assert one["logprobs"]["token_logprobs"] == pytest.approx(two["logprobs"]["token_logprobs"], abs=1e-4)
        info = server.info()
        assert info["engine"]["max_total_num_tokens"] == 2 * 8192
        assert info["engine"]["max_running_requests"] == 8
        assert [replica["pid"] for replica in info["replicas"]] == server.family()[1:]
        prompt_tokens = [replica["stats"]["prompt_tokens"] for replica in info["replicas"]]
        assert min(prompt_tokens) > 0
        assert info["stats"]["prompt_tokens"] == sum(prompt_tokens) == _metric(server.url, "prompt_tokens_total")
        assert info["stats"]["integrity_errors"] == []
        for name in ("DP0", "DP1"):
            assert any(f" {name}] INFO Prefill batch." in line for line in server.log), server.log

        shared = [list(range(start, start + 101)) for start in (1, 120)]
        assert [_cached(server.url, prompt) for prompt in shared] == [0, 0]
        assert [_cached(server.url, prompt) for prompt in shared] == [100, 100]
        assert httpx.post(f"{server.url}/flush_cache").text.startswith("Cache flushed: ")
        assert [_cached(server.url, prompt) for prompt in shared] == [0, 0]

        ends = _stream_while(server, lambda: httpx.post(f"{server.url}/abort_request", json={"rid": "mine"}))
        assert ends == ["abort", "abort", "abort"]
        assert _metric(server.url, "num_requests_running") == 0

        ends = _stream_while(server, lambda: server.process.send_signal(signal.SIGTERM), max_tokens=500)
        assert ends == ["length", "length", "length"]
        assert server.wait() == 0


def _stream_while(server: ServerProcess, act: Any, *, max_tokens: int = 1900) -> list[str]:
    """Three streams of one id at once; `act` once all have begun; how each ends, an error as its message."""
    ends: list[str] = []
    begun = [threading.Event() for _ in range(3)]

    def ask(number: int) -> None:
        body, headers = STREAM | {"max_tokens": max_tokens}, {"x-request-id": "mine"}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, headers=headers, timeout=120) as answer:
            finals = []
            for line in answer.iter_lines():
                if not line.startswith("data: {"):
                    continue
                begun[number].set()
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    finals.append(event["error"]["message"])
                elif event["choices"] and event["choices"][0]["finish_reason"]:
                    finals.append(event["choices"][0]["finish_reason"])
            [end] = finals
            ends.append(end)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for event in begun:
        assert event.wait(60)
    act()
    for thread in threads:
        thread.join(120)
    return ends


@pytest.mark.parametrize("victim", grid([0, 1], lambda victim: False))
def test_killing_one_ends_every_request_and_the_server(
    model: str, victim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with replicas(model, 2, monkeypatch) as server:
        engines = server.family()[1:]
        ends = _stream_while(server, lambda: kill(engines[victim]))
        assert len(ends) == 3
        assert all("engine process ended with code -9 (SIGKILL)" in end for end in ends)
        assert server.wait() == 1
        assert any(f"DP{victim}: engine process ended with code -9 (SIGKILL)" in line for line in server.log), (
            server.log
        )


@pytest.mark.grid
def test_a_killed_server_leaves_no_replica(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with replicas(model, 2, monkeypatch) as server:
        kill(server.process.pid)
        server.wait()


def test_sigterm_while_they_start_ends_them(model: str) -> None:
    command = [sys.executable, "-m", "jaxserve", "serve", model, "--port", "0", *FLAGS, "--dp-size", "2",
               "--disable-program-cache"]  # fmt: skip
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        seen: list[str] = []
        while not any("INFO device:" in line for line in seen):
            seen.append(server.stderr.readline())
            assert seen[-1], seen
        children = psutil.Process(server.pid).children()
        engines = [child for child in children if not renders_templates(child.pid)]
        server.terminate()
        try:
            assert server.wait(60) == 0
        finally:
            server.kill()
    assert len(engines) == 2
    psutil.wait_procs(children, timeout=30)
    assert not [child for child in children if child.is_running()]
