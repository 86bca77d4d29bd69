"""Requests on real sockets that never become complete: too large, too slow, not HTTP. Complete ones are unaffected."""

from __future__ import annotations

import asyncio
import contextlib
import json
import tracemalloc
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from tests.server.conftest import ServerUnderTest, over_socket

LIMIT = 2048
GET = b"GET /version HTTP/1.1\r\nHost: x\r\n"
COMPLETION = b'{"prompt": "a", "max_tokens": 3}'
POST = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(COMPLETION) + COMPLETION
CHUNKED = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"


Connect = Callable[[ServerUnderTest], Awaitable["Client"]]


@pytest.fixture
async def connect() -> AsyncIterator[Connect]:
    clients: list[Client] = []

    async def connect(server: ServerUnderTest) -> Client:
        port = int(server.url.rsplit(":")[-1])
        clients.append(Client(*await asyncio.open_connection("127.0.0.1", port)))
        return clients[-1]

    yield connect
    for client in clients:
        await client.close()


@pytest.fixture
async def strict_server() -> AsyncIterator[ServerUnderTest]:
    async with over_socket(max_header_bytes=LIMIT, request_read_timeout=0.2) as server:
        yield server


class Client:
    """A client that sends and receives single bytes."""

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
        """Return the status and body of one response with a Content-Length."""
        async with asyncio.timeout(30):
            head = await self._reader.readuntil(b"\r\n\r\n")
            length = next(int(line.split(b":")[1]) for line in head.lower().split(b"\r\n") if b"content-length" in line)
            return int(head.split()[1]), await self._reader.readexactly(length)

    async def until(self, end: bytes) -> bytes:
        async with asyncio.timeout(30):
            return await self._reader.readuntil(end)

    async def rest(self) -> bytes:
        """Return all bytes until the server closes the connection."""
        async with asyncio.timeout(30):
            try:
                return await self._reader.read()
            except ConnectionError:
                return b""

    async def refused(self) -> tuple[int, str]:
        """Return the status and error code of a response after which the connection is closed."""
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
async def test_too_many_bytes_outside_the_body_are_431(
    strict_server: ServerUnderTest, connect: Connect, parts: list[bytes]
):
    client = await connect(strict_server)
    await client.send(*parts)
    assert await client.refused() == (431, "headers_too_large")
    assert strict_server.state.num_open_requests == 0


async def test_a_head_at_the_limit_passes_and_the_body_does_not_count(strict_server: ServerUnderTest, connect: Connect):
    client = await connect(strict_server)
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n" % (len(COMPLETION) + 10**5)
    padding = b"A: " + b"x" * (LIMIT - len(head) - 8) + b"\r\n\r\n"
    await client.send(head + padding + COMPLETION + b" " * 10**5)
    assert (await client.response())[0] == 200
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in COMPLETION + b" " * 1000)
    await client.send(CHUNKED + chunks + b"0\r\nTrailer: x\r\n\r\n")
    assert (await client.response())[0] == 200


async def test_an_endless_head_is_not_kept(live_server: ServerUnderTest, connect: Connect):
    client = await connect(live_server)
    tracemalloc.start()
    try:
        await client.send(GET + b"A: ", *[b"x" * 2**18] * 200)
        assert await client.refused() == (431, "headers_too_large")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 8 * 2**20
    assert (await live_server.http.post("/v1/completions", json={"prompt": "a"})).status_code == 200


@pytest.mark.parametrize(
    "sent", [b"G", GET, GET + b"A: b", POST[:-1], CHUNKED + b"1\r\n", POST + GET], ids=lambda sent: str(sent[-12:])
)
async def test_an_incomplete_request_is_408(strict_server: ServerUnderTest, connect: Connect, sent: bytes):
    client = await connect(strict_server)
    await client.send(sent)
    if sent.startswith(POST):
        assert (await client.response())[0] == 200
    assert await client.refused() == (408, "request_timeout")
    assert strict_server.state.num_open_requests == 0


@pytest.mark.parametrize("drip", [GET, POST[:-1], b"\r\n" * 100])
async def test_sending_slowly_does_not_extend_the_limit(strict_server: ServerUnderTest, connect: Connect, drip: bytes):
    client = await connect(strict_server)
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


async def test_an_idle_new_connection_is_closed(strict_server: ServerUnderTest, connect: Connect):
    assert await (await connect(strict_server)).rest() == b""


async def test_an_unread_body_does_not_keep_the_connection_open(strict_server: ServerUnderTest, connect: Connect):
    client = await connect(strict_server)
    await client.send(GET + b"Content-Length: 10\r\n\r\n")
    assert (await client.response())[0] == 200
    assert await client.rest() == b""


