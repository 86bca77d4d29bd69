"""Streams have the order and the keys of events that OpenAI's public documents of the Responses API describe.

The events were written down by hand, in the shapes of these documents, with texts of our own:
https://developers.openai.com/api/reference/resources/responses/streaming-events (an example of each event),
https://platform.openai.com/docs/api-reference/responses/create (the stream of a text),
https://developers.openai.com/api/docs/guides/function-calling#streaming (the streams of calls),
https://github.com/Oaklight/llm-rosetta/issues/182 (the stream of a custom call, as OpenAI sent it).
"""

from __future__ import annotations

import asyncio
import itertools
import json
from typing import Any

import httpx
import pytest
from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter

from tests.server.anthropic.test_recorded_events import has_keys
from tests.server.conftest import ServerUnderTest, over_asgi
from tests.server.openai.test_tools import CALL, SCHEMA, THINKS, writes

TYPES: TypeAdapter[ResponseStreamEvent] = TypeAdapter(ResponseStreamEvent)
TOOLS = [{"type": "function", "name": "weather", "parameters": SCHEMA}, {"type": "custom", "name": "shell"}]
RESPONSE = {
    "id": "resp_1",
    "object": "response",
    "created_at": 1741290958,
    "status": "in_progress",
    "error": None,
    "incomplete_details": None,
    "instructions": None,
    "max_output_tokens": None,
    "model": "m",
    "output": [],
    "parallel_tool_calls": True,
    "previous_response_id": None,
    "reasoning": {"effort": None, "summary": None},
    "store": True,
    "temperature": 1.0,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "top_p": 1.0,
    "truncation": "disabled",
    "usage": None,
    "user": None,
    "metadata": {},
}
USAGE = {
    "input_tokens": 37,
    "input_tokens_details": {"cached_tokens": 0},
    "output_tokens": 11,
    "output_tokens_details": {"reasoning_tokens": 0},
    "total_tokens": 48,
}


def event(name: str, /, **fields: Any) -> dict[str, Any]:
    return {"type": f"response.{name}", **fields, "sequence_number": 1}


def starts() -> list[dict[str, Any]]:
    return [event("created", response=RESPONSE), event("in_progress", response=RESPONSE)]


def ends(name: str = "completed", /, **fields: Any) -> dict[str, Any]:
    return event(name, response=RESPONSE | {"status": name, "usage": USAGE} | fields)


