"""The client against a server whose times and faults are known."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest

from jaxserve.bench.datasets.prompts import DatasetPrompt
from jaxserve.bench.load.client import LoadClient
from jaxserve.bench.load.http_client import BrokenResponseError, ConnectionPool
from jaxserve.bench.load.records import RequestRecord
from tests.bench.conftest import Harness


async def ask(client: LoadClient, name: str = "a", tokens: int = 5) -> RequestRecord:
    record = RequestRecord(name, tokens, None)
    await client.send(record, DatasetPrompt("hello", None, tokens), [], None)
    return record


@pytest.mark.parametrize("chat", [False, True])
async def test_a_complete_answer_is_read(harness: Harness, chat: bool) -> None:
    record = await ask(harness.client(chat=chat))
    assert (record.status, record.error, record.http_status, record.finish_reason) == ("ok", "", 200, "length")
    assert record.text == " one two three four five"
    assert (record.output_tokens, record.prompt_tokens, record.counted_by) == (5, 7, "usage")
    assert len(record.token_times) == 5
    assert record.start < record.token_times[0] <= record.token_times[-1] == record.end


async def test_times_match_the_server(harness: Harness) -> None:
    """No token arrives before it was sent. A busy machine delays some requests; a wrong clock would delay all of
    them."""
    client = harness.client(ttft=0.1, itl=0.02)
    ttft, tpot = [], []
    for name in "abcde":
        record = await ask(client, name, tokens=20)
        there = harness.server.sent[name]
        sent = there["tokens"]
        assert all(seen >= when for seen, when in zip(record.token_times, sent, strict=True))
        assert record.ttft is not None
        assert record.tpot is not None
        ttft.append(record.ttft / (sent[0] - there["arrived"]) - 1)
        tpot.append(abs(record.tpot / ((sent[-1] - sent[0]) / 19) - 1))
    assert 0 < min(ttft) < 0.1
    assert min(tpot) < 0.05


@pytest.mark.parametrize(
    "known",
    [
        {"pieces": 1},
        {"pieces": 7, "newline": "\r\n"},
        {"pieces": 1, "newline": "\r\n", "framing": "until-close"},
        {"framing": "until-close"},
        {"fault": "no-done", "good": 99},
    ],
    ids=str,
)
async def test_streams_may_have_any_framing(harness: Harness, known: dict[str, Any]) -> None:
    record = await ask(harness.client(**known))
    assert (record.status, record.text, record.output_tokens) == ("ok", " one two three four five", 5)
    assert len(record.token_times) == 5


async def test_chunks_may_hold_several_tokens(harness: Harness) -> None:
    record = await ask(harness.client(tokens_a_chunk=2, itl=0.02), tokens=5)
    assert (len(record.token_times), len(record.itls), record.output_tokens) == (3, 2, 5)
    assert record.tpot == pytest.approx((record.end - record.token_times[0]) / 4)


async def test_without_usage_chunks_are_counted(harness: Harness) -> None:
    record = await ask(harness.client(usage=False))
    assert (record.status, record.output_tokens, record.counted_by) == ("ok", 5, "chunks")


@pytest.mark.parametrize(
    ("fault", "error", "tokens"),
    [
        ("http", "HTTP 503: too much", 0),
        ("plain", "the response is not a stream of tokens: {'choices': [{'text': 'all at once'}]}", 0),
        ("not-http", "the response is not HTTP/1.1", 0),
        ("error", "error in the stream: out of memory", 2),
        ("garbage", "an event of the stream can't be read", 2),
        ("ends", "the stream ended without a finish_reason or [DONE]", 2),
        ("close", "the server closed the connection before the end of the response", 2),
        ("stall", "timed out: nothing came for 0.1 s", 2),
    ],
)
async def test_faults_make_a_request_fail(harness: Harness, fault: str, error: str, tokens: int) -> None:
    record = await ask(harness.client(fault=fault, stall=0.1))
    assert record.status == "failed"
    assert record.error.startswith(error)
    assert len(record.token_times) == tokens


async def test_a_request_has_a_timeout(harness: Harness) -> None:
    record = await ask(harness.client(itl=0.05, timeout=0.2), tokens=100)
    assert (record.status, record.error) == ("failed", "timed out: it took longer than --request-timeout")
    assert 0 < len(record.token_times) < 100


async def test_silence_before_the_first_token_is_not_a_stall(harness: Harness) -> None:
    assert (await ask(harness.client(ttft=0.3, stall=0.1))).status == "ok"


async def test_connections_are_reused(harness: Harness) -> None:
    client = harness.client()
    for name in "abc":
        assert (await ask(client, name)).status == "ok"
    assert harness.server.connections == 1
    fresh = harness.client(keep_alive=False)
    for name in "de":
        assert (await ask(fresh, name)).status == "ok"
    assert harness.server.connections == 3


async def test_a_request_on_a_closed_idle_connection_is_sent_again(harness: Harness) -> None:
    client = harness.client(fault="hang-up", good=99)
    for name in "abc":
        assert (await ask(client, name)).status == "ok"
    assert harness.server.connections == 3


async def test_a_failure_does_not_affect_later_requests(harness: Harness) -> None:
    pool = ConnectionPool("127.0.0.1", harness.port)
    harness.pools.append(pool)
    good, bad = harness.client(), harness.client(fault="close")
    good._pool = bad._pool = pool
    assert [(await ask(client, name)).status for client, name in ((good, "a"), (bad, "b"), (good, "c"))] == [
        "ok",
        "failed",
        "ok",
    ]


async def test_a_cancelled_request_is_unfinished(harness: Harness) -> None:
    record = RequestRecord("a", 100, None)
    task = asyncio.create_task(harness.client(itl=0.01).send(record, DatasetPrompt("hello", None, 100), [], None))
    while len(record.token_times) < 3:
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (record.status, record.counted_by) == ("unfinished", "chunks")
    assert record.text.startswith(" one two three")


async def test_a_refused_connection_is_an_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    with pytest.raises(BrokenResponseError, match=f"could not connect to 127.0.0.1:{port}: Connection refused"):
        await ConnectionPool("127.0.0.1", port).connect()
