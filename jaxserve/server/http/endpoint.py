"""How a route is run: read, decode, handle until the client leaves, and turn any error into its answer.

Owns that order for every route; knows none of them.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import msgspec
from starlette.types import Receive, Scope, Send

from jaxserve.server.errors import to_http, unknown_model
from jaxserve.server.http.bodies import ClientDisconnected, Exchange, decode
from jaxserve.server.server_state import Serving


class Post[T: msgspec.Struct]:
    """A route that takes a JSON body of type `body` and answers once the engine is ready.

    A type that has `meant`, bytes to bytes, has it say which part of a body is meant for it.
    """

    def __init__(
        self, serving: Serving, body: type[T], handle: Callable[[Serving, Exchange, T], Coroutine[Any, Any, None]]
    ) -> None:
        self._serving = serving
        self._handle = handle
        self._decoder = msgspec.json.Decoder(body)
        self._fields = body.__struct_fields__
        self._meant: Callable[[bytes], bytes] = getattr(body, "meant", bytes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = Exchange(scope, receive, send)
        with self._serving.answering():
            try:
                self._serving.require()
                read = await exchange.read_body(self._serving.config.max_body_bytes)
                body = decode(self._decoder, self._meant(read), self._fields)
                model: str | None = getattr(body, "model", None)
                if model is not None and model != self._serving.model_name:
                    raise unknown_model(model, self._serving.model_name)
                await exchange.until_disconnect(self._handle(self._serving, exchange, body))
            except ClientDisconnected:
                return
            except Exception as error:
                await exchange.fail(to_http(error))


class Bodiless:
    """A route without a body. It answers in every phase of the server."""

    def __init__(self, serving: Serving, handle: Callable[[Serving, Exchange], Awaitable[None]]) -> None:
        self._serving = serving
        self._handle = handle

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = Exchange(scope, receive, send)
        try:
            await self._handle(self._serving, exchange)
        except Exception as error:
            await exchange.fail(to_http(error))
