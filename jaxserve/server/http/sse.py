"""Server-sent events on plain ASGI, each of them JSON. Owns one response from its first event to its last; knows no
engine and no model.

The status line is not sent before the first event or comment, so that a request refused by the engine (queue full,
engine dead) still gets its own status; a later error is sent as an event and ends the stream.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

from starlette.types import Send

from jaxserve.server.errors import MESSAGES_PATH, HttpError

DONE = b"data: [DONE]\n\n"

# NEL, LS and PS: some clients take them for the end of a line, though only CR and LF end one in an event.
_LINE_BREAKS = {b"\xc2\x85": b"\\u0085", b"\xe2\x80\xa8": b"\\u2028", b"\xe2\x80\xa9": b"\\u2029"}

_COMMENT = b": keep-alive\n\n"

_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


def open_stream(send: Send, encode_error: Callable[[Exception], bytes], keep_alive_interval: float) -> EventStream:
    """Return a stream, which has a comment after each silence of `keep_alive_interval` seconds unless that is 0."""
    if keep_alive_interval == 0.0:
        return EventStream(send, encode_error)
    return _KeptAliveStream(send, encode_error, keep_alive_interval)


def error_event(error: HttpError, path: str = "") -> bytes:
    """Return an error as an event for a client of the route `path`."""
    name = b"event: error\n" if path.startswith(MESSAGES_PATH) else b""
    return name + b"data: " + error.encode(path) + b"\n\n"


class EventStream:
    """Writes events that are already encoded (`data: …\\n\\n`, one or several joined).

    As a context manager, it ends a stream that has begun with the event that `encode_error` makes of what its body
    raises; before the first event it lets the error pass.
    """

    __slots__ = ("_encode_error", "_send", "_started")

    def __init__(self, send: Send, encode_error: Callable[[Exception], bytes]) -> None:
        self._send = send
        self._encode_error = encode_error
        self._started = False

    async def __aenter__(self) -> EventStream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        if not self._started or not isinstance(error, Exception):
            return False
        await self.finish(self._encode_error(error))
        return True

    async def write(self, events: bytes) -> None:
        """Send `events` now; wait only while the client's connection is full."""
        if not self._started:
            await self._start()
        await self._send({"type": "http.response.body", "body": _escaped(events), "more_body": True})

    async def finish(self, events: bytes = DONE) -> None:
        """Send the last events and end the response."""
        if not self._started:
            await self._start()
        await self._send({"type": "http.response.body", "body": _escaped(events), "more_body": False})

    async def _start(self) -> None:
        self._started = True
        await self._send({"type": "http.response.start", "status": 200, "headers": list(_HEADERS)})


class _KeptAliveStream(EventStream):
    """Has a comment after each silence of so many seconds, from when it is entered until it is finished."""

    __slots__ = ("_commenting", "_interval", "_last_write", "_lock")

    def __init__(self, send: Send, encode_error: Callable[[Exception], bytes], interval: float) -> None:
        super().__init__(send, encode_error)
        self._interval = interval
        self._last_write = time.monotonic()
        # Held while something is sent: a comment must not come before the status line, nor after the end.
        self._lock = asyncio.Lock()

    async def __aenter__(self) -> EventStream:
        self._commenting = asyncio.create_task(self._comment_silence())
        return self

    async def __aexit__(self, *raised: Any) -> bool:
        try:
            return await super().__aexit__(*raised)
        finally:
            self._commenting.cancel()

    async def write(self, events: bytes) -> None:
        async with self._lock:
            await super().write(events)
            self._last_write = time.monotonic()

    async def finish(self, events: bytes = DONE) -> None:
        async with self._lock:
            self._commenting.cancel()
            await super().finish(events)

    async def _comment_silence(self) -> None:
        while True:
            silent = time.monotonic() - self._last_write
            if silent < self._interval:
                await asyncio.sleep(self._interval - silent)
            else:
                await self.write(_COMMENT)


def _escaped(events: bytes) -> bytes:
    """Return events whose texts have no line breaks but escaped ones."""
    for character, escape in _LINE_BREAKS.items():
        if character in events:
            events = events.replace(character, escape)
    return events