def item(at: int, begun: dict[str, Any], done: dict[str, Any], *inner: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the events of an item at a place of the output."""
    inside = [{**one, "item_id": "item_1", "output_index": at} for one in inner]
    item = begun | {"id": "item_1"}
    return [
        event("output_item.added", output_index=at, item=item | {"status": "in_progress"}),
        *inside,
        event("output_item.done", output_index=at, item=item | done),
    ]


def text(at: int, *pieces: str, status: str = "completed") -> list[dict[str, Any]]:
    part = {"type": "output_text", "text": "", "annotations": []}
    return item(
        at,
        {"type": "message", "role": "assistant", "content": []},
        {"status": status, "content": [part]},
        event("content_part.added", content_index=0, part=part),
        *(event("output_text.delta", content_index=0, delta=piece, logprobs=[]) for piece in pieces),
        event("output_text.done", content_index=0, text="I look.", logprobs=[]),
        event("content_part.done", content_index=0, part=part),
    )


def reasoning(at: int) -> list[dict[str, Any]]:
    part = {"type": "reasoning_text", "text": ""}
    return item(
        at,
        {"type": "reasoning", "summary": [], "content": []},
        {"status": "completed", "content": [part]},
        event("content_part.added", content_index=0, part=part),
        event("reasoning_text.delta", content_index=0, delta="Hm"),
        event("reasoning_text.delta", content_index=0, delta="."),
        event("reasoning_text.done", content_index=0, text="Hm."),
        event("content_part.done", content_index=0, part=part),
    )


def summary(at: int) -> list[dict[str, Any]]:
    part = {"type": "summary_text", "text": ""}
    return item(
        at,
        {"type": "reasoning", "summary": []},
        {"status": "completed", "summary": [part]},
        event("reasoning_summary_part.added", summary_index=0, part=part),
        event("reasoning_summary_text.delta", summary_index=0, delta="Hm"),
        event("reasoning_summary_text.delta", summary_index=0, delta="."),
        event("reasoning_summary_text.done", summary_index=0, text="Hm."),
        event("reasoning_summary_part.done", summary_index=0, part=part),
    )


def call(at: int) -> list[dict[str, Any]]:
    return item(
        at,
        {"type": "function_call", "call_id": "call_1", "name": "weather", "arguments": ""},
        {"status": "completed", "arguments": '{"city":"Köln"}'},
        event("function_call_arguments.delta", delta='{"city"'),
        event("function_call_arguments.delta", delta=':"Köln"}'),
        event("function_call_arguments.done", name="weather", arguments='{"city":"Köln"}'),
    )


def custom(at: int) -> list[dict[str, Any]]:
    return item(
        at,
        {"type": "custom_tool_call", "call_id": "call_1", "name": "shell", "input": ""},
        {"status": "completed", "input": "ls\n"},
        event("custom_tool_call_input.delta", delta="ls"),
        event("custom_tool_call_input.delta", delta="\n"),
        event("custom_tool_call_input.done", input="ls\n"),
    )


CUSTOM = '<tool_call>\n{"name": "shell", "arguments": {"input": "ls\\n"}}\n</tool_call>'
HM = "<think>Hm.</think>\n\n"
SHORT: dict[str, Any] = {"max_output_tokens": 4}
CUT = {"incomplete_details": {"reason": "max_output_tokens"}}
SUMMARY: dict[str, Any] = {"reasoning": {"summary": "auto"}}
RECORDED: dict[str, tuple[str, dict[str, Any], list[dict[str, Any]]]] = {
    "a text": ("I look.", {}, [*text(0, "I ", "look."), ends()]),
    "reasoning and a text": (f"{HM}I look.", {}, [*reasoning(0), *text(1, "I ", "look."), ends()]),
    "a summary and a text": (f"{HM}I look.", SUMMARY, [*summary(0), *text(1, "I ", "look."), ends()]),
    "a summary and a call": (f"{HM}{CALL}", SUMMARY, [*summary(0), *call(1), ends()]),
    "a call": (CALL, {}, [*call(0), ends()]),
    "two calls": (f"{CALL}\n{CALL}", {}, [*call(0), *call(1), ends()]),
    "a custom call": (CUSTOM, {}, [*custom(0), ends()]),
    "a text and calls": (
        f"I look.\n{CUSTOM}\n{CALL}",
        {},
        [*text(0, "I ", "look."), *custom(1), *call(2), ends()],
    ),
    "a text that was cut": ("I look.", SHORT, [*text(0, "I lo", status="incomplete"), ends("incomplete", **CUT)]),
    "an empty answer": ("", {}, [*text(0), ends()]),
}


def body(**fields: Any) -> dict[str, Any]:
    return {"input": "hello", "tools": TOOLS, "temperature": 0} | fields


def events(response: httpx.Response) -> list[dict[str, Any]]:
    """Return the events of a stream, whose names are their types and whose numbers have no gaps.

    OpenAI's client has a type for each of them.
    """
    assert response.headers["content-type"].startswith("text/event-stream")
    found = []
    for number, block in enumerate(response.text.strip().split("\n\n")):
        name, _, data = block.partition("\ndata: ")
        found.append(json.loads(data))
        assert name == f"event: {found[-1]['type']}"
        assert found[-1]["sequence_number"] == number
        TYPES.validate_json(data)
    return found


def kinds(events: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    """Return the kinds of events, neighbours of one kind as one."""
    shown = [
        (
            event["type"],
            str(event.get("output_index")),
            event.get("item", event.get("part", {})).get("type", ""),
            event.get("response", event.get("item", {})).get("status", ""),
        )
        for event in events
    ]
    return [kind for kind, _ in itertools.groupby(shown)]


def plain(value: Any) -> Any:
    """Return a value without what differs between two answers of the same text: ids and times."""
    if isinstance(value, list):
        return [plain(one) for one in value]
    if isinstance(value, dict):
        return {name: plain(one) for name, one in value.items() if not name.endswith(("id", "_at"))}
    return value


def check_items(stream: list[dict[str, Any]]) -> None:
    """Check that the last event has the items, that each has its id throughout, and that its pieces are its text."""
    done = [event["item"] for event in stream if event["type"] == "response.output_item.done"]
    begun = [event["item"] for event in stream if event["type"] == "response.output_item.added"]
    assert stream[-1]["response"]["output"] == done
    assert [one["id"] for one in begun] == [one["id"] for one in done]
    for at, item in enumerate(done):
        inside = [event for event in stream if event.get("output_index") == at and "item_id" in event]
        assert {event["item_id"] for event in inside} <= {item["id"]}
        written = "".join(event["delta"] for event in inside if "delta" in event)
        [part] = [*item.get("content", ()), *item.get("summary", ())] or [item]
        [name] = part.keys() & {"text", "arguments", "input"}
        assert written == part[name]
        assert [event[name] for event in inside if name in event] == [part[name]]


@pytest.mark.parametrize("name", RECORDED)
async def test_a_stream_is_as_documented(name: str):
    answer, fields, recorded = RECORDED[name]
    recorded = [*starts(), *recorded]
    async with over_asgi(template=THINKS, engine=writes(answer)) as server:
        stream = events(await server.http.post("/v1/responses", json=body(stream=True, **fields)))
        whole = (await server.http.post("/v1/responses", json=body(**fields))).json()
    assert kinds(stream) == kinds(recorded)
    by_kind = {kinds([event])[0]: event for event in reversed(stream)}
    for event in recorded:
        if "response" in event:
            event["response"] = event["response"] | fields
        found = by_kind[kinds([event])[0]]
        assert found.keys() == event.keys()
        has_keys(found, event, event["type"])
    check_items(stream)
    assert plain(whole) == plain(stream[-1]["response"])


async def begun(server: ServerUnderTest, num_steps: int) -> asyncio.Task[httpx.Response]:
    """Return a stream of which some tokens have come."""
    server.engine.hold()
    task = asyncio.create_task(server.http.post("/v1/responses", json=body(stream=True), headers={"x-request-id": "1"}))
    await server.engine.wait_for(lambda: len(server.engine.submitted) == 1)
    for _ in range(num_steps):
        await server.engine.step()
    return task


async def test_a_stream_that_fails():
    async with over_asgi(template=THINKS, engine=writes("I look.")) as server:
        task = await begun(server, 4)
        server.engine.fail(server.engine.submitted[0].request_id, "page fault")
        stream = events(await task)
        kept = await server.http.get("/v1/responses/resp_1")
    assert kinds(stream) == kinds([*starts(), *text(0, "I look.")[:3], ends("failed")])
    failed = stream[-1]["response"]
    has_keys(failed, RESPONSE | {"error": {"code": "server_error", "message": ""}}, "response")
    assert failed["error"]["code"] == "server_error"
    assert "page fault" in failed["error"]["message"]
    assert failed["output"][0]["content"][0]["text"] == "I lo"
    assert kept.json() == failed


async def test_a_stream_that_is_cancelled():
    """OpenAI has no event of its own for it: the response says so."""
    async with over_asgi(template=THINKS, engine=writes("I look.")) as server:
        task = await begun(server, 4)
        cancelled = await server.http.post("/v1/responses/resp_1/cancel")
        stream = events(await task)
    wanted = [*starts(), *text(0, "I lo", status="incomplete"), ends("incomplete", status="cancelled")]
    assert kinds(stream) == kinds(wanted)
    check_items(stream)
    last = stream[-1]["response"]
    assert last["output"][0]["content"][0]["text"] == "I lo"
    assert cancelled.json()["status"] == "cancelled"
    assert plain(cancelled.json()["output"]) == plain(last["output"])
