"""HTTP/1.1 for one server: connections that are used again, and the moment at which each piece of an answer arrived.

A general client's own work would be measured with the server's, on the same cores, so this one does nothing but send
a prepared message and hand on the body's bytes as the socket has them; `httptools` undoes the chunking.
"""

from __future__ import annotations

import asyncio
import errno
import os
import ssl
import time
from typing import Protocol, cast

import httptools

from jaxserve.errors import JaxserveError


class BrokenAnswerError(JaxserveError):
    """The connection failed, or the answer was cut off, is no HTTP, or took too long."""


class Sink(Protocol):
    """Who reads an answer."""

    def begin(self, status: int) -> None:
        """The head has come."""

    def received(self, body: bytes, when: float) -> None:
        """A piece of the body came, at `when` by `time.perf_counter()`."""


class Connection(asyncio.Protocol):
    """One connection and at most one exchange on it. `usable` says whether another may follow."""

    def __init__(self) -> None:
        self.usable = True
        self.answered = False
        self._transport: asyncio.Transport | None = None
        self._parser: httptools.HttpResponseParser | None = None
        self._sink: Sink | None = None
        self._done: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._arrived = 0.0
        self._framed = False
        self._in_body = False
        self._flows = False

    async def exchange(self, message: bytes, sink: Sink, *, deadline: float, stall: float) -> None:
        """Send `message` and read the answer into `sink`.

        `deadline` is by `time.perf_counter()`; `stall` is the longest silence once the body has begun, in seconds: a
        server may send the head long before a queued request's turn. Raises `BrokenAnswerError`; then, or when
        cancelled, the connection is closed.
        """
        assert self._transport is not None
        loop = asyncio.get_running_loop()
        self._parser, self._sink, self._done = httptools.HttpResponseParser(self), sink, loop.create_future()
        self.answered = self._framed = self._in_body = self._flows = False
        if not self.usable:
            raise BrokenAnswerError("the connection was closed")
        self._transport.write(message)
        self._watch(deadline, stall)
        try:
            await self._done
        except BaseException:
            self.abort()
            raise
        finally:
            if self._timer is not None:
                self._timer.cancel()
            self._parser = self._sink = self._done = None

    def abort(self) -> None:
        """Close it at once."""
        self.usable = False
        if self._transport is not None:
            self._transport.abort()

    def _watch(self, deadline: float, stall: float) -> None:
        """Looks again when the next limit could be reached, not at every piece of the body."""
        now = time.perf_counter()
        limit = min(deadline, self._arrived + stall) if self._flows else deadline
        if now >= limit:
            why = f"nothing came for {stall:g} s" if limit < deadline else "it took longer than --request-timeout"
            self._fail(f"timed out: {why}")
            return
        wait = min(limit - now, stall)
        self._timer = asyncio.get_running_loop().call_later(wait, self._watch, deadline, stall)

    def _fail(self, why: str) -> None:
        self.usable = False
        if self._done is not None and not self._done.done():
            self._done.set_exception(BrokenAnswerError(why))

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's are of no class of asyncio's
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._arrived = time.perf_counter()
        if self._parser is None or (self._done is not None and self._done.done()):
            self.abort()
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(f"the answer is not HTTP/1.1: {error}")

    def connection_lost(self, error: Exception | None) -> None:
        until_closed = error is None and self._in_body and not self._framed
        self.usable = False
        if until_closed and self._done is not None and not self._done.done():
            self._done.set_result(None)
        self._fail("the server closed the connection before the answer's end" if error is None else f"{error}")

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() in (b"content-length", b"transfer-encoding"):
            self._framed = True

    def on_headers_complete(self) -> None:
        assert self._parser is not None
        assert self._sink is not None
        status = self._parser.get_status_code()
        if status >= 200:
            self.answered = self._in_body = True
            self._sink.begin(status)

    def on_body(self, body: bytes) -> None:
        assert self._sink is not None
        self._flows = True
        self._sink.received(body, self._arrived)

    def on_message_complete(self) -> None:
        assert self._parser is not None
        if self._parser.get_status_code() >= 200 and self._done is not None and not self._done.done():
            self.usable = self.usable and self._parser.should_keep_alive()
            self._done.set_result(None)


class Pool:
    """Connections to one server, found once and kept while `keep_alive`."""

    def __init__(self, host: str, port: int, tls: ssl.SSLContext | None = None, *, keep_alive: bool = True) -> None:
        self._host, self._port, self._tls, self._keep_alive = host, port, tls, keep_alive
        self._address = host
        self._idle: list[Connection] = []

    async def find(self) -> None:
        """Connect to the first of the host's addresses that answers, which is then used throughout.

        Raises `BrokenAnswerError` where none does.
        """
        loop = asyncio.get_running_loop()
        reasons: list[str] = []
        try:
            found = await loop.getaddrinfo(self._host, self._port, type=1)
        except OSError as error:
            raise BrokenAnswerError(f"the name {self._host!r} is not known: {error}") from error
        for *_, address in found:
            self._address = str(address[0])
            try:
                self._idle.append(await self._connect())
                return
            except BrokenAnswerError as error:
                reasons.append(str(error))
        raise BrokenAnswerError("; ".join(dict.fromkeys(reasons)))

    async def exchange(self, message: bytes, sink: Sink, *, deadline: float, stall: float) -> None:
        """`Connection.exchange` on an idle or a new connection.

        A server may close an idle connection just when it is used again: then the message is sent once more on a new
        one, if nothing of an answer had come.
        """
        while self._idle:
            connection = self._idle.pop()
            if connection.usable:
                try:
                    await self._use(connection, message, sink, deadline, stall)
                    return
                except BrokenAnswerError:
                    if connection.answered or time.perf_counter() >= deadline:
                        raise
        await self._use(await self._connect(), message, sink, deadline, stall)

    def close(self) -> None:
        """Close the idle connections."""
        for connection in self._idle:
            connection.abort()
        self._idle.clear()

    async def _use(self, connection: Connection, message: bytes, sink: Sink, deadline: float, stall: float) -> None:
        await connection.exchange(message, sink, deadline=deadline, stall=stall)
        if self._keep_alive and connection.usable:
            self._idle.append(connection)
        else:
            connection.abort()

    async def _connect(self) -> Connection:
        loop = asyncio.get_running_loop()
        name = self._host if self._tls is not None else None
        try:
            _, connection = await loop.create_connection(
                Connection, self._address, self._port, ssl=self._tls, server_hostname=name
            )
        except OSError as error:
            # asyncio and uvloop word it differently; a name that isn't known has a number of its own
            number = error.errno
            why = os.strerror(number) if number is not None and number in errno.errorcode else str(error)
            raise BrokenAnswerError(f"could not connect to {self._address}:{self._port}: {why}") from error
        return connection
