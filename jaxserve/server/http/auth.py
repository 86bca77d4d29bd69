"""The bearer key. Owns the list of routes that need none; knows nothing else of what it guards."""

from __future__ import annotations

import hmac

from starlette.types import ASGIApp, Receive, Scope, Send

from jaxserve.server.errors import wrong_api_key
from jaxserve.server.http.bodies import Exchange

OPEN_PATHS = frozenset({"/health", "/ready", "/metrics"})


class BearerAuth:
    """Answers 401 unless the request brings the key. Probes and scrapers (`OPEN_PATHS`) need none."""

    def __init__(self, app: ASGIApp, api_key: str) -> None:
        self.app = app
        self._expected = api_key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS and not self._allowed(scope):
            await Exchange(scope, receive, send).fail(wrong_api_key())
            return
        await self.app(scope, receive, send)

    def _allowed(self, scope: Scope) -> bool:
        given = b""
        for name, value in scope["headers"]:
            if name == b"authorization":
                scheme, _, key = value.partition(b" ")
                if scheme.lower() == b"bearer":
                    given = key.strip()
        return hmac.compare_digest(given, self._expected)
