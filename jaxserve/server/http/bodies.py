"""Bodies in and JSON out, on plain ASGI: reading with a limit, decoding with errors that name the field, disconnects.

Owns nothing between requests. Knows no route, no model and no engine.
"""

from __future__ import annotations

import asyncio
import difflib
import re
import time
from collections.abc import Coroutine
from typing import Any

import msgspec
from starlette.types import Receive, Scope, Send

from jaxserve.errors import InvalidRequestError
from jaxserve.server.errors import HttpError, body_too_large

# A body past the limit is read and dropped for this long before the connection closes, so that a client still sending
# gets to read its 413 instead of a reset.
_DISCARD_SECONDS = 5.0
_DISCARD_BYTES = 256 * 2**20


class ClientDisconnected(Exception):
    """The client hung up; there is nobody left to answer."""


class Exchange:
    """One HTTP request and the way back to its client. `arrival` is `time.perf_counter()` when the request came."""

    __slots__ = ("arrival", "receive", "request_id", "scope", "send")

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.scope = scope
        self.receive = receive
        self.send = send
        self.arrival = time.perf_counter()
        self.request_id: str = scope["state"]["request_id"]

    async def read_body(self, limit: int) -> bytes:
        """The whole body. Raises `HttpError` 413 past `limit` bytes, without keeping what is past it."""
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
        """Sends `value` as JSON."""
        await send_json(self.send, status, msgspec.json.encode(value))

    async def respond_text(self, text: str, content_type: str = "text/plain; charset=utf-8") -> None:
        """Sends `text` as it is."""
        body = text.encode()
        headers = [(b"content-type", content_type.encode()), (b"content-length", str(len(body)).encode())]
        await self.send({"type": "http.response.start", "status": 200, "headers": headers})
        await self.send({"type": "http.response.body", "body": body})

    async def fail(self, error: HttpError) -> None:
        """Sends `error`; a 413 goes out whole before the rest of its body is read and dropped."""
        discard = error.status == 413
        await send_json(self.send, error.status, error.encode(), error.headers, more_body=discard)
        if discard:
            await self._discard_body()
            await self.send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _discard_body(self) -> None:
        size = 0
        try:
            async with asyncio.timeout(_DISCARD_SECONDS):
                while size < _DISCARD_BYTES:
                    message = await self.receive()
                    size += len(message.get("body", b""))
                    if message["type"] == "http.disconnect" or not message.get("more_body", False):
                        return
        except TimeoutError:
            return

    async def until_disconnect(self, work: Coroutine[Any, Any, None]) -> None:
        """Runs `work`, and cancels it the moment the client hangs up (raising `ClientDisconnected`).

        The body must have been read: from then on the only message a client can send is its leaving.
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
    """Sends one JSON response."""
    head = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode()), *headers]
    await send({"type": "http.response.start", "status": status, "headers": head})
    await send({"type": "http.response.body", "body": body, "more_body": more_body})


def content_length(scope: Scope) -> int | None:
    """The request's Content-Length, None when it gives none that is a number."""
    for name, value in scope["headers"]:
        if name == b"content-length":
            return int(value) if value.isdigit() else None
    return None


def decode[T](decoder: msgspec.json.Decoder[T], body: bytes, fields: tuple[str, ...]) -> T:
    """`body` as a request. Raises `InvalidRequestError` naming the field at fault, and for an unknown one the nearest
    of `fields`."""
    try:
        try:
            return decoder.decode(body)
        except msgspec.ValidationError as error:
            if "`, got `float`" not in str(error):
                raise
            # To JSON 72.0 is an integer, which some clients write.
            return decoder.decode(msgspec.json.encode(_with_integers(msgspec.json.decode(body))))
    except msgspec.ValidationError as error:
        raise explain(str(error), fields=fields, body=body) from error
    except RecursionError as error:
        raise InvalidRequestError("The JSON body is nested too deep") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        hint = " (NaN and Infinity are not JSON)" if b"NaN" in body or b"Infinity" in body else ""
        raise InvalidRequestError(f"The body is not valid JSON: {error}{hint}") from error


def _with_integers(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**63:
        return int(value)
    if isinstance(value, list):
        return [_with_integers(item) for item in value]
    if isinstance(value, dict):
        return {name: _with_integers(item) for name, item in value.items()}
    return value


def explain(problem: str, where: str = "", *, fields: tuple[str, ...] = (), body: bytes = b"") -> InvalidRequestError:
    """What a client is told of a `msgspec.ValidationError` in the value at `where`."""
    what, _, path = problem.partition(" - at `$")
    path = (where + path.rstrip("`")).lstrip(".")
    if what.startswith("Object contains unknown field"):
        name = what.split("`")[1]
        full = f"{path}.{name}" if path else name
        near = difflib.get_close_matches(name, fields, n=1) if not path else []
        advice = f"; did you mean {near[0]!r}?" if near else ""
        return InvalidRequestError(f"Unknown field {full[:200]!r}{advice}", param=full[:200])
    if what.startswith("Object missing required field"):
        name = what.split("`")[1]
        full = f"{path}.{name}" if path else name
        return InvalidRequestError(f"Field {full!r} is required", param=full)
    if not path:
        return InvalidRequestError(f"The body must be a JSON object: {what}")
    given = "" if ", got" in what else _given(body, path)
    return InvalidRequestError(f"{path}: {what[0].lower()}{what[1:].replace(' | null', '')}{given}", param=path)


def _given(body: bytes, path: str) -> str:
    """What stands at `path`, for an error that names only the limit; nothing if the rest of the body is no JSON."""
    try:
        value = msgspec.json.decode(body)
        for name, number in re.findall(r"([^.\[\]]+)|\[(\d+)\]", path):
            value = value[int(number) if number else name]
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, LookupError, TypeError):
        return ""
    if isinstance(value, list | dict):
        return f", got {len(value)} entries"
    shown = msgspec.json.encode(value).decode()
    return f", got {shown[:40]}"
