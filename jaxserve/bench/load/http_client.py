"""An HTTP/1.1 client for one server that reuses connections and takes the arrival time of each piece of a response.

A general HTTP client would compete with the server for the same cores and distort the measurement. This one only sends
a prepared message and passes the bytes of the body on as they arrive; `httptools` decodes chunked bodies.
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


class BrokenResponseError(JaxserveError):
    """The connection failed, or the response was cut off, is not HTTP, or took too long."""


class ResponseSink(Protocol):
    """Receives a response."""

    def begin(self, status: int) -> None:
        """Receive the status; the head has arrived."""

    def received(self, body: bytes, when: float) -> None:
        """Receive a piece of the body that arrived at `when`, a time of `time.perf_counter()`."""


class ClientConnection(asyncio.Protocol):
    """One connection with at most one exchange at a time. `usable` says whether another exchange may follow."""

    def __init__(self) -> None:
        self.usable = True
        self.response_started = False
        self._transport: asyncio.Transport | None = None
        self._parser: httptools.HttpResponseParser | None = None
        self._sink: ResponseSink | None = None
        self._done: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._last_arrival = 0.0
        self._has_length = False
        self._in_body = False
        self._body_started = False

    async def exchange(self, message: bytes, sink: ResponseSink, *, deadline: float, stall: float) -> None:
        """Send `message` and read the response into `sink`.

        `deadline` is a time of `time.perf_counter()`. `stall` is the longest allowed silence in seconds once the body
        has begun, not before: a server may send the head while the request is still queued. Raises
        `BrokenResponseError`; then, or when cancelled, the connection is closed.
        """
        assert self._transport is not None
        loop = asyncio.get_running_loop()
        self._parser, self._sink, self._done = httptools.HttpResponseParser(self), sink, loop.create_future()
        self.response_started = self._has_length = self._in_body = self._body_started = False
        if not self.usable:
            raise BrokenResponseError("the connection was closed")
        self._transport.write(message)
        self._check_timeouts(deadline, stall)
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
        """Close the connection at once."""
        self.usable = False
        if self._transport is not None:
            self._transport.abort()

    def _check_timeouts(self, deadline: float, stall: float) -> None:
        """Fail the exchange at a limit, else check again when the next one may be reached: not at every piece."""
        now = time.perf_counter()
        limit = min(deadline, self._last_arrival + stall) if self._body_started else deadline
        if now >= limit:
            why = f"nothing came for {stall:g} s" if limit < deadline else "it took longer than --request-timeout"
            self._fail(f"timed out: {why}")
            return
        wait = min(limit - now, stall)
        self._timer = asyncio.get_running_loop().call_later(wait, self._check_timeouts, deadline, stall)

    def _fail(self, why: str) -> None:
        self.usable = False
        if self._done is not None and not self._done.done():
            self._done.set_exception(BrokenResponseError(why))

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports derive from no asyncio class.
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._last_arrival = time.perf_counter()
        if self._parser is None or (self._done is not None and self._done.done()):
            self.abort()
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(f"the response is not HTTP/1.1: {error}")

    def connection_lost(self, error: Exception | None) -> None:
        until_closed = error is None and self._in_body and not self._has_length
        self.usable = False
        if until_closed and self._done is not None and not self._done.done():
            self._done.set_result(None)
        self._fail("the server closed the connection before the end of the response" if error is None else f"{error}")

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() in (b"content-length", b"transfer-encoding"):
            self._has_length = True

    def on_headers_complete(self) -> None:
        assert self._parser is not None
        assert self._sink is not None
        status = self._parser.get_status_code()
        if status >= 200:
            self.response_started = self._in_body = True
            self._sink.begin(status)

    def on_body(self, body: bytes) -> None:
        assert self._sink is not None
        self._body_started = True
        self._sink.received(body, self._last_arrival)

    def on_message_complete(self) -> None:
        assert self._parser is not None
        if self._parser.get_status_code() >= 200 and self._done is not None and not self._done.done():
            self.usable = self.usable and self._parser.should_keep_alive()
            self._done.set_result(None)


class ConnectionPool:
    """Connections to one server: idle ones are kept for reuse if `keep_alive`."""

    def __init__(self, host: str, port: int, tls: ssl.SSLContext | None = None, *, keep_alive: bool = True) -> None:
        self._host, self._port, self._tls, self._keep_alive = host, port, tls, keep_alive
        self._address = host
        self._idle: list[ClientConnection] = []

    async def connect(self) -> None:
        """Connect to the first of the host's addresses that accepts, and use that address from then on.

        Raises `BrokenResponseError` when none does.
        """
        loop = asyncio.get_running_loop()
        reasons: list[str] = []
        try:
            found = await loop.getaddrinfo(self._host, self._port, type=1)
        except OSError as error:
            raise BrokenResponseError(f"the name {self._host!r} is not known: {error}") from error
        for *_, address in found:
            self._address = str(address[0])
            try:
                self._idle.append(await self._connect())
                return
            except BrokenResponseError as error:
                reasons.append(str(error))
        raise BrokenResponseError("; ".join(dict.fromkeys(reasons)))

    async def exchange(self, message: bytes, sink: ResponseSink, *, deadline: float, stall: float) -> None:
        """Run `ClientConnection.exchange` on an idle or a new connection.

        A server may close an idle connection just as it is reused. The message is then sent again on a new connection,
        unless a response had already begun.
        """
        while self._idle:
            connection = self._idle.pop()
            if connection.usable:
                try:
                    await self._exchange_on(connection, message, sink, deadline, stall)
                    return
                except BrokenResponseError:
                    if connection.response_started or time.perf_counter() >= deadline:
                        raise
        await self._exchange_on(await self._connect(), message, sink, deadline, stall)

    def close(self) -> None:
        """Close the idle connections."""
        for connection in self._idle:
            connection.abort()
        self._idle.clear()

    async def _exchange_on(
        self, connection: ClientConnection, message: bytes, sink: ResponseSink, deadline: float, stall: float
    ) -> None:
        await connection.exchange(message, sink, deadline=deadline, stall=stall)
        if self._keep_alive and connection.usable:
            self._idle.append(connection)
        else:
            connection.abort()

    async def _connect(self) -> ClientConnection:
        loop = asyncio.get_running_loop()
        name = self._host if self._tls is not None else None
        try:
            _, connection = await loop.create_connection(
                ClientConnection, self._address, self._port, ssl=self._tls, server_hostname=name
            )
        except OSError as error:
            # asyncio and uvloop word the error differently; unknown host names have numbers outside `errno`.
            number = error.errno
            why = os.strerror(number) if number is not None and number in errno.errorcode else str(error)
            raise BrokenResponseError(f"could not connect to {self._address}:{self._port}: {why}") from error
        return connection
