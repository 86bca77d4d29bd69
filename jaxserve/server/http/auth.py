"""Checks the keys of requests. Owns the lists of paths that need none, and of those that need the administrator's;
knows no other route."""

from __future__ import annotations

import hmac

from starlette.types import ASGIApp, Receive, Scope, Send

from jaxserve.config.server_schema import ServerConfig
from jaxserve.server.errors import invalid_api_key
from jaxserve.server.http.exchange import HttpExchange
from jaxserve.server.http.paths import plain_path

PATHS_WITHOUT_KEY = frozenset({"/health", "/ping", "/ready", "/metrics"})

# The routes that change the server for everyone, which are SGLang's of this kind.
ADMIN_PATHS = frozenset({"/flush_cache", "/reset_prefix_cache", "/abort_request", "/start_profile", "/stop_profile"})


def key_of(path: str, config: ServerConfig) -> str | None:
    """Return the key that requests of a path must have, or None."""
    if path in PATHS_WITHOUT_KEY:
        return None
    if config.admin_api_key is not None and plain_path(path) in ADMIN_PATHS:
        return config.admin_api_key
    return config.api_key


class BearerAuth:
    """Answers 401 unless the request has the key of its path."""

    def __init__(self, app: ASGIApp, config: ServerConfig) -> None:
        self.app = app
        self._config = config

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            key = key_of(scope["path"], self._config)
            if key is not None and not hmac.compare_digest(_given_key(scope), key.encode()):
                await HttpExchange(scope, receive, send).respond_error(
                    invalid_api_key("admin_api_key" if key is self._config.admin_api_key else "api_key")
                )
                return
        await self.app(scope, receive, send)


def _given_key(scope: Scope) -> bytes:
    given = b""
    for name, value in scope["headers"]:
        if name == b"authorization":
            scheme, _, key = value.partition(b" ")
            if scheme.lower() == b"bearer":
                given = key.strip()
        elif name == b"x-api-key":  # Anthropic's clients
            given = given or value.strip()
    return given
