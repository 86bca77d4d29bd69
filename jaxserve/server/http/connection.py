"""One HTTP connection with limits: how large a request's head may be, and how long a request may take to arrive.

uvicorn's protocol, which has neither. It owns what is answered to what never becomes a request (400, 408, 431); from
the moment a request is whole, nothing here touches it, however long its response takes.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from jaxserve.config.schema import ServerConfig
from jaxserve.server.errors import HttpError, headers_too_large, not_http, too_slow

# A refused request is read and dropped for this long before the connection closes, so that a client still sending gets
# to read its answer instead of a reset.
_DISCARD_SECONDS = 5.0
_DISCARD_BYTES = 256 * 2**20
# Requests on one connection that wait for the answer to the one before them. Each costs a hundred times its bytes.
_MOST_PIPELINED = 128


class _RefusedError(Exception):
    """Ends the parsing of what has been received."""


class Connection(HttpToolsProtocol):
    """`limits` are the server's settings; the other arguments are uvicorn's."""

    def __init__(self, limits: ServerConfig, **uvicorns: Any) -> None:
        super().__init__(**uvicorns)
        self.timeout_keep_alive = limits.keep_alive_timeout  # type: ignore[assignment]
        self._max_header_bytes = limits.max_header_bytes
        self._read_timeout = limits.request_read_timeout
        self._deadline: asyncio.TimerHandle | None = None
        self._in_request = False
        self._in_body = False
        # Bytes read since the last request ended, or since the body last grew: headers, and what can stand between
        # chunks. A read that ends either counts nothing, whatever follows in it.
        self._overhead = 0
        self._advanced = False
        self._answered: RequestResponseCycle | None = None
        self._refusal: HttpError | None = None
        self._num_discarded = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client has connected; it owes a request."""
        super().connection_made(transport)
        self._start_clock()

    def connection_lost(self, exc: Exception | None) -> None:
        """The client is gone."""
        self._stop_clock()
        if self._answered is not None:
            # uvicorn tells the last request that came, which may wait for this one.
            _disconnect(self._answered)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse `data`, and refuse the request once it is past a limit."""
        if self._refusal is not None:
            self._num_discarded += len(data)
            if self._num_discarded > _DISCARD_BYTES:
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

    def on_message_begin(self) -> None:
        """The first byte of a request, whose time begins."""
        self._stop_clock()
        self._in_request, self._in_body = True, False
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header; one that comes after the body is of no use to anybody."""
        if not self._in_body:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """The head is whole. Raises to end the parsing if it is too large."""
        if self._overhead > self._max_header_bytes:
            size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
            if size > self._max_header_bytes:
                self._refuse(headers_too_large(self._max_header_bytes))
                raise _RefusedError
        super().on_headers_complete()
        self._in_body = True
        if len(self.pipeline) > _MOST_PIPELINED:
            raise _RefusedError

    def on_body(self, body: bytes) -> None:
        """A part of the body."""
        self._advanced = True
        super().on_body(body)

    def on_message_complete(self) -> None:
        """The request is whole."""
        self._in_request, self._advanced = False, True
        self._stop_clock()
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """What was received can't be parsed."""
        if self._refusal is None:
            self._refuse(not_http())

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._answered = cycle
        super()._start_asgi_task(cycle, app)

    def _start_clock(self) -> None:
        if self._deadline is None:
            self._deadline = self.loop.call_later(self._read_timeout, self._on_deadline)

    def _stop_clock(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _on_deadline(self) -> None:
        """The client still owes the rest of a request."""
        self._deadline = None
        if self.transport.is_closing():
            return
        if self._is_answering:
            # To an earlier request, which this one must not disturb; or to this one before it was whole.
            if self._in_request:
                self._start_clock()
        elif self._in_request and not (self._in_body and self.cycle.response_complete):
            self._refuse(too_slow(self._read_timeout))
        else:
            self.transport.close()

    @property
    def _is_answering(self) -> bool:
        """Whether a response is under way, or an earlier request than the one being read waits for its own."""
        if self.cycle is None or self.cycle.response_complete:
            return False
        return bool(self.pipeline) or not (self._in_request and self._in_body) or self.cycle.response_started

    def _refuse(self, error: HttpError) -> None:
        """Answer `error` and close, or only close where the answer would fall into another one."""
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
        self._deadline = self.loop.call_later(_DISCARD_SECONDS, self.transport.close)


def _disconnect(cycle: RequestResponseCycle) -> None:
    """Tell the handler of a request that its client is gone."""
    cycle.disconnected = True
    cycle.message_event.set()
