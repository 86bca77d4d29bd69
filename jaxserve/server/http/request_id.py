"""Gives every request an id, which is the client's `X-Request-Id` or a new one, and records its answer."""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable
from urllib.parse import quote

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxserve.config.server_schema import ServerConfig
from jaxserve.server.http.paths import is_below

logger = logging.getLogger("jaxserve.access")

_MAX_LENGTH = 256
_QUIET_PATHS = frozenset({"/health", "/ping", "/ready", "/metrics"})


class RequestId:
    """Puts an id into the scope's state and on the response, and records the request once it is answered.

    `record` gets the path of its route ("none" without one), its method, status (0 if none was sent) and seconds. The
    settings say which requests have a line in the log, and how severe it is; probes never have one.
    """

    def __init__(self, app: ASGIApp, record: Callable[[str, str, int, float], None], config: ServerConfig) -> None:
        self.app = app
        self._record = record
        self._without_line = config.access_log_exclude
        self._level = logging.DEBUG if config.log_level_http is None else logging.INFO
        logger.setLevel((config.log_level_http or "notset").upper())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        request_id = _client_request_id(scope) or uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = request_id
        # The second is Anthropic's name
        headers = [(name, request_id.encode()) for name in (b"x-request-id", b"request-id")]
        started = time.perf_counter()
        status = 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), *headers]
            await send(message)

        try:
            await self.app(scope, receive, send_with_id)
        finally:
            if scope["path"] not in _QUIET_PATHS:
                elapsed = time.perf_counter() - started
                self._record(getattr(scope.get("endpoint"), "path", "none"), scope["method"], status, elapsed)
                if logger.isEnabledFor(self._level) and not is_below(scope["path"], self._without_line):
                    path = quote(scope["path"])  # which may have a line break
                    logger.log(self._level, "%s %s %d %.3f s %s", scope["method"], path, status, elapsed, request_id)


def _client_request_id(scope: Scope) -> str | None:
    for name, value in scope["headers"]:
        if name == b"x-request-id" and 0 < len(value) <= _MAX_LENGTH and all(32 < byte < 127 for byte in value):
            text: str = value.decode("ascii")
            return text
    return None
