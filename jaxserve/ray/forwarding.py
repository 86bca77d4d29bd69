"""An HTTP request on its way from the ingress to a replica, and its response on the way back, as they cross processes.

A request goes whole, a response in pieces. Knows plain ASGI, but neither Ray nor a model.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Callable

import msgspec
from starlette.types import ASGIApp, Message, Receive, Scope

# How long an application may take to end a request whose client has gone.
_HANG_UP_SECONDS = 5.0

type Headers = list[tuple[bytes, bytes]]


@dataclasses.dataclass
class Progress:
    """How far a request is, for those who have it in the process of the ingress."""

    has_begun: bool = False


@dataclasses.dataclass(frozen=True)
class ForwardedRequest:
    """A request with its whole body. `prompt` is a text that begins like those of requests whose prompts begin alike.
    `tried` are the replicas that have refused this request. `progress` is kept up to date in the ingress only."""

    method: str
    path: str
    query: bytes
    headers: Headers
    body: bytes
    client: tuple[str, int] | None = None
    prompt: str = ""
    tried: frozenset[str] = frozenset()
    progress: Progress = dataclasses.field(default_factory=Progress)


@dataclasses.dataclass(frozen=True)
class ResponseStart:
    """The first piece of a response: the status, the headers, and the replica that answers."""

    status: int
    headers: Headers
    replica: str


@dataclasses.dataclass(frozen=True)
class Refusal:
    """In place of a response: the replica can't take requests now, or its engine has ended before it answered."""

    replica: str
    reason: str


@dataclasses.dataclass(frozen=True)
class WholeResponse:
    """A response in one piece."""

    start: ResponseStart
    body: bytes


type ResponsePiece = ResponseStart | Refusal | bytes


class _PromptFields(msgspec.Struct):
    """What prompts are made of, in the order in which models read it, as JSON. The names are those of all routes."""

    tools: msgspec.Raw = msgspec.Raw(b"")
    system: msgspec.Raw = msgspec.Raw(b"")
    instructions: msgspec.Raw = msgspec.Raw(b"")
    previous_response_id: msgspec.Raw = msgspec.Raw(b"")
    messages: msgspec.Raw = msgspec.Raw(b"")
    prompt: msgspec.Raw = msgspec.Raw(b"")
    input: msgspec.Raw = msgspec.Raw(b"")
    input_ids: msgspec.Raw = msgspec.Raw(b"")
    text: msgspec.Raw = msgspec.Raw(b"")


_FIELDS = msgspec.json.Decoder(_PromptFields)


def prompt_text(body: bytes) -> str:
    """Return what the prompt in a JSON body is made of, as a text; "" for any other body."""
    try:
        fields = _FIELDS.decode(body)
    except (msgspec.DecodeError, RecursionError):
        return ""
    return b"".join(bytes(field) for field in msgspec.structs.astuple(fields)).decode("utf-8", "replace")


async def respond(
    app: ASGIApp, request: ForwardedRequest, replica: str, refusal: Callable[[int], str | None]
) -> AsyncIterator[ResponsePiece]:
    """Let `app` answer a request, and yield its response: the start, then each time all of the body that there is.

    `refusal` is asked before any status is sent, and may return why there is a refusal instead. To end the iteration
    early is to hang up.
    """
    sent: list[Message] = []
    is_changed, is_gone = asyncio.Event(), asyncio.Event()

    async def send(message: Message) -> None:
        sent.append(message)
        is_changed.set()

    task = asyncio.ensure_future(app(_scope(request), _receiver(request.body, is_gone), send))
    task.add_done_callback(lambda _: is_changed.set())
    try:
        is_started = False
        while not task.done() or sent:
            await is_changed.wait()
            is_changed.clear()
            messages = sent[:]
            sent.clear()
            if not is_started and messages:
                start, *messages = messages
                if (reason := refusal(start["status"])) is not None:
                    yield Refusal(replica, reason)
                    return
                yield ResponseStart(start["status"], list(start["headers"]), replica)
                is_started = True
            if body := b"".join(message.get("body", b"") for message in messages):
                yield body
        task.result()
    finally:
        is_gone.set()
        with contextlib.suppress(Exception):
            await asyncio.wait_for(task, _HANG_UP_SECONDS)


def _receiver(body: bytes, is_gone: asyncio.Event) -> Receive:
    parts = [body]

    async def receive() -> Message:
        if parts:
            return {"type": "http.request", "body": parts.pop(), "more_body": False}
        await is_gone.wait()
        return {"type": "http.disconnect"}

    return receive


def _scope(request: ForwardedRequest) -> Scope:
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": request.method,
        "scheme": "http",
        "path": request.path,
        "raw_path": request.path.encode(),
        "query_string": request.query,
        "root_path": "",
        "headers": request.headers,
        "client": request.client,
        "server": None,
        "state": {},
    }
