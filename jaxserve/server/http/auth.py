"""Checks the key of requests. Owns the list of paths that need none; knows no other route."""

from __future__ import annotations

import hmac

from starlette.types import ASGIApp, Receive, Scope, Send

from jaxserve.server.errors import invalid_api_key
from jaxserve.server.http.exchange import HttpExchange

PATHS_WITHOUT_KEY = frozenset({"/health", "/ping", "/ready", "/metrics"})


class BearerAuth:
    """Answers 401 unless the request has the key. Probes and metric scrapers (`PATHS_WITHOUT_KEY`) need none."""

    def __init__(self, app: ASGIApp, api_key: str) -> None:
        self.app = app
        self._expected = api_key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in PATHS_WITHOUT_KEY and not self._allowed(scope):
            await HttpExchange(scope, receive, send).respond_error(invalid_api_key())
            return
        await self.app(scope, receive, send)

    def _allowed(self, scope: Scope) -> bool:
        given = b""
        for name, value in scope["headers"]:
            if name == b"authorization":
                scheme, _, key = value.partition(b" ")
                if scheme.lower() == b"bearer":
                    given = key.strip()
            elif name == b"x-api-key":  # Anthropic's clients
                given = given or value.strip()
        return hmac.compare_digest(given, self._expected)
