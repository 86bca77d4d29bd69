"""The deployment that Serve's proxies send HTTP requests to: it forwards each to the replica that answers it soonest.

A request that has no answer yet when its replica ends is sent to another one. A response that isn't a stream is held
back until it is whole, so that only streams can break off; they end with an event that says so.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from typing import Any, cast

from ray.exceptions import ObjectLostError, RayActorError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError, ReplicaUnavailableError
from ray.serve.handle import DeploymentHandle, DeploymentResponseGenerator
from starlette.routing import Router
from starlette.types import Receive, Scope, Send

from jaxserve.ray.forwarding import ForwardedRequest, Progress, Refusal, ResponseStart, WholeResponse, prompt_text
from jaxserve.ray.metrics import merged
from jaxserve.server.errors import UnavailableError, body_too_large, to_http_error
from jaxserve.server.http.exchange import send_json
from jaxserve.server.http.paths import plain_path
from jaxserve.server.http.sse import error_event

logger = logging.getLogger("ray.serve")

# What is asked of all replicas.
_METRICS = "/metrics"
_FOR_ALL = frozenset({_METRICS, "/flush_cache", "/reset_prefix_cache", "/start_profile", "/stop_profile"})
_ALL_SECONDS = 600.0
# A request may be what ends the replicas to which it is sent.
_MAX_ENDED = 3
# Replicas that refuse requests are replaced as soon as Serve has seen that their engines have ended.
_REFUSED_SECONDS, _RETRY_SECONDS = 60.0, 0.2
_ENDED = (RayActorError, ObjectLostError, ReplicaUnavailableError)


class Ingress:
    """The deployment `ingress`: forwards requests with bodies of up to `max_body_bytes` to the deployment `engine`."""

    def __init__(self, engine: DeploymentHandle[Any], max_body_bytes: int) -> None:
        self._engine = engine
        self._max_body_bytes = max_body_bytes

    async def __serve_build_asgi_app__(self) -> Router:
        """Return the application, which has no routes of its own."""
        return _Forwarder(self._engine, self._max_body_bytes)


class _HungUp(Exception):
    """The client has gone."""


class _Forwarder(Router):
    def __init__(self, engine: DeploymentHandle[Any], max_body_bytes: int) -> None:
        super().__init__()
        self._engine = engine
        self._stream = engine.options(method_name="handle", stream=True)
        self._max_body_bytes = max_body_bytes

    async def app(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Forward one request."""
        if scope["type"] != "http":
            await super().app(scope, receive, send)
            return
        path = scope["path"].removeprefix(scope.get("root_path", "").rstrip("/"))
        response = _ResponseOut(send, path)
        try:
            body = await self._read_body(receive)
            request = ForwardedRequest(
                method=scope["method"],
                path=path,
                query=scope["query_string"],
                headers=[(bytes(name), bytes(value)) for name, value in scope["headers"]],
                body=body,
                client=None if scope.get("client") is None else tuple(scope["client"]),
                prompt=prompt_text(body),
            )
            if plain_path(path) in _FOR_ALL:
                await self._ask_all(request, response)
            else:
                await self._forward(request, response)
        except _HungUp:
            return
        except BackPressureError as error:
            await response.fail(UnavailableError(f"The queue of Ray Serve is full: {error}"))
        except DeploymentUnavailableError as error:
            await response.fail(UnavailableError(f"No replica can be started: {error}"))
        except _ENDED as error:
            await response.fail(UnavailableError(f"A replica has ended: {error.__class__.__name__}"))
        except Exception as error:
            await response.fail(error)

    async def _read_body(self, receive: Receive) -> bytes:
        parts: list[bytes] = []
        size = 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise _HungUp
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            if size > self._max_body_bytes:
                raise body_too_large(self._max_body_bytes)
            if not message.get("more_body", False):
                return b"".join(parts)

    async def _forward(self, request: ForwardedRequest, response: _ResponseOut) -> None:
        """Send the request to replicas until one answers it."""
        num_ended, deadline = 0, time.monotonic() + _REFUSED_SECONDS
        while True:
            refusal = None
            pieces = cast(DeploymentResponseGenerator[Any], self._stream.remote(request))
            try:
                async for piece in pieces:
                    if isinstance(piece, Refusal):
                        refusal = piece
                    else:
                        request.progress.has_begun = True
                        await response.write(piece)
                if refusal is None:
                    await response.finish()
                    return
                reason = refusal.reason
                request = dataclasses.replace(request, tried=request.tried | {refusal.replica}, progress=Progress())
            except _ENDED as error:
                num_ended += 1
                reason = f"The replica has ended: {error.__class__.__name__}"
                if response.has_begun or num_ended == _MAX_ENDED:
                    logger.warning("%s %s ends with its replica: %s", request.method, request.path, error)
                    raise
                response.forget()
                request = dataclasses.replace(request, progress=Progress())
            finally:
                pieces.cancel()  # a hang-up reaches the replica this way
            if time.monotonic() > deadline:
                raise UnavailableError(reason)
            logger.info("%s %s goes to another replica: %s", request.method, request.path, reason)
            await asyncio.sleep(_RETRY_SECONDS)

    async def _ask_all(self, request: ForwardedRequest, response: _ResponseOut) -> None:
        """Send the request to all replicas. Of their answers, one of the highest status counts; metrics are joined."""
        asked = self._engine.broadcast("handle_whole", request)
        answers: list[WholeResponse] = await asked.results_async(timeout_s=_ALL_SECONDS)
        if not answers:
            raise UnavailableError("No replica is ready")
        answer = max(answers, key=lambda one: one.start.status)
        if plain_path(request.path) == _METRICS and answer.start.status == 200:
            body = merged(one.body.decode() for one in answers).encode()
            headers = [(name, value) for name, value in answer.start.headers if name != b"content-length"]
            answer = WholeResponse(dataclasses.replace(answer.start, headers=headers), body)
        await response.write(answer.start)
        await response.write(answer.body)
        await response.finish()


