"""Server-sent events on plain ASGI. Owns one response from its first event to its last; knows no engine and no model.

The status line is not sent before the first event, so that a request refused by the engine (queue full, engine dead)
still gets its own status; a later error is sent as an event and ends the stream.
"""

from __future__ import annotations

from types import TracebackType

from starlette.types import Send

from jaxserve.server.errors import to_http_error

DONE = b"data: [DONE]\n\n"

_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class EventStream:
    """Writes events that are already encoded (`data: …\\n\\n`, one or several joined).

    As a context manager, it ends a stream that has begun with an error event if its body raises; before the first event
    it lets the error pass.
    """

    __slots__ = ("_send", "_started")

    def __init__(self, send: Send) -> None:
        self._send = send
        self._started = False

    async def __aenter__(self) -> EventStream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        if not self._started or not isinstance(error, Exception):
            return False
        await self.finish(b"data: " + to_http_error(error).encode() + b"\n\n")
        return True

    async def write(self, events: bytes) -> None:
        """Send `events` now; wait only while the client's connection is full."""
        if not self._started:
            await self._start()
        await self._send({"type": "http.response.body", "body": events, "more_body": True})

    async def finish(self, events: bytes = DONE) -> None:
        """Send the last events and end the response."""
        if not self._started:
            await self._start()
        await self._send({"type": "http.response.body", "body": events, "more_body": False})

    async def _start(self) -> None:
        self._started = True
        await self._send({"type": "http.response.start", "status": 200, "headers": list(_HEADERS)})
