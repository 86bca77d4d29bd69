"""What crosses between the ingress and a replica: prompts by which requests are routed, and responses in pieces."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from starlette.types import Message, Receive, Scope, Send

from jaxserve.ray.forwarding import ForwardedRequest, Refusal, ResponsePiece, ResponseStart, prompt_text, respond

CHAT = {"model": "m", "messages": [{"role": "system", "content": "Be brief."}], "temperature": 0.5}
REQUEST = ForwardedRequest("POST", "/v1/chat/completions", b"a=1", [(b"x", b"y")], b"body", ("10.0.0.1", 7))
HEADERS = [(b"content-type", b"text/plain")]


def text_of(**body: Any) -> str:
    return prompt_text(json.dumps(body).encode())


@pytest.mark.parametrize(
    "prompt",
    [
        {"messages": [{"role": "user", "content": "common"}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "common"}]}], "system": "common"},
        {"tools": [{"type": "function", "function": {"name": "common"}}], "messages": []},
        {"prompt": "common"},
        {"prompt": ["common", "other"]},
        {"prompt": [1, 2, 3]},
        {"input": "common", "instructions": "common"},
        {"input": [{"role": "user", "content": "common"}], "previous_response_id": "resp_1"},
        {"input_ids": [[1, 2], [3]]},
        {"text": "common", "sampling_params": {"max_new_tokens": 1}},
    ],
)
def test_what_a_prompt_is_made_of_is_found_in_the_bodies_of_all_routes(prompt: dict[str, Any]) -> None:
    text = text_of(**prompt)
    assert all(json.dumps(value) in text for name, value in prompt.items() if name != "sampling_params")
    assert text_of(model="m", temperature=0.1, **prompt, stream=True) == text, "nothing else is part of it"


def test_prompts_begin_alike_if_the_model_reads_them_so() -> None:
    turn = {"role": "user", "content": "common beginning"}
    one = text_of(messages=[turn, {"role": "user", "content": "one"}], tools=[{"name": "t"}])
    other = text_of(tools=[{"name": "t"}], max_tokens=3, messages=[turn, {"role": "user", "content": "other"}])
    common = text_of(messages=[turn], tools=[{"name": "t"}]).removesuffix("]")
    assert one.startswith(common)
    assert other.startswith(common)
    assert not text_of(messages=[turn], tools=[{"name": "u"}]).startswith(common), "tools come first"


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b"null", b"1", b'"prompt"', b"\xff\xfe", b'{"prompt": "\xff"}', b"--boundary", b"[" * 10**5],
)
def test_no_other_body_is_refused_here(body: bytes) -> None:
    assert isinstance(prompt_text(body), str)


def test_only_json_objects_have_a_prompt() -> None:
    assert [prompt_text(body) for body in (b"", b"{", b"[]", b"null", b"prompt=a")] == [""] * 5


class App:
    """An application that answers with what the test tells it to send, and then ends or raises."""

    def __init__(self) -> None:
        self.messages: asyncio.Queue[Message | Exception | None] = asyncio.Queue()
        self.received: list[Message] = []
        self.scope: Scope = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.scope = scope
        self.received.append(await receive())
        listening = asyncio.ensure_future(receive())
        telling = asyncio.ensure_future(self.messages.get())
        while True:
            await asyncio.wait((listening, telling), return_when=asyncio.FIRST_COMPLETED)
            if listening.done():
                self.received.append(listening.result())
                telling.cancel()
                return
            message = telling.result()
            if not isinstance(message, dict):
                listening.cancel()
                if message is not None:
                    raise message
                return
            await send(message)
            telling = asyncio.ensure_future(self.messages.get())

    def tell(self, *messages: Message | Exception | None) -> None:
        for message in messages:
            self.messages.put_nowait(message)


def start(status: int = 200) -> Message:
    return {"type": "http.response.start", "status": status, "headers": HEADERS}


def body(text: bytes) -> Message:
    return {"type": "http.response.body", "body": text, "more_body": True}


def answer_of(app: App, status_refused: int = 600) -> AsyncIterator[ResponsePiece]:
    def refusal(status: int) -> str | None:
        return f"{status} is refused" if status >= status_refused else None

    return respond(app, REQUEST, "r1", refusal)


async def test_the_application_gets_the_request_as_it_was() -> None:
    app = App()
    app.tell(start(), body(b"a"), None)
    assert [piece async for piece in answer_of(app)] == [ResponseStart(200, HEADERS, "r1"), b"a"]
    assert app.received == [{"type": "http.request", "body": b"body", "more_body": False}]
    expected = {"method": "POST", "path": "/v1/chat/completions", "query_string": b"a=1", "headers": [(b"x", b"y")],
                "client": ("10.0.0.1", 7), "type": "http"}  # fmt: skip
    assert expected.items() <= app.scope.items()


async def test_a_response_comes_while_it_is_written_and_what_waited_comes_together() -> None:
    app = App()
    pieces = answer_of(app)
    app.tell(start())
    assert await anext(pieces) == ResponseStart(200, HEADERS, "r1")
    app.tell(body(b"a"))
    assert await anext(pieces) == b"a"
    app.tell(body(b"b"), body(b""), body(b"c"), None)
    rest = [piece async for piece in pieces]
    assert b"".join(piece for piece in rest if isinstance(piece, bytes)) == b"bc"


async def test_pieces_that_are_there_at_once_are_one() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        for message in (start(), body(b"a"), body(b"b"), body(b"c")):
            await send(message)

    pieces = [piece async for piece in respond(app, REQUEST, "r1", lambda status: None)]
    assert pieces == [ResponseStart(200, HEADERS, "r1"), b"abc"]


async def test_an_empty_response_has_a_start() -> None:
    app = App()
    app.tell(start(204), None)
    assert [piece async for piece in answer_of(app)] == [ResponseStart(204, HEADERS, "r1")]


@pytest.mark.parametrize("begun", [False, True])
async def test_a_hang_up_reaches_the_application(begun: bool) -> None:
    app = App()
    pieces = answer_of(app)
    if begun:
        app.tell(start())
        await anext(pieces)
        await pieces.aclose()  # type: ignore[attr-defined]
    else:
        waiting = asyncio.ensure_future(anext(pieces))
        while not app.received:
            await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
    assert app.received[-1] == {"type": "http.disconnect"}


@pytest.mark.parametrize("before", [(), (start(), body(b"a"))], ids=["at once", "in its response"])
async def test_an_error_of_the_application_is_raised_after_what_it_sent(before: tuple[Message, ...]) -> None:
    app = App()
    app.tell(*before, ValueError("broken"))
    pieces = answer_of(app)
    came = [await anext(pieces) for _ in before]
    with pytest.raises(ValueError, match="broken"):
        await anext(pieces)
    assert came == [ResponseStart(200, HEADERS, "r1"), b"a"][: len(before)]


async def test_a_refusal_takes_the_place_of_a_status_that_is_refused() -> None:
    app = App()
    app.tell(start(503), body(b"shutting down"))
    assert [piece async for piece in answer_of(app, 500)] == [Refusal("r1", "503 is refused")]
    assert app.received[-1] == {"type": "http.disconnect"}
    for status in (200, 404):
        app = App()
        app.tell(start(status), None)
        assert [piece async for piece in answer_of(app, 500)] == [ResponseStart(status, HEADERS, "r1")]
