"""Request ids: a response carries the client's `X-Request-Id`, or a new one if the client sent none."""

from __future__ import annotations

import logging
import time
import uuid

from starlette.types import ASGIApp, Message, Receive, Scope, Send

logger = logging.getLogger("jaxserve.access")

_MAX_LENGTH = 256
_QUIET_PATHS = frozenset({"/health", "/ready", "/metrics"})


class RequestId:
    """Puts an id into the scope's state and on the response. At log level debug, also logs one line per request."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        request_id = _client_request_id(scope) or uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = request_id
        header = (b"x-request-id", request_id.encode())
        started = time.perf_counter()
        status = 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), header]
            await send(message)

        await self.app(scope, receive, send_with_id)
        if logger.isEnabledFor(logging.DEBUG) and scope["path"] not in _QUIET_PATHS:
            elapsed = time.perf_counter() - started
            logger.debug("%s %s %d %.3f s %s", scope["method"], scope["path"], status, elapsed, request_id)


def _client_request_id(scope: Scope) -> str | None:
    for name, value in scope["headers"]:
        if name == b"x-request-id" and 0 < len(value) <= _MAX_LENGTH and all(32 < byte < 127 for byte in value):
            text: str = value.decode("ascii")
            return text
    return None
