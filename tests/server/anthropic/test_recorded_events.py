"""Streams have the order and the keys of events that Anthropic's public documents of the Messages API describe.

The events were written down by hand, in the shapes of those documents, with texts of our own.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from tests.server.anthropic.test_messages import TIME, WEATHER, ask, body, events
from tests.server.conftest import over_asgi
from tests.server.openai.test_tools import CALL, THINKS, writes


def start() -> dict[str, Any]:
    return {
        "type": "message_start",
        "message": {
            "id": "msg_01",
            "type": "message",
            "role": "assistant",
            "content": [],
            "model": "claude",
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {"input_tokens": 25, "output_tokens": 1},
        },
    }


def begins(index: int, **block: Any) -> dict[str, Any]:
    return {"type": "content_block_start", "index": index, "content_block": block}


def piece(index: int, **delta: Any) -> dict[str, Any]:
    return {"type": "content_block_delta", "index": index, "delta": delta}


def stops(index: int) -> dict[str, Any]:
    return {"type": "content_block_stop", "index": index}


def ends(reason: str) -> list[dict[str, Any]]:
    return [
        {
            "type": "message_delta",
            "delta": {"stop_reason": reason, "stop_sequence": None},
            "usage": {"output_tokens": 15},
        },
        {"type": "message_stop"},
    ]


TOOLS = [WEATHER, TIME]
PING = {"type": "ping"}


def text(index: int) -> list[dict[str, Any]]:
    return [
        begins(index, type="text", text=""),
        piece(index, type="text_delta", text="I "),
        piece(index, type="text_delta", text="look."),
        stops(index),
    ]


def thinking(index: int) -> list[dict[str, Any]]:
    return [
        begins(index, type="thinking", thinking="", signature=""),
        piece(index, type="thinking_delta", thinking="H"),
        piece(index, type="thinking_delta", thinking="m."),
        piece(index, type="signature_delta", signature="c2lnbmF0dXJl"),
        stops(index),
    ]


def tool(index: int) -> list[dict[str, Any]]:
    return [
        begins(index, type="tool_use", id="toolu_01", name="weather", input={}),
        piece(index, type="input_json_delta", partial_json=""),
        piece(index, type="input_json_delta", partial_json='{"city": "K'),
        piece(index, type="input_json_delta", partial_json='öln"}'),
        stops(index),
    ]


REASONING = "<think>Hm.</think>\n\n"
RECORDED = {
    "a text": ("I look.", [start(), begins(0, type="text", text=""), PING, *text(0)[1:], *ends("end_turn")]),
    "a call": (CALL, [start(), PING, *tool(0), *ends("tool_use")]),
    "a text and a call": (f"I look.\n{CALL}", [start(), PING, *text(0), *tool(1), *ends("tool_use")]),
    "two calls": (f"{CALL}\n{CALL}", [start(), *tool(0), *tool(1), *ends("tool_use")]),
    "reasoning and a text": (f"{REASONING}I look.", [start(), *thinking(0), *text(1), *ends("end_turn")]),
    "reasoning and a call": (f"{REASONING}{CALL}", [start(), *thinking(0), *tool(1), *ends("tool_use")]),
}


def kinds(events: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    """Return the kinds of events without pings, neighbours of one kind as one."""
    shown = [
        (
            event["type"],
            str(event.get("index")),
            event.get("delta", {}).get("type", ""),
            event.get("content_block", {}).get("type", ""),
            event.get("delta", {}).get("stop_reason", ""),
        )
        for event in events
        if event["type"] != "ping"
    ]
    return [kind for kind, _ in itertools.groupby(shown)]


def has_keys(found: Any, wanted: Any, where: str) -> None:
    """Check that an object has the keys of another one, with values of the same types."""
    if isinstance(wanted, dict):
        assert wanted.keys() <= found.keys(), where
        for name, value in wanted.items():
            has_keys(found[name], value, f"{where}.{name}")
    else:
        assert type(found) is type(wanted), where


@pytest.mark.parametrize("name", RECORDED)
async def test_a_stream_is_as_documented(name: str):
    answer, recorded = RECORDED[name]
    async with over_asgi(template=THINKS, engine=writes(answer)) as server:
        stream = events(await server.http.post("/v1/messages", json=body(stream=True, tools=TOOLS)))
        whole = await ask(server, tools=TOOLS)
    assert kinds(stream) == kinds(recorded)
    by_kind = {kinds([event])[0]: event for event in reversed(stream) if event != PING}
    for event in recorded:
        if event != PING:
            has_keys(by_kind[kinds([event])[0]], event, event["type"])
    has_keys(whole, start()["message"] | {"stop_reason": "end_turn"}, "message")
    for number, block in enumerate(event["content_block"] for event in recorded if "content_block" in event):
        has_keys(whole["content"][number], block, f"content[{number}]")