async def test_a_response_has_no_time_limit(strict_server: ServerUnderTest, connect: Connect):
    """Neither while it is silent nor while its client begins another request."""
    strict_server.engine.hold()
    stream = await connect(strict_server)
    body = COMPLETION[:-1] + b', "stream": true}'
    await stream.send(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
    await strict_server.engine.wait_for(lambda: len(strict_server.engine.submitted) == 1)
    await stream.send(GET)
    for _ in range(2):  # twice as long as a request may take to arrive
        assert await (await connect(strict_server)).rest() == b""
    await strict_server.engine.step()
    await stream.until(b"data: ")
    strict_server.engine.release()
    await stream.until(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    assert await stream.refused() == (408, "request_timeout")


async def test_a_connection_is_kept_for_the_next_request(connect: Connect):
    async with over_socket(keep_alive_timeout=0.2) as server:
        client = await connect(server)
        await client.send(GET + b"\r\n" + POST + GET + b"\r\n")
        assert [(await client.response())[0] for _ in range(3)] == [200, 200, 200]
        await client.send(POST)
        assert (await client.response())[0] == 200
        assert await client.rest() == b""


@pytest.mark.parametrize(
    "sent", [b"\x16\x03\x01\x00\xa5\x01", b"BREW / HTTP/1.1\r\n\r\n", CHUNKED + b"zz\r\n", b"a\r\n"]
)
async def test_invalid_http_is_400(strict_server: ServerUnderTest, connect: Connect, sent: bytes):
    client = await connect(strict_server)
    await client.send(sent)
    assert await client.refused() == (400, "invalid_http")
    assert strict_server.state.num_open_requests == 0


@pytest.mark.parametrize("following", [b"garbage\r\n\r\n", GET + b"A: " + b"x" * LIMIT, (GET + b"\r\n") * 1000])
async def test_a_refusal_does_not_interrupt_a_response(
    strict_server: ServerUnderTest, connect: Connect, following: bytes
):
    strict_server.engine.hold()
    client = await connect(strict_server)
    await client.send(POST)
    await strict_server.engine.wait_for(lambda: len(strict_server.engine.submitted) == 1)
    await client.send(following)
    assert await client.rest() == b""
    await strict_server.engine.wait_for(lambda: strict_server.engine.num_running == 0)
    strict_server.engine.release()
    assert (await strict_server.http.post("/v1/completions", json={"prompt": "a"})).status_code == 200


UPGRADES = [b"h2c", b"websocket", b"TLS/1.0", b"h2c, websocket"]
CONNECTIONS = [b"Upgrade", b"Upgrade, HTTP2-Settings", b"keep-alive, Upgrade"]


def offering(protocol: bytes, connection: bytes, *, framing: str) -> list[bytes]:
    """Return the parts of a completion's request, sent one by one: the head, then the body."""
    offer = b"Connection: %s\r\nUpgrade: %s\r\nHTTP2-Settings: AAM\r\n" % (connection, protocol)
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n" + offer
    if framing == "chunked":
        half = len(COMPLETION) // 2
        chunks = [b"%x\r\n%b\r\n" % (len(part), part) for part in (COMPLETION[:half], COMPLETION[half:])]
        return [head + b"Transfer-Encoding: chunked\r\n\r\n", *chunks, b"0\r\n\r\n"]
    expect = b"Expect: 100-continue\r\n" if framing == "continue" else b""
    return [head + expect + b"Content-Length: %d\r\n\r\n" % len(COMPLETION), COMPLETION]


@pytest.mark.parametrize("framing", ["length", "chunked", "continue"])
@pytest.mark.parametrize("at_once", [True, False])
async def test_an_offer_to_upgrade_is_ignored(
    live_server: ServerUnderTest, connect: Connect, framing: str, at_once: bool
):
    client = await connect(live_server)
    for protocol in UPGRADES:
        for connection in CONNECTIONS:
            parts = offering(protocol, connection, framing=framing)
            first, *rest = [b"".join(parts)] if at_once else parts
            await client.send(first)
            if framing == "continue":
                assert await client.until(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
            for part in rest:
                await asyncio.sleep(0)
                await client.send(part)
            assert (await client.response())[0] == 200
    limits = [request.sampling.max_tokens for request in live_server.engine.submitted]
    assert limits == [3] * len(UPGRADES) * len(CONNECTIONS)


async def test_requests_after_an_offer_to_upgrade_are_their_own(live_server: ServerUnderTest, connect: Connect):
    client = await connect(live_server)
    smuggled = GET + b"\r\n"
    body = COMPLETION + b" " * 10 + b"\r\n\r\n"
    head = b"POST /v1/completions HTTP/1.1\r\nConnection: Upgrade\r\nUpgrade: h2c\r\nContent-Length: %d\r\n\r\n"
    bodiless = b"GET /version HTTP/1.1\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n"
    await client.send((head % len(body) + body + bodiless + smuggled) * 3)
    assert [(await client.response())[0] for _ in range(9)] == [200] * 9
    await client.send(b"CONNECT example.com:443 HTTP/1.1\r\nHost: x\r\n\r\n" + smuggled)
    assert await client.refused() == (400, "invalid_http")


async def test_too_many_offers_to_upgrade_end_the_connection(live_server: ServerUnderTest, connect: Connect):
    client = await connect(live_server)
    await client.send(b"GET /version HTTP/1.1\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n" * 5000)
    await client.rest()
    assert (await live_server.http.get("/version")).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
async def test_http_1_0_gets_no_chunks(live_server: ServerUnderTest, connect: Connect, stream: bool):
    body = COMPLETION[:-1] + (b', "stream": true}' if stream else b"}")
    request = b"POST /v1/completions HTTP/1.%d\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%b"
    answers = []
    for version in (0, 1):
        client = await connect(live_server)
        await client.send(request % (version, len(body), body))
        head, _, answer = (await client.rest()).partition(b"\r\n\r\n")
        assert (b"chunked" in head) == (stream and version == 1)
        answers.append(answer)
    if stream:
        assert answers[0].startswith(b"data: {")
        assert answers[0].endswith(b"data: [DONE]\n\n")
    else:
        assert json.loads(answers[0])["usage"] == json.loads(answers[1])["usage"]
