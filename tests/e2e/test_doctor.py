"""Each rule of `jaxserve doctor` on a running server: a load that triggers it, and one that does not.

Server, scheduler, metrics, HTTP and the doctor are real; only the device is fake.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from jaxserve.cli import doctor
from tests.e2e.fake_server import serving, until
from tests.engine.fake_executor import VOCAB

pytestmark = pytest.mark.process

STOPS_EARLY = {"stop_token_ids": list(range(3))}


@contextlib.contextmanager
def load(url: str, at_once: int, *, prompt: int = 32, sequences: int = 1, **body: Any) -> Iterator[None]:
    """So many requests open all the time, each with prompts of its own; answers don't matter here."""
    rng, over = random.Random(0), threading.Event()
    begun = threading.Event()

    async def client(http: httpx.AsyncClient) -> None:
        while not over.is_set():
            prompts = [[rng.randrange(VOCAB) for _ in range(prompt)] for _ in range(sequences)]
            begun.set()
            try:
                await http.post("/v1/completions", json={"prompt": prompts, "ignore_eos": True, **body})
            except httpx.HTTPError:
                return

    async def crowd() -> None:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=url, limits=limits, timeout=60) as http:
            tasks = [asyncio.create_task(client(http)) for _ in range(at_once)]
            await asyncio.to_thread(over.wait)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    thread = threading.Thread(target=lambda: asyncio.run(crowd()))
    thread.start()
    begun.wait()
    try:
        yield
    finally:
        over.set()
        thread.join()


def said(url: str, capsys: pytest.CaptureFixture[str], code: int = 0) -> str:
    """What the doctor says after two seconds, on one line."""
    assert doctor.main([url, "--seconds", "2", "--interval", "0.1"]) == code
    return " ".join(capsys.readouterr().out.split())


Capture = pytest.CaptureFixture[str]


def test_a_healthy_server(capsys: Capture) -> None:
    # Prompts fill the pool, outputs hardly: 416 tokens a request, twenty at once.
    flags = ["--max-total-tokens", "8400", "--max-running-requests", "32", "--schedule-policy", "fcfs"]
    with serving(*flags, model="slow") as url, load(url, 60, prompt=400, max_tokens=16):
        until(url, "jaxserve:num_requests_waiting", 20)
        text = said(url, capsys)
    assert "HEALTHY" in text, text


def test_the_client_is_the_bottleneck(capsys: Capture) -> None:
    with serving() as url, load(url, 3, max_tokens=100):
        until(url, "jaxserve:num_requests_running", 1)
        text = said(url, capsys)
    assert "THE CLIENT IS THE BOTTLENECK" in text, text
    assert "of 32" in text


@pytest.mark.grid
def test_too_conservative_and_then_not(capsys: Capture) -> None:
    # One page holds a whole request, as nearly all stop early.
    flags = ["--max-total-tokens", "8192", "--page-size", "128", "--max-running-requests", "128"]
    for conservativeness in ("1.4", "0.01"):
        with (
            serving(*flags, "--schedule-conservativeness", conservativeness, model="slow") as url,
            load(url, 30, sequences=10, prompt=8, max_tokens=400, **STOPS_EARLY),
        ):
            until(url, "jaxserve:num_requests_waiting", 50)
            text = said(url, capsys)
        if conservativeness == "1.4":
            assert "TOO CONSERVATIVE" in text, text
            assert "to a value like 0.3 (it is 1.4)" in text
        else:
            assert "TOO CONSERVATIVE" not in text, text


def test_frequent_retractions(capsys: Capture) -> None:
    flags = ["--max-total-tokens", "4096", "--max-running-requests", "64", "--schedule-conservativeness", "0"]
    with serving(*flags) as url, load(url, 64, max_tokens=400):
        until(url, "jaxserve:num_preemptions_total", 1)
        text = said(url, capsys)
    assert "FREQUENT RETRACTIONS" in text, text
    assert "--schedule-conservativeness to a value like 1.3 (it is 0)" in text


