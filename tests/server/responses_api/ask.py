"""Asks `/v1/responses`, whole and streamed, and checks that both say the same."""

from __future__ import annotations

import json
from typing import Any

import httpx

from tests.server.conftest import ServerUnderTest
from tests.server.openai.test_tools import SCHEMA
from tests.server.tiny import tiny_tokenizer

PATH = "/v1/responses"
WEATHER = {"type": "function", "name": "weather", "description": "Says it.", "parameters": SCHEMA, "strict": False}
TIME = {"type": "function", "name": "time", "parameters": None, "strict": None}


async def ask(server: ServerUnderTest, status: int = 200, **fields: Any) -> dict[str, Any]:
    """Return the response to a request, or its error."""
    answer = await server.http.post(PATH, json={"input": "hello", "temperature": 0} | fields)
    assert answer.status_code == status, answer.text
    found: dict[str, Any] = answer.json()
    return found if status == 200 else found["error"]


async def stream(server: ServerUnderTest, **fields: Any) -> list[dict[str, Any]]:
    """Return the events of a stream, whose numbers and names were checked."""
    answer = await server.http.post(PATH, json={"input": "hello", "temperature": 0, "stream": True} | fields)
    assert answer.status_code == 200, answer.text
    return events_of(answer)


def events_of(answer: httpx.Response) -> list[dict[str, Any]]:
    """Return the events of an answer."""
    assert answer.headers["content-type"].startswith("text/event-stream")
    found = []
    for text in answer.text.split("\n\n")[:-1]:
        name, data = text.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    return found


async def ask_both_ways(server: ServerUnderTest, **fields: Any) -> dict[str, Any]:
    """Return a whole response, after checking that a stream gives the same."""
    whole = await ask(server, **fields)
    events = await stream(server, **fields)
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    assert {event["response"]["status"] for event in events[:2]} == {"in_progress"}
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    last = events[-1]["response"]
    assert last["output"] == done
    assert without_names(last) == without_names(whole)
    return whole


def without_names(response: dict[str, Any]) -> dict[str, Any]:
    """Return a response without what differs from one to the next: ids and times."""
    left_out = ("id", "call_id", "created_at", "completed_at")
    kept = {name: value for name, value in response.items() if name not in left_out}
    items = [{name: value for name, value in item.items() if name not in left_out} for item in response["output"]]
    return kept | {"output": items}


def prompt_of(server: ServerUnderTest, number: int = -1) -> str:
    """Return the prompt of a request."""
    return tiny_tokenizer().decode(server.engine.submitted[number].prompt_ids)
