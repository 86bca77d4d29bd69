"""What never becomes a request, on real sockets: too large, too slow, not HTTP. What does is left alone."""

from __future__ import annotations

import asyncio
import contextlib
import json
import tracemalloc
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from tests.server.conftest import Served, over_socket

LIMIT = 2048
GET = b"GET /version HTTP/1.1\r\nHost: x\r\n"
COMPLETION = b'{"prompt": "a", "max_tokens": 3}'
POST = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(COMPLETION) + COMPLETION
CHUNKED = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"


Connect = Callable[[Served], Awaitable["Client"]]


@pytest.fixture
async def connect() -> AsyncIterator[Connect]:
    clients: list[Client] = []

    async def connect(served: Served) -> Client:
        port = int(served.url.rsplit(":")[-1])
        clients.append(Client(*await asyncio.open_connection("127.0.0.1", port)))
        return clients[-1]

    yield connect
    for client in clients:
        await client.close()


@pytest.fixture
async def strict() -> AsyncIterator[Served]:
    async with over_socket(max_header_bytes=LIMIT, request_read_timeout=0.2) as served:
        yield served


class Client:
    """One connection, byte by byte."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def close(self) -> None:
        self._writer.close()
        with contextlib.suppress(ConnectionError):
            await self._writer.wait_closed()

    async def send(self, *parts: bytes) -> None:
        with contextlib.suppress(ConnectionError):
            for part in parts:
                self._writer.write(part)
                await self._writer.drain()

    async def response(self) -> tuple[int, bytes]:
        """Status and body of one response with a Content-Length."""
        async with asyncio.timeout(30):
            head = await self._reader.readuntil(b"\r\n\r\n")
            length = next(int(line.split(b":")[1]) for line in head.lower().split(b"\r\n") if b"content-length" in line)
            return int(head.split()[1]), await self._reader.readexactly(length)

    async def until(self, end: bytes) -> bytes:
        async with asyncio.timeout(30):
            return await self._reader.readuntil(end)

    async def rest(self) -> bytes:
        """All that comes until the server closes."""
        async with asyncio.timeout(30):
            try:
                return await self._reader.read()
            except ConnectionError:
                return b""

    async def refused(self) -> tuple[int, str]:
        """Status and code of an answer after which the connection ends."""
        status, body = await self.response()
        assert await self.rest() == b""
        return status, json.loads(body)["error"]["code"]


@pytest.mark.parametrize(
    "parts",
    [
        [b"GET /" + b"x" * LIMIT + b" HTTP/1.1\r\n\r\n"],
        [b"GET /" + b"x" * 100] + [b"x" * 100] * 30,
        [GET + b"A: " + b"x" * LIMIT + b"\r\n\r\n"],
        [GET + b"A: "] + [b"x" * 100] * 30,
        [GET] + [b"A: b\r\n"] * 400,
        [GET + b"A: b\r\n" * 400 + b"\r\n"],
        [GET, b"x" * 3000],
        [CHUNKED, b"1;" + b"x" * 3000],
        [CHUNKED, b"1\r\na\r\n0\r\n"] + [b"Trailer: x\r\n" * 10_000] * 6,
        [CHUNKED + b"1\r\na\r\n0\r\nTrailer: "] + [b"x" * 2**16] * 10,
        [b"\r\n" * 2000],
    ],
)
async def test_more_than_the_limit_beside_the_body_is_431(strict: Served, connect: Connect, parts: list[bytes]):
    client = await connect(strict)
    await client.send(*parts)
    assert await client.refused() == (431, "headers_too_large")
    assert strict.serving.num_open == 0


async def test_the_limit_itself_passes_and_a_body_does_not_count(strict: Served, connect: Connect):
    client = await connect(strict)
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n" % (len(COMPLETION) + 10**5)
    padding = b"A: " + b"x" * (LIMIT - len(head) - 8) + b"\r\n\r\n"
    await client.send(head + padding + COMPLETION + b" " * 10**5)
    assert (await client.response())[0] == 200
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in COMPLETION + b" " * 1000)
    await client.send(CHUNKED + chunks + b"0\r\nTrailer: x\r\n\r\n")
    assert (await client.response())[0] == 200


async def test_a_head_without_end_is_not_kept(live: Served, connect: Connect):
    client = await connect(live)
    tracemalloc.start()
    try:
        await client.send(GET + b"A: ", *[b"x" * 2**18] * 200)
        assert await client.refused() == (431, "headers_too_large")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 8 * 2**20
    assert (await live.http.post("/v1/completions", json={"prompt": "a"})).status_code == 200


@pytest.mark.parametrize(
    "sent", [b"G", GET, GET + b"A: b", POST[:-1], CHUNKED + b"1\r\n", POST + GET], ids=lambda sent: str(sent[-12:])
)
async def test_a_request_that_does_not_arrive_is_408(strict: Served, connect: Connect, sent: bytes):
    client = await connect(strict)
    await client.send(sent)
    if sent.startswith(POST):
        assert (await client.response())[0] == 200
    assert await client.refused() == (408, "request_timeout")
    assert strict.serving.num_open == 0


@pytest.mark.parametrize("drip", [GET, POST[:-1], b"\r\n" * 100])
async def test_dripping_does_not_help(strict: Served, connect: Connect, drip: bytes):
    client = await connect(strict)
    reading = asyncio.ensure_future(client.rest())
    while not reading.done():
        for byte in drip:
            await client.send(bytes([byte]))
            await asyncio.wait((reading,), timeout=0.02)
            if reading.done():
                break
        else:
            await asyncio.wait((reading,))
    assert reading.result().startswith(b"" if drip.startswith(b"\r") else b"HTTP/1.1 408 ")


async def test_who_says_nothing_is_not_waited_for(strict: Served, connect: Connect):
    assert await (await connect(strict)).rest() == b""


async def test_a_body_nobody_waits_for_does_not_keep_the_connection(strict: Served, connect: Connect):
    client = await connect(strict)
    await client.send(GET + b"Content-Length: 10\r\n\r\n")
    assert (await client.response())[0] == 200
    assert await client.rest() == b""


async def test_a_stream_takes_its_time(strict: Served, connect: Connect):
    """However long it is silent, and while its client begins another request."""
    strict.engine.hold()
    stream = await connect(strict)
    body = COMPLETION[:-1] + b', "stream": true}'
    await stream.send(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
    await strict.engine.wait_for(lambda: len(strict.engine.submitted) == 1)
    await stream.send(GET)
    for _ in range(2):  # twice as long as a request may take to arrive
        assert await (await connect(strict)).rest() == b""
    await strict.engine.step()
    await stream.until(b"data: ")
    strict.engine.release()
    await stream.until(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    assert await stream.refused() == (408, "request_timeout")


async def test_a_connection_is_kept_for_the_next_request(connect: Connect):
    async with over_socket(keep_alive_timeout=0.2) as served:
        client = await connect(served)
        await client.send(GET + b"\r\n" + POST + GET + b"\r\n")
        assert [(await client.response())[0] for _ in range(3)] == [200, 200, 200]
        await client.send(POST)
        assert (await client.response())[0] == 200
        assert await client.rest() == b""


@pytest.mark.parametrize(
    "sent", [b"\x16\x03\x01\x00\xa5\x01", b"BREW / HTTP/1.1\r\n\r\n", CHUNKED + b"zz\r\n", b"a\r\n"]
)
async def test_what_is_not_http(strict: Served, connect: Connect, sent: bytes):
    client = await connect(strict)
    await client.send(sent)
    assert await client.refused() == (400, "invalid_http")
    assert strict.serving.num_open == 0


@pytest.mark.parametrize("behind", [b"garbage\r\n\r\n", GET + b"A: " + b"x" * LIMIT, (GET + b"\r\n") * 1000])
async def test_nothing_is_written_into_an_answer_that_runs(strict: Served, connect: Connect, behind: bytes):
    strict.engine.hold()
    client = await connect(strict)
    await client.send(POST)
    await strict.engine.wait_for(lambda: len(strict.engine.submitted) == 1)
    await client.send(behind)
    assert await client.rest() == b""
    await strict.engine.wait_for(lambda: strict.engine.num_running == 0)
    strict.engine.release()
    assert (await strict.http.post("/v1/completions", json={"prompt": "a"})).status_code == 200