class _ResponseOut:
    """A response to a client of the route `path`. Unless it is a stream, nothing is sent before it is whole."""

    def __init__(self, send: Send, path: str) -> None:
        self._send = send
        self._path = path
        self._start: ResponseStart | None = None
        self._parts: list[bytes] = []
        self.has_begun = False

    async def write(self, piece: ResponseStart | bytes) -> None:
        """Take the next piece."""
        if isinstance(piece, bytes):
            if self.has_begun:
                await self._send({"type": "http.response.body", "body": piece, "more_body": True})
            else:
                self._parts.append(piece)
            return
        self._start = piece
        kind = next((value for name, value in piece.headers if name == b"content-type"), b"")
        if kind.startswith(b"text/event-stream"):
            await self._begin()

    async def finish(self, last: bytes = b"") -> None:
        """Send what is left."""
        if not self.has_begun:
            await self._begin()
        body = b"".join((*self._parts, last))
        await self._send({"type": "http.response.body", "body": body, "more_body": False})

    async def fail(self, error: Exception) -> None:
        """Answer with an error, or end a stream with it."""
        answer = to_http_error(error)
        if self.has_begun:
            await self.finish(error_event(answer, self._path))
        else:
            await send_json(self._send, answer.status, answer.encode(self._path), answer.headers)

    def forget(self) -> None:
        """Drop what was taken, as another replica answers."""
        assert not self.has_begun
        self._start, self._parts = None, []

    async def _begin(self) -> None:
        assert self._start is not None
        self.has_begun = True
        # Serve's proxy adds the id that it has put on the request
        headers = [(name, value) for name, value in self._start.headers if name != b"x-request-id"]
        headers.append((b"x-replica-id", self._start.replica.encode()))
        await self._send({"type": "http.response.start", "status": self._start.status, "headers": headers})
