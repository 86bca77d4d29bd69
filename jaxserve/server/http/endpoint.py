"""Runs a route's handler: reads and decodes the body, cancels the handler on a disconnect, and answers any error.

Owns this order for every route; knows none of them.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any

import msgspec
from starlette.types import Receive, Scope, Send

from jaxserve.server.errors import priorities_disabled, unknown_model
from jaxserve.server.http.decoding import decode_body
from jaxserve.server.http.exchange import ClientDisconnected, HttpExchange
from jaxserve.server.server_state import ServerState

type BodilessHandler = Callable[[ServerState, HttpExchange], Awaitable[None]]
type JsonHandler[T] = Callable[[ServerState, HttpExchange, T], Coroutine[Any, Any, None]]


class JsonEndpoint[T: msgspec.Struct]:
    """A route that takes a JSON body of type `body` and answers once the model is loaded.

    If the type has a static method `preprocess_body` (bytes to bytes), it is applied before decoding.
    """

    def __init__(self, path: str, state: ServerState, body: type[T], handle: JsonHandler[T]) -> None:
        self.path = path
        self._state = state
        self._handle = handle
        self._decoder = msgspec.json.Decoder(body)
        self._body = body
        self._preprocess: Callable[[bytes], bytes] = getattr(body, "preprocess_body", bytes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = HttpExchange(scope, receive, send)
        with self._state.count_open_request():
            try:
                self._state.require_loaded()
                read = await exchange.read_body(self._state.config.max_body_bytes)
                body = decode_body(self._decoder, self._preprocess(read), self._body)
                model: str | None = getattr(body, "model", None)
                if model is not None and model != self._state.model_name:
                    raise unknown_model(model, self._state.model_name)
                if getattr(body, "priority", None) is not None and self._state.refuses_priorities:
                    raise priorities_disabled()
                await exchange.run_until_disconnect(self._handle(self._state, exchange, body))
            except ClientDisconnected:
                return
            except Exception as error:
                await exchange.respond_error(self._state.http_error(error, exchange.request_id))


class BodilessEndpoint:
    """A route without a request body, with a handler for each method. It answers in every phase of the server."""

    def __init__(self, path: str, state: ServerState, handlers: Mapping[str, BodilessHandler]) -> None:
        self.path = path
        self._state = state
        self._handlers = handlers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = HttpExchange(scope, receive, send)
        try:
            method = "GET" if scope["method"] == "HEAD" else scope["method"]
            await self._handlers[method](self._state, exchange)
        except Exception as error:
            await exchange.respond_error(self._state.http_error(error, exchange.request_id))