@pytest.mark.grid
def test_all_slots_taken_and_a_queue_beyond_lpm(capsys: Capture) -> None:
    for policy in ("lpm", "fcfs"):
        with serving("--max-running-requests", "4", "--schedule-policy", policy) as url, load(url, 200, max_tokens=50):
            until(url, "jaxserve:num_requests_waiting", 150)
            text = said(url, capsys)
        assert "ALL SLOTS TAKEN: all 4 slots" in text, text
        assert ("QUEUE BEYOND LPM'S REACH" in text) == (policy == "lpm"), text
        assert "TOO CONSERVATIVE" not in text
        assert "QUEUE TOO LONG" not in text


@pytest.mark.grid
def test_an_order_by_prefixes_that_nobody_shares(capsys: Capture) -> None:
    for policy in ("lpm", "fcfs"):
        flags = ["--max-running-requests", "4", "--schedule-policy", policy]
        with serving(*flags) as url, load(url, 60, prompt=400, max_tokens=20):
            until(url, "jaxserve:num_requests_waiting", 40)
            text = said(url, capsys)
        assert ("NO SHARED PREFIXES: 0 of" in text) == (policy == "lpm"), text


@pytest.mark.grid
def test_memory_left_over_and_too_short(capsys: Capture) -> None:
    for fraction, found in (
        ("0.5", "MEMORY LEFT OVER: 40.00 GB"),
        ("0.9", None),
        ("0.99", "MEMORY TOO SHORT: 0.80 GB"),
    ):
        with serving("--mem-fraction-static", fraction) as url, load(url, 3, max_tokens=100):
            until(url, "jaxserve:num_requests_running", 1)
            text = said(url, capsys)
        assert found is None or found in text, text
        assert ("MEMORY" in text) == (found is not None), text


@pytest.mark.grid
def test_a_queue_too_long(capsys: Capture) -> None:
    with (
        serving("--max-running-requests", "4", "--schedule-policy", "fcfs") as url,
        load(url, 3, sequences=1000, prompt=8, max_tokens=50),
    ):
        until(url, "jaxserve:num_requests_waiting", 2500)
        text = said(url, capsys)
    assert "QUEUE TOO LONG" in text, text


def test_programs(capsys: Capture) -> None:
    with serving("--cuda-graph-max-bs", "4") as url, load(url, 12, max_tokens=200):
        until(url, "jaxserve:num_requests_running", 8)
        text = said(url, capsys)
    assert "DECODE BATCHES BEYOND --CUDA-GRAPH-MAX-BS" in text, text
    assert "--cuda-graph-max-bs to 12 or more" in text
    assert "PADDED" not in text
    with serving("--cuda-graph-bs", "32") as url, load(url, 3, max_tokens=200):
        until(url, "jaxserve:num_requests_running", 2)
        text = said(url, capsys)
    assert "PADDED DECODE BATCHES" in text, text
    assert "--cuda-graph-bs" in text
    assert "BEYOND" not in text


def test_out_of_memory(capsys: Capture) -> None:
    with serving(model="out-of-memory") as url:
        watcher = threading.Thread(
            target=lambda: codes.append(doctor.main([url, "--seconds", "60", "--interval", "0.05"]))
        )
        codes: list[int] = []
        watcher.start()
        with load(url, 4, max_tokens=1000 - 32):
            watcher.join()
        text = " ".join(capsys.readouterr().out.split())
    assert codes == [1]
    assert "OUT OF MEMORY: engine process ended with code 1" in text, text
    assert "--chunked-prefill-size to 4096 or 2048" in text


def test_compiles_while_serving(capsys: Capture) -> None:
    with serving(model="compiling") as url, load(url, 3, max_tokens=50):
        text = said(url, capsys)
    assert "COMPILES WHILE SERVING: 1 programs" in text, text
