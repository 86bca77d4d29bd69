"""A shape that is no API's, to see what the responder itself promises: one opening per choice, and one end."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from jaxserve.api_types import SamplingParams
from jaxserve.server.errors import HttpError
from jaxserve.server.generation.answers import AnswerPart
from jaxserve.server.generation.engine_requests import engine_requests
from jaxserve.server.generation.responder import ResponseChoice, ResponseShape, TotalUsage, respond
from jaxserve.server.http.exchange import HttpExchange
from jaxserve.text.output import OutputDelta
from tests.server.conftest import make_state


class PlainShape(ResponseShape):
    """Events are lines: what they are, and the number of the choice."""

    def opening(self, choice: ResponseChoice) -> bytes:
        return b"open %d\n" % choice.index

    def event(self, choice: ResponseChoice, delta: OutputDelta, parts: Sequence[AnswerPart]) -> bytes:
        return b"text %d %s\n" % (choice.index, delta.text.encode()) if delta.text else b""

    def last_events(self, usage: TotalUsage) -> bytes:
        return b"end %d + %d\n" % usage[:2]

    def error_event(self, error: HttpError) -> bytes:
        return b"error %d\n" % error.status

    def body(self, choices: Sequence[ResponseChoice], usage: TotalUsage) -> Any:
        return [[choice.output.text for choice in choices], usage[:2]]


async def answer(*, stream: bool, fails: bool = False) -> list[str]:
    """Return the lines of a response to two samples of a prompt of one token; it fails after the first step."""
    state, engine = make_state()
    loaded = state.require_loaded()
    sent: list[bytes] = []

    async def send(message: Any) -> None:
        sent.append(message.get("body", b""))

    async def receive() -> Any:
        raise AssertionError("nothing is read")

    exchange = HttpExchange({"type": "http", "headers": [], "state": {"request_id": "r"}}, receive, send)
    requests = engine_requests(loaded, "r", [[104]], [SamplingParams(max_tokens=2, n=2)], [""])
    engine.hold()
    running = asyncio.create_task(respond(state, loaded, exchange, requests, PlainShape(), stream=stream, ids=()))
    await engine.wait_for(lambda: engine.num_running == 2)
    await engine.step()
    if fails:
        engine.fail(requests[1].request_id, "out of pages")
    engine.release()
    await running
    await engine.shutdown()
    return b"".join(sent).decode().splitlines()


async def test_each_choice_is_opened_once_and_the_stream_ends_once():
    lines = await answer(stream=True)
    assert lines[-1] == "end 1 + 4"
    for index, text in enumerate(("ab", "bc")):
        own = [line for line in lines[:-1] if line.split()[1] == str(index)]
        assert own == [f"open {index}", *(f"text {index} {letter}" for letter in text)]


async def test_the_whole_is_what_a_stream_has():
    assert await answer(stream=False) == ['[["ab","bc"],[1,4]]']


async def test_after_an_error_the_stream_ends_with_its_event():
    lines = await answer(stream=True, fails=True)
    assert lines[-1] == "error 500"
    assert not [line for line in lines if line.startswith("end")]
