"""Paths of requests as the routes see them: without the path of a proxy, and without repeated and last slashes."""

from __future__ import annotations

import re

from starlette.types import ASGIApp, Receive, Scope, Send


class RootPath:
    """Removes the path under which a proxy forwards from requests that begin with it. It must be the first one that
    sees them."""

    def __init__(self, app: ASGIApp, root_path: str) -> None:
        self.app = app
        self._root_path = root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and is_below(scope["path"], (self._root_path,)):
            scope["path"] = scope["path"].removeprefix(self._root_path) or "/"
        await self.app(scope, receive, send)


def plain_path(path: str) -> str:
    """Return a path without repeated and last slashes."""
    return re.sub("/+", "/", path).rstrip("/")


def is_below(path: str, parents: tuple[str, ...]) -> bool:
    """Return whether a path is one of these, or below one of them."""
    return any(f"{path}/".startswith(f"{parent.rstrip('/')}/") for parent in parents)
