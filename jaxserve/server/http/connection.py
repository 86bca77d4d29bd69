"""One HTTP connection with two limits that uvicorn's protocol lacks: the size of a request's head, and how long a
request may take to arrive.

Owns the answers to requests that never become complete (400, 408, 431). Offers to change to another protocol are
ignored. Once a request is complete, nothing here touches it, however long its response takes.
"""

from __future__ import annotations

import asyncio
import math
from typing import Any

import httptools
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from jaxserve.config.server_schema import ServerConfig
from jaxserve.server.errors import HttpError, headers_too_large, invalid_http, request_timed_out
from jaxserve.server.http.exchange import DISCARD_BYTES, DISCARD_SECONDS

# The limit of requests on one connection that wait for an earlier response. Each uses a hundred times its bytes.
_MAX_PIPELINED = 128


class _RefusedError(Exception):
    """Stops the parsing of the received data."""


class _RequestParser(httptools.HttpRequestParser):
    """Goes on with a request that offers an upgrade, whose body httptools doesn't read."""

    def __init__(self, connection: HttpConnection) -> None:
        super().__init__(connection)
        self.set_dangerous_leniencies(lenient_data_after_close=True)
        self._ignore_upgrade = connection.ignore_upgrade

    def feed_data(self, data: Any) -> None:
        try:
            super().feed_data(data)
        except httptools.HttpParserUpgrade as offer:
            self._ignore_upgrade(data[offer.args[0] :])


class HttpConnection(HttpToolsProtocol):
    """`limits` are the server's settings; the other arguments are uvicorn's."""

    def __init__(self, limits: ServerConfig, **uvicorn_arguments: Any) -> None:
        super().__init__(**uvicorn_arguments)
        self.parser = _RequestParser(self)
        self._repeats_head = False
        self.timeout_keep_alive = limits.keep_alive_timeout  # type: ignore[assignment]
        self._max_header_bytes = limits.max_header_bytes
        self._read_timeout = limits.request_read_timeout
        self._deadline: asyncio.TimerHandle | None = None
        self._in_request = False
        self._in_body = False
        # Bytes read since the last request ended or the body last grew: headers, and the framing between chunks.
        # A read in which a request ends or a body grows resets the count to 0, including the bytes after that point.
        self._overhead = 0
        self._advanced = False
        self._answered: RequestResponseCycle | None = None
        self._refusal: HttpError | None = None
        self._num_discarded = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the time limit for the first request of a new connection."""
        super().connection_made(transport)
        self._start_clock()

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the request being answered, as the client has disconnected."""
        self._stop_clock()
        if self._answered is not None:
            # uvicorn notifies only the last request received, which may be waiting for this one.
            _disconnect(self._answered)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse `data`, and refuse the request if it is past a limit."""
        if self._refusal is not None:
            self._num_discarded += len(data)
            if self._num_discarded > DISCARD_BYTES:
                self.transport.close()
            return
        self._overhead += len(data)
        self._advanced = False
        super().data_received(data)
        if self._refusal is not None or self.transport.is_closing():
            return
        if self._advanced:
            self._overhead = 0
        if self._overhead > self._max_header_bytes:
            self._refuse(headers_too_large(self._max_header_bytes))
        elif self._in_request or not self._advanced:
            self._start_clock()

    def ignore_upgrade(self, rest: bytes) -> None:
        """Read the body of a request that offers an upgrade from `rest`, the data after its head, and what follows it.

        Another parser gets a head without the offer and with the same length or chunks.
        """
        self.parser = _RequestParser(self)
        framing = [item for item in self.headers if item[0] in (b"content-length", b"transfer-encoding")]
        self._repeats_head = True
        self.parser.feed_data(b"POST / HTTP/1.1\r\n" + b"".join(b"%s: %s\r\n" % item for item in framing) + b"\r\n")
        self._repeats_head = False
        self.parser.feed_data(rest)

    def on_message_begin(self) -> None:
        """Note the first byte of a request, from which its time counts."""
        if self._repeats_head:
            return
        self._stop_clock()
        self._in_request, self._in_body = True, False
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        """Handle a part of the target."""
        if not self._repeats_head:
            super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Handle a header; ignore one after the body (a trailer)."""
        if not self._in_body:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Check the complete head. Raises `_RefusedError`, which stops the parsing, if it is past a limit."""
        if self._repeats_head:
            return
        if self._overhead > self._max_header_bytes:
            size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
            if size > self._max_header_bytes:
                self._refuse(headers_too_large(self._max_header_bytes))
                raise _RefusedError
        super().on_headers_complete()
        self._in_body = True
        if len(self.pipeline) > _MAX_PIPELINED:
            raise _RefusedError

    def on_body(self, body: bytes) -> None:
        """Handle a part of the body."""
        self._advanced = True
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Handle the end of a request."""
        if self.parser.should_upgrade():
            return
        self._in_request, self._advanced = False, True
        self._stop_clock()
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """Refuse data that can't be parsed."""
        if self._refusal is None:
            self._refuse(invalid_http())

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._answered = cycle
        if cycle.scope["http_version"] != "1.1":
            app = _UntilClose(app, cycle)
        super()._start_asgi_task(cycle, app)

    def _start_clock(self) -> None:
        if self._deadline is None:
            self._deadline = self.loop.call_later(self._read_timeout, self._on_deadline)

    def _stop_clock(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _on_deadline(self) -> None:
        """Refuse or close a connection whose client has not sent the rest of a request in time."""
        self._deadline = None
        if self.transport.is_closing():
            return
        if self._is_answering:
            # The response is to an earlier request, which this one must not disturb, or to this incomplete one.
            if self._in_request:
                self._start_clock()
        elif self._in_request and not (self._in_body and self.cycle.response_complete):
            self._refuse(request_timed_out(self._read_timeout))
        else:
            self.transport.close()

    @property
    def _is_answering(self) -> bool:
        """Whether a response is being sent, or a request before the one being read waits for its response."""
        if self.cycle is None or self.cycle.response_complete:
            return False
        return bool(self.pipeline) or not (self._in_request and self._in_body) or self.cycle.response_started

    def _refuse(self, error: HttpError) -> None:
        """Answer with `error` and close; only close if the answer would interrupt another one."""
        self._refusal = error
        self._stop_clock()
        if self._is_answering:
            self.transport.close()
            return
        if self._in_body and self.cycle is not None:
            _disconnect(self.cycle)
        body = error.encode()
        headers = [
            *self.server_state.default_headers,
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"connection", b"close"),
        ]
        head = b"".join(b"%s: %s\r\n" % header for header in headers)
        self.transport.write(STATUS_LINE[error.status] + head + b"\r\n" + body)
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.flow.resume_reading()
        self._deadline = self.loop.call_later(DISCARD_SECONDS, self.transport.close)


class _UntilClose:
    """Answers a client of HTTP/1.0, which has no chunks: a response of unknown length ends with the connection."""

    def __init__(self, app: ASGIApp, cycle: RequestResponseCycle) -> None:
        self._app = app
        self._cycle = cycle

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_plainly(message: Message) -> None:
            # uvicorn raises unless the body has the length that it expects.
            self._cycle.chunked_encoding = False
            self._cycle.expected_content_length = (
                math.inf if message.get("more_body") else len(message.get("body", b""))  # type: ignore[assignment]
            )
            await send(message)

        await self._app(scope, receive, send_plainly)


def _disconnect(cycle: RequestResponseCycle) -> None:
    """Tell the handler of a request that its client has disconnected."""
    cycle.disconnected = True
    cycle.message_event.set()
