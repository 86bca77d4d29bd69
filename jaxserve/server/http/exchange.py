"""One HTTP request on plain ASGI: reads its body up to a limit, sends its response, notices a disconnect.

Owns nothing between requests. Knows no route, no model and no engine.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from typing import Any

import msgspec
from starlette.types import Receive, Scope, Send

from jaxserve.server.errors import HttpError, body_too_large
from jaxserve.server.http.encodings import gunzip, is_gzip, without_mark

# A refused request is read and discarded for up to this long and this much before its connection closes, so that a
# client that is still sending can read the answer instead of getting a connection reset.
DISCARD_SECONDS = 5.0
DISCARD_BYTES = 256 * 2**20


class ClientDisconnected(Exception):
    """The client has disconnected, so no response can be sent."""


class HttpExchange:
    """One HTTP request and the means to answer it. `arrival` is `time.perf_counter()` when the request arrived."""

    __slots__ = ("arrival", "receive", "request_id", "scope", "send")

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.scope = scope
        self.receive = receive
        self.send = send
        self.arrival = time.perf_counter()
        self.request_id: str = scope["state"]["request_id"]

    async def read_body(self, limit: int) -> bytes:
        """Return the whole body as UTF-8, decompressed. Raises `HttpError` 413 past `limit` bytes, without keeping the
        bytes past it, and 415 for an encoding that is not supported."""
        is_compressed = is_gzip(self.scope["headers"])
        body = await self._read_body(limit)
        return without_mark(gunzip(body, limit) if is_compressed else body)

    async def _read_body(self, limit: int) -> bytes:
        length = content_length(self.scope)
        if length is not None and length > limit:
            raise body_too_large(limit)
        parts: list[bytes] = []
        size = 0
        while True:
            message = await self.receive()
            if message["type"] == "http.disconnect":
                raise ClientDisconnected
            part = message.get("body", b"")
            size += len(part)
            if size > limit:
                raise body_too_large(limit)
            parts.append(part)
            if not message.get("more_body", False):
                return parts[0] if len(parts) == 1 else b"".join(parts)

    async def respond(self, value: Any, status: int = 200) -> None:
        """Send `value` as JSON."""
        await send_json(self.send, status, msgspec.json.encode(value))

    async def respond_text(self, text: str, content_type: str = "text/plain; charset=utf-8") -> None:
        """Send `text` unchanged."""
        body = text.encode()
        headers = [(b"content-type", content_type.encode()), (b"content-length", str(len(body)).encode())]
        await self.send({"type": "http.response.start", "status": 200, "headers": headers})
        await self.send({"type": "http.response.body", "body": body})

    async def respond_error(self, error: HttpError) -> None:
        """Send `error`. A 413 is sent before the rest of its request's body is read and discarded."""
        discard = error.status == 413
        await send_json(self.send, error.status, error.encode(self.scope["path"]), error.headers, more_body=discard)
        if discard:
            await self._discard_body()
            await self.send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _discard_body(self) -> None:
        size = 0
        try:
            async with asyncio.timeout(DISCARD_SECONDS):
                while size < DISCARD_BYTES:
                    message = await self.receive()
                    size += len(message.get("body", b""))
                    if message["type"] == "http.disconnect" or not message.get("more_body", False):
                        return
        except TimeoutError:
            return

    async def run_until_disconnect(self, work: Coroutine[Any, Any, None]) -> None:
        """Run `work`; if the client disconnects first, cancel it and raise `ClientDisconnected`.

        The body must have been read: after it, a disconnect is the only message that can arrive.
        """
        task = asyncio.ensure_future(work)
        watcher = asyncio.ensure_future(self._disconnected())
        try:
            await asyncio.wait((task, watcher), return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise ClientDisconnected
        finally:
            watcher.cancel()
            task.cancel()
            await asyncio.gather(task, watcher, return_exceptions=True)
        task.result()

    async def _disconnected(self) -> None:
        while (await self.receive())["type"] != "http.disconnect":
            pass


async def send_json(
    send: Send,
    status: int,
    body: bytes,
    headers: tuple[tuple[bytes, bytes], ...] = (),
    *,
    more_body: bool = False,
) -> None:
    """Send one JSON response."""
    head = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode()), *headers]
    await send({"type": "http.response.start", "status": status, "headers": head})
    await send({"type": "http.response.body", "body": body, "more_body": more_body})


def content_length(scope: Scope) -> int | None:
    """Return the request's Content-Length, or None if it has none or it is not a number."""
    for name, value in scope["headers"]:
        if name == b"content-length":
            return int(value) if value.isdigit() else None
    return None
