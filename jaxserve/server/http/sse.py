"""Server-sent events on plain ASGI. Owns one response from its first event to its last; knows no engine and no model.

The status line is held back until the first event, so that a request refused by the engine (queue full, engine dead)
still gets a status of its own; an error after that is an event, and ends the stream.
"""

from __future__ import annotations

from starlette.types import Send

from jaxserve.server.errors import HttpError

DONE = b"data: [DONE]\n\n"

_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class EventStream:
    """Writes events that are already encoded (`data: …\\n\\n`, one or several joined)."""

    __slots__ = ("_send", "started")

    def __init__(self, send: Send) -> None:
        self._send = send
        self.started = False

    async def write(self, events: bytes) -> None:
        """Sends `events` now; waits only while the client's connection is full."""
        if not self.started:
            await self._start()
        await self._send({"type": "http.response.body", "body": events, "more_body": True})

    async def finish(self, events: bytes = DONE) -> None:
        """Sends the last events and ends the response."""
        if not self.started:
            await self._start()
        await self._send({"type": "http.response.body", "body": events, "more_body": False})

    async def _start(self) -> None:
        self.started = True
        await self._send({"type": "http.response.start", "status": 200, "headers": list(_HEADERS)})

    async def fail(self, error: HttpError) -> None:
        """Ends a stream that has begun with an error event."""
        await self.finish(b"data: " + error.encode() + b"\n\n")
