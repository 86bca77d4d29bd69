"""The mapping of our error tree to HTTP, in OpenAI's nested form.

Owns status codes, error types and the shape of an error body. Never decides whether something is an error, and never
touches the engine.
"""

from __future__ import annotations

import logging
from typing import Any

import msgspec
from starlette.exceptions import HTTPException

from jaxserve.errors import (
    ContextLengthError,
    EngineDeadError,
    EngineUnresponsiveError,
    InvalidRequestError,
    JaxserveError,
    QueueFullError,
    RequestFailedError,
)

logger = logging.getLogger("jaxserve.server")

# The routes whose errors have Anthropic's form, and its types of errors by status.
MESSAGES_PATH = "/v1/messages"
_MESSAGES_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


class HttpError(JaxserveError):
    """A response other than 200: its `status` and the fields of OpenAI's error object."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: tuple[tuple[bytes, bytes], ...] = (),
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.type = type
        self.param = param
        self.code = code
        self.headers = headers

    def body(self) -> dict[str, Any]:
        """Return the JSON object sent to a client, as a response or as an event of a stream."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    def messages_body(self) -> dict[str, Any]:
        """Return the object that Anthropic's clients expect."""
        kind = _MESSAGES_TYPES.get(self.status, "api_error" if self.status >= 499 else "invalid_request_error")
        return {"type": "error", "error": {"type": kind, "message": self.message}}

    def encode(self, path: str = "") -> bytes:
        """Return the JSON for a client of the route `path`."""
        return msgspec.json.encode(self.messages_body() if path.startswith(MESSAGES_PATH) else self.body())


class UnavailableError(JaxserveError):
    """The server can't take requests now: it is starting, shutting down, or waiting for its engine."""


def unknown_model(name: str, served: str) -> HttpError:
    """Return a 404 for a `model` that this server does not serve."""
    shown = name if len(name) <= 200 else name[:200] + "…"
    return HttpError(
        404,
        f"The model `{shown}` does not exist; this server serves `{served}`",
        param="model",
        code="model_not_found",
    )


def priorities_disabled() -> HttpError:
    """Return SGLang's 503 for a `priority` on a server that has none."""
    return HttpError(
        503,
        "Priorities are disabled on this server (--schedule-policy isn't priority): leave priority out",
        type="server_error",
        param="priority",
        code="priority_disabled",
    )


def body_too_large(limit: int) -> HttpError:
    """Return a 413 for a request body of more than `limit` bytes."""
    return HttpError(
        413,
        f"The request body is larger than {limit} bytes; send less, or start the server with a larger --max-body-bytes",
        code="request_too_large",
        headers=((b"connection", b"close"),),
    )


def unsupported_encoding(encoding: str) -> HttpError:
    """Return a 415 for a request body in this `encoding`."""
    return HttpError(
        415,
        f"The request body's encoding is not supported: {encoding}; send JSON in UTF-8, plain or compressed with gzip",
        code="unsupported_encoding",
        headers=((b"accept-encoding", b"gzip"),),
    )


def cors_is_off() -> HttpError:
    """Return a 405 for a browser's question whether a page of another origin may call a route."""
    return HttpError(
        405,
        "Pages of other origins may not call this server; start it with --allowed-origins and the origins that may",
        code="cors_is_off",
    )


def headers_too_large(limit: int) -> HttpError:
    """Return a 431 for a request whose target and headers have more than `limit` bytes."""
    return HttpError(
        431,
        f"The request's target and headers are larger than {limit} bytes; send less, or start the server with a larger "
        "--max-header-bytes",
        code="headers_too_large",
    )


def request_timed_out(seconds: float) -> HttpError:
    """Return a 408 for a request that is still incomplete after `seconds`."""
    return HttpError(
        408,
        f"The request did not arrive within {seconds:g} s; send it faster, or start the server with a larger "
        "--request-read-timeout",
        code="request_timeout",
    )


def invalid_http() -> HttpError:
    """Return a 400 for bytes that are not HTTP/1.1."""
    return HttpError(400, "This is not a valid HTTP/1.1 request", code="invalid_http")


def invalid_api_key(setting: str) -> HttpError:
    """Return a 401 for a missing or wrong key, which is that of a setting."""
    which = "admin " if setting == "admin_api_key" else ""
    return HttpError(
        401,
        f"Missing or wrong {which}API key: send it as 'Authorization: Bearer KEY' or 'x-api-key: KEY'",
        type="authentication_error",
        code="invalid_api_key",
        headers=((b"www-authenticate", b"Bearer"),),
    )


def request_error(reason: str, *, engine_dead: bool) -> JaxserveError:
    """Return the error for a request whose last event is an ERROR with this `reason`."""
    if engine_dead:
        return EngineDeadError(reason)
    return QueueFullError.from_text(reason) or RequestFailedError(reason)


def to_http_error(error: Exception, traced_id: str | None = None) -> HttpError:
    """Return the response for `error`. An unexpected error becomes a 500 without details; the log gets the details.

    With `traced_id`, the id of the request, the log gets the traceback of any error.
    """
    answer = _answer_to(error)
    if traced_id is not None:
        status = 500 if answer is None else answer.status
        logger.error("request %s is answered with the error %d", traced_id, status, exc_info=error)
    elif answer is None:
        logger.error("unexpected error while serving a request", exc_info=error)
    elif isinstance(error, RequestFailedError):
        logger.error("request failed in the engine: %s", error)
    return answer or HttpError(500, "Internal server error; see the server's log", type="server_error")


def _answer_to(error: Exception) -> HttpError | None:
    """Return the response for an expected error, None for any other."""
    match error:
        case HttpError():
            return error
        case ContextLengthError():
            return HttpError(400, str(error), param=error.param, code="context_length_exceeded")
        case InvalidRequestError():
            return HttpError(400, str(error), param=error.param)
        case QueueFullError():
            seconds = error.retry_after
            return _unavailable(
                f"The server is overloaded: {error}; try again in {seconds} s", "queue_full", retry_after=seconds
            )
        case EngineDeadError():
            return _unavailable(f"The engine has ended: {error}", "engine_dead")
        case EngineUnresponsiveError():
            return _unavailable(f"The engine does not respond: {error}", "engine_unresponsive")
        case UnavailableError():
            return _unavailable(str(error), "unavailable")
        case HTTPException():
            return _from_starlette(error)
        case RequestFailedError():
            return HttpError(500, str(error), type="server_error", code="request_failed")
        case _:
            return None


def _unavailable(message: str, code: str, *, retry_after: int = 1) -> HttpError:
    headers = ((b"retry-after", b"%d" % retry_after),)
    return HttpError(503, message, type="server_error", code=code, headers=headers)


def _from_starlette(error: HTTPException) -> HttpError:
    headers = tuple((name.lower().encode(), value.encode()) for name, value in (error.headers or {}).items())
    if error.status_code == 404:
        return HttpError(404, "No such route; GET /openapi.json lists them", code="not_found", headers=headers)
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "")
        return HttpError(
            405, f"Method not allowed; this route takes {allowed}", code="method_not_allowed", headers=headers
        )
    return HttpError(error.status_code, error.detail, headers=headers)
