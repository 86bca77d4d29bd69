"""Anthropic's Messages over HTTP: what the engine is asked for, and what clients get of answers that a rule writes."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
from typing import Any

import httpx
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.server.anthropic.conversation import conversation
from jaxserve.server.anthropic.protocol import CountTokensRequest
from jaxserve.server.generation.message_list import TemplateAbilities
from jaxserve.server.generation.template_facts import shows_later_system
from tests.server.conftest import ServerUnderTest, make_state, over_asgi
from tests.server.fake_engine import QUEUE_FULL
from tests.server.openai.test_tools import CALL, REASONS, SCHEMA, THINKS, writes
from tests.server.test_cached_turns import TEMPLATE as SHOWS_REASONING
from tests.server.tiny import TEMPLATE

HELLO = [{"role": "user", "content": "hello"}]
WEATHER = {"name": "weather", "description": "Says it.", "input_schema": SCHEMA}
TIME = {"name": "time", "input_schema": {"type": "object", "properties": {}}}
LATER = {"name": "later", "input_schema": SCHEMA, "defer_loading": True}


def body(**fields: Any) -> dict[str, Any]:
    return {"messages": HELLO, "max_tokens": 400, "temperature": 0} | fields


async def ask(server: ServerUnderTest, status: int = 200, **fields: Any) -> dict[str, Any]:
    response = await server.http.post("/v1/messages", json=body(**fields))
    assert response.status_code == status, response.text
    return response.json()


def events(response: httpx.Response) -> list[dict[str, Any]]:
    """Return the events of a stream, whose names are their types."""
    assert response.headers["content-type"].startswith("text/event-stream")
    found = []
    for event in response.text.strip().split("\n\n"):
        name, _, data = event.partition("\ndata: ")
        found.append(json.loads(data))
        assert name == f"event: {found[-1]['type']}"
    return found


def assembled(stream: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the message of a stream, put together as clients do, and check the order of its events."""
    start, *rest = [event for event in stream if event["type"] != "ping"]
    assert start["type"] == "message_start"
    message = start["message"]
    assert message["content"] == []
    assert message["stop_reason"] is None
    texts: dict[int, str] = {}
    is_open = False
    for event in rest[:-2]:
        blocks, kind = message["content"], event["type"].removeprefix("content_block_")
        if kind == "start":
            assert not is_open
            assert event["index"] == len(blocks)
            blocks.append(event["content_block"])
            is_open = True
            continue
        assert is_open
        assert event["index"] == len(blocks) - 1
        block = blocks[-1]
        if kind == "stop":
            is_open = False
            if block["type"] == "tool_use":
                block["input"] = arguments(texts.get(event["index"], ""))
            assert block.get("signature", "x")
        else:
            delta = event["delta"]
            name = delta["type"].removesuffix("_delta")
            if name == "input_json":
                texts[event["index"]] = texts.get(event["index"], "") + delta["partial_json"]
            else:
                assert name == "signature" or not block.get("signature")
                block[name] += delta[name]
    assert not is_open
    delta, stop = rest[-2:]
    assert stop == {"type": "message_stop"}
    message["usage"] |= delta["usage"]
    return message | delta["delta"]


def arguments(text: str) -> Any:
    try:
        return json.loads(text or "{}")
    except ValueError:
        return {"INVALID_JSON": text}


def plain(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message without its ids."""
    content = [{name: value for name, value in block.items() if name != "id"} for block in message["content"]]
    return message | {"id": "", "content": content}


async def ask_both_ways(server: ServerUnderTest, **fields: Any) -> dict[str, Any]:
    """Return a whole message, after checking that a stream gives the same."""
    whole = await ask(server, **fields)
    streamed = assembled(events(await server.http.post("/v1/messages", json=body(stream=True, **fields))))
    assert plain(streamed) == plain(whole)
    return whole


async def prompt_of(server: ServerUnderTest, **fields: Any) -> str:
    await ask(server, **{"max_tokens": 0} | fields)
    return bytes(token for token in server.engine.submitted[-1].prompt_ids if token < 256).decode()


async def test_reasoning_text_and_calls_are_blocks_in_their_order():
    text = f"<think>\nI must look.</think>I look.\n{CALL}\n{CALL}"
    async with over_asgi(THINKS, engine=writes(text)) as server:
        message = await ask_both_ways(server, tools=[WEATHER, TIME])
    thinking, said, *calls = message["content"]
    assert (thinking["type"], thinking["thinking"]) == ("thinking", "I must look.")
    assert re.fullmatch("[0-9a-f]{64}", thinking["signature"])
    assert said == {"type": "text", "text": "I look."}
    assert [call["input"] for call in calls] == [{"city": "Köln"}] * 2
    assert all(re.fullmatch("toolu_[0-9a-f]{24}", call["id"]) and call["name"] == "weather" for call in calls)
    assert (message["type"], message["role"], message["model"]) == ("message", "assistant", "tiny")
    assert (message["stop_reason"], message["stop_sequence"]) == ("tool_use", None)
    assert message["usage"]["output_tokens_details"]["thinking_tokens"] == len("<think>\nI must look.</think>")


async def test_omitted_thinking_has_its_signature_only():
    async with over_asgi(THINKS, engine=writes("<think>Hm.</think>Yes.")) as server:
        shown = await ask_both_ways(server, thinking={"type": "adaptive", "display": "summarized"})
        omitted = await ask_both_ways(server, thinking={"type": "enabled", "budget_tokens": 99, "display": "omitted"})
    assert [block.get("thinking") for block in omitted["content"]] == ["", None]
    assert omitted["content"][0]["signature"] == shown["content"][0]["signature"]
    assert omitted["content"][1:] == shown["content"][1:]


@pytest.mark.parametrize(
    ("fields", "reason", "sequence"),
    [
        ({}, "end_turn", None),
        ({"max_tokens": 3}, "max_tokens", None),
        ({"max_tokens": 10**30}, "end_turn", None),
        ({"stop_sequences": ["wor", "x"]}, "stop_sequence", "wor"),
    ],
)
async def test_why_an_answer_ended(fields: dict[str, Any], reason: str, sequence: str | None):
    async with over_asgi(engine=writes("Hello world.")) as server:
        message = await ask_both_ways(server, **fields)
    assert (message["stop_reason"], message["stop_sequence"]) == (reason, sequence)


async def test_an_answer_that_fills_the_context():
    async with over_asgi(engine={"max_model_len": 64}) as server:
        message = await ask_both_ways(server, max_tokens=10**6)
        assert message["stop_reason"] == "model_context_window_exceeded"
        usage = message["usage"]
        assert usage["input_tokens"] + usage["output_tokens"] == 64
        error = await ask(server, 400, messages=[{"role": "user", "content": "x" * 64}])
    assert re.fullmatch(r"prompt is too long: \d+ tokens > 64 maximum", error["error"]["message"])


async def test_an_answer_of_no_tokens_fills_the_cache():
    async with over_asgi() as server:
        message = await ask_both_ways(server, max_tokens=0)
    assert message["content"] == []
    assert message["stop_reason"] == "max_tokens"


async def test_a_call_that_was_cut_off():
    async with over_asgi(engine=writes(CALL)) as server:
        message = await ask_both_ways(server, tools=[WEATHER], tool_choice={"type": "any"}, max_tokens=len(CALL) - 20)
    [block] = message["content"]
    assert block["name"] == "weather"
    assert set(block["input"]) == {"INVALID_JSON"}
    assert message["stop_reason"] == "max_tokens"


async def test_cached_tokens_are_told_apart():
    async with over_asgi(engine={"cached_tokens": 5}) as server:
        usage = (await ask_both_ways(server, max_tokens=2))["usage"]
        count = await server.http.post("/v1/messages/count_tokens", json={"messages": HELLO})
        assert usage["input_tokens"] + 5 == count.json()["input_tokens"]
    assert (usage["cache_read_input_tokens"], usage["cache_creation_input_tokens"]) == (5, 0)


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ({"type": "auto"}, (False, True)),
        ({"type": "any", "disable_parallel_tool_use": True}, (True, False)),
        ({"type": "tool", "name": "weather"}, (True, False)),
        ({"type": "auto", "disable_parallel_tool_use": True}, (False, False)),
        (None, (False, True)),
    ],
)
def test_choices_of_tools(choice: Any, expected: tuple[bool, bool]):
    tools = asked(tools=[WEATHER, TIME], tool_choice=choice).tools
    assert tools is not None
    assert (tools.required, tools.several) == expected
    assert asked(tools=[WEATHER], tool_choice={"type": "none"}).tools is None


def asked(later_system: bool = True, keeps: bool = False, **fields: Any):
    request = msgspec.convert({"messages": HELLO} | fields, CountTokensRequest)
    return conversation(request, TemplateAbilities(later_system), keeps_billing_header=keeps)


def test_messages_become_those_of_a_chat():
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}]},
        {"role": "user", "content": "b"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "s"},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "c", "citations": None},
                {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Rome"}, "caller": None},
                {"type": "tool_use", "id": "t2", "name": "time", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "rain"}]},
                {"type": "tool_result", "tool_use_id": "t2", "content": "no clock", "is_error": True},
                {"type": "tool_result", "tool_use_id": "t3"},
                {"type": "text", "text": "go on"},
            ],
        },
    ]
    call = {"id": "t1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Rome"}}}
    other = {"id": "t2", "type": "function", "function": {"name": "time", "arguments": {}}}
    assert asked(messages=messages, system="s").messages == [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "a\nb"},
        {"role": "assistant", "content": "c", "reasoning_content": "hm", "tool_calls": [call, other]},
        {"role": "tool", "tool_call_id": "t1", "name": "weather", "content": "rain"},
        {"role": "tool", "tool_call_id": "t2", "name": "time", "content": "Error: no clock"},
        {"role": "tool", "tool_call_id": "t3", "content": ""},
        {"role": "user", "content": "go on"},
    ]


def test_a_reminder_beside_a_result_is_no_question():
    def turn(text: str) -> list[dict[str, Any]]:
        call = {"type": "tool_use", "id": "t", "name": "weather", "input": {}}
        parts = [{"type": "tool_result", "tool_use_id": "t", "content": "rain"}, {"type": "text", "text": text}]
        return [*HELLO, {"role": "assistant", "content": [call]}, {"role": "user", "content": parts}]

    reminder = "<system-reminder>Be brief.</system-reminder>"
    assert asked(messages=turn(reminder)).messages[-1]["content"] == f"rain\n\n{reminder}"
    assert asked(messages=turn("And Oslo?")).messages[-1] == {"role": "user", "content": "And Oslo?"}


@pytest.mark.parametrize("form", ["text", "blocks"])
async def test_the_billing_header_is_no_part_of_the_prompt(form: str):
    def system(nonce: str) -> Any:
        header = f"x-anthropic-billing-header: cc_version=2.1; cch={nonce};"
        if form == "text":
            return f"{header}\nBe brief."
        return [{"type": "text", "text": header}, {"type": "text", "text": "Be brief."}]

    async with over_asgi() as server:
        one, two = [await prompt_of(server, system=system(nonce)) for nonce in ("ab", "cd")]
        assert one == two == await prompt_of(server, system="Be brief.")
        assert await prompt_of(server, system="x-anthropic-billing-header: cch=1") == await prompt_of(server)
    async with over_asgi(keep_billing_header=True) as server:
        assert "cch=ab" in await prompt_of(server, system=system("ab"))


async def test_what_comes_in_the_middle_is_rendered_there():
    """A later turn begins with the prompt of the one before, whatever tools came and went between."""
    turns: list[dict[str, Any]] = [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "1"},
        {"role": "user", "content": "two"},
        {
            "role": "system",
            "content": [
                {"type": "text", "text": "Now shout."},
                {"type": "tool_addition", "tool": {"type": "tool_reference", "name": "later"}},
                {"type": "tool_removal", "tool": {"type": "tool_reference", "name": "time"}},
            ],
        },
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": [
            {"type": "tool_reference", "tool_name": "second"}]}]},
    ]  # fmt: skip
    tools = [WEATHER, TIME, LATER, LATER | {"name": "second"}]
    async with over_asgi(THINKS, engine={"max_model_len": 2048}) as server:
        prompts = [
            (await prompt_of(server, messages=turns[:count], tools=tools)).removesuffix("assistant: ")
            for count in (1, 3, 4, 6)
        ]
        assert server.engine.submitted
    shown = [prompt.partition("[{")[0] for prompt in prompts]
    for before, after in itertools.pairwise(shown):
        assert after.startswith(before)
    assert "Now shout." in shown[2]
    assert '"name":"later"' in shown[2]
    assert '"name":"second"' in shown[3]
    lists = {prompt.partition("[{")[2] for prompt in prompts}
    assert len(lists) == 1
    assert "later" not in lists.pop()
    assert list(asked(messages=turns[:1], tools=tools).tools.schemas) == ["weather", "time"]
    assert list(asked(messages=turns, tools=tools).tools.schemas) == ["weather", "later", "second"]


async def test_tools_stay_where_none_may_be_called():
    """The prompt begins alike, but what looks like a call is text."""
    gone = {
        "role": "system",
        "content": [{"type": "tool_removal", "tool": {"type": "tool_reference", "name": "weather"}}],
    }
    async with over_asgi(THINKS, engine=writes(CALL)) as server:
        messages = []
        for fields in ({}, {"tool_choice": {"type": "none"}}, {"messages": [*HELLO, gone]}):
            messages.append(await ask_both_ways(server, tools=[WEATHER], **fields))
        shown = [bytes(request.prompt_ids).decode().partition("[{")[2] for request in server.engine.submitted]
    assert len(set(shown)) == 1
    assert [message["content"][0]["type"] for message in messages] == ["tool_use", "text", "text"]


def test_a_tool_may_be_defined_in_a_message():
    part = {"type": "tool_addition", "tool": {"type": "tool_definition", "definition": WEATHER}}
    found = asked(messages=[*HELLO, {"role": "system", "content": [part]}])
    assert list(found.tools.schemas) == ["weather"]
    assert found.tools.shown == []
    assert '"input_schema"' in found.messages[-1]["content"]


def test_a_passing_system_message_leaves_after_the_next_question():
    note = {"role": "system", "content": "soon", "clear_at": "next_user_message"}
    assert "soon" in str(asked(messages=[*HELLO, note]).messages)
    assert "soon" not in str(asked(messages=[*HELLO, note, *HELLO]).messages)


async def test_a_template_that_moves_or_refuses_later_system_messages_gets_them_from_the_user():
    moves = (
        "{% for m in messages if m.role == 'system' %}{{ m.content }}{% endfor %}"
        "{% for m in messages if m.role != 'system' %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    )
    refuses = (
        "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('no') }}{% endif %}"
        "{{ m.content }}{% endfor %}"
    )
    for template, expected in ((moves, False), (refuses, False), (TEMPLATE, True)):
        state, _ = make_state(template)
        assert await shows_later_system(state.require_loaded()) is expected
    note = {"role": "system", "content": "note"}
    [message] = asked(messages=[*HELLO, note], later_system=False).messages
    assert message == {"role": "user", "content": "hello\n<system>\nnote\n</system>"}


@pytest.mark.parametrize(
    ("template", "thinking", "end", "budget"),
    [
        (THINKS, {"type": "disabled"}, "assistant: <think>\n\n</think>\n\n", (0, False)),
        (THINKS, {"type": "adaptive"}, "assistant: ", None),
        (REASONS, {"type": "adaptive"}, "hello:<think>", None),
        (REASONS, {"type": "enabled", "budget_tokens": 7}, "hello:<think>", (7, True)),
        (REASONS, {"type": "enabled", "budget_tokens": 0}, "hello:<think></think>", (0, False)),
        (REASONS, {"type": "disabled"}, "hello:<think></think>", (0, False)),
        (SHOWS_REASONING, {"type": "disabled"}, "<think>\n\n</think>\n\n", (0, False)),
        (SHOWS_REASONING, None, "<think>\n", None),
        (TEMPLATE, {"type": "enabled", "budget_tokens": 1024}, "assistant\n", None),
    ],
)
async def test_thinking_is_bounded_as_the_template_writes_it(
    template: str, thinking: Any, end: str, budget: tuple[int, bool] | None
):
    async with over_asgi(template) as server:
        prompt = await prompt_of(server, thinking=thinking)
        assert prompt.endswith(end)
        sent = server.engine.submitted[-1].thinking
        counted = await server.http.post("/v1/messages/count_tokens", json={"messages": HELLO, "thinking": thinking})
        assert counted.json()["input_tokens"] == len(server.engine.submitted[-1].prompt_ids)
    assert (None if sent is None else (sent.num_tokens, sent.inside)) == budget


async def test_the_last_message_of_the_assistant_is_continued():
    async with over_asgi() as server:
        prompt = await prompt_of(server, messages=[*HELLO, {"role": "assistant", "content": "The answer is ("}])
    assert prompt.endswith("assistant\nThe answer is (")


def said(*blocks: dict[str, Any], role: str = "user") -> dict[str, Any]:
    return {"messages": [*HELLO, {"role": role, "content": [*blocks]}]}


IMAGE = {"type": "image", "source": {}}
RESULT = {"type": "tool_result", "tool_use_id": "t", "content": [IMAGE]}
ADDITION = {"type": "tool_addition", "tool": {"type": "tool_reference", "name": "g"}}
REFUSED: list[tuple[dict[str, Any], str]] = [
    (said(IMAGE), "messages[1].content[0] has type 'image': images are not supported"),
    (said({"type": "document"}), "documents are not supported"),
    (said(RESULT), "messages[1].content[0].content[0] has type 'image'"),
    (said({"type": "thinking", "thinking": "x"}), "a message of the user has no such blocks"),
    (said({"type": "server_tool_use"}), "messages[1].content[0].type: invalid value 'server_tool_use'"),
    (said({"type": "tool_use", "id": "t", "name": "f", "input": {}}, role="assistant"), "a call without its result"),
    (said({"type": "thinking", "thinking": "x"}, role="assistant"), "has no text to continue; leave it out"),
    (said(ADDITION, role="system"), "messages[1].content[0].tool.name: no tool is called 'g'"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role: invalid enum value 'tool'"),
    ({"messages": []}, "messages: expected"),
    ({"messages": [{"role": "user", "content": ""}]}, "messages have no content"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search", "max_uses": 1}]}, "tools[0]: 'web_search_2025"),
    ({"tools": [{"name": "f"}]}, "'tools[0].input_schema' is required"),
    ({"tools": [{"name": "f", "parameters": {}, "input_schema": {}}]}, "Unknown field 'tools[0].parameters'"),
    ({"tools": [{"name": "f", "input_schema": {"type": "string"}}]}, "tools[0].input_schema.type: arguments are"),
    ({"tools": [WEATHER, WEATHER | {"description": "x"}]}, "tools[1].name: 'weather' is the name of another"),
    ({"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "g"}}, "tool_choice.name: no tool is called 'g'"),
    ({"tool_choice": {"type": "any"}}, "tool_choice asks for a call"),
    ({"thinking": {"type": "enabled"}}, "'thinking.budget_tokens' is required"),
    ({"thinking": {"type": "always"}}, "thinking.type: invalid value 'always'"),
    ({"container": "c"}, "container is not supported"),
    ({"speed": "fast"}, "speed is not supported"),
    ({"mcp_servers": [{}]}, "mcp_servers is not supported"),
    ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "shorten the conversation yourself"),
    ({"stop_sequences": ["x" * 5000]}, "stop_sequences"),
    ({"max_token": 3}, "Unknown field 'max_token'; did you mean 'max_tokens'?"),
    ({"temperature": -1}, "temperature"),
    ({"max_tokens": -1}, "max_tokens"),
]


@pytest.mark.parametrize(("fields", "problem"), REFUSED, ids=[problem[:40] for _, problem in REFUSED])
async def test_what_is_refused_is_named(fields: dict[str, Any], problem: str):
    async with over_asgi() as server:
        error = await ask(server, 400, **fields)
        assert not server.engine.submitted
    assert error["type"] == "error"
    assert error["error"]["type"] == "invalid_request_error"
    assert problem in error["error"]["message"]


async def test_what_asks_for_nothing_is_taken():
    fields = {
        "cache_control": {"type": "ephemeral"},
        "container": None,
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "diagnostics": {"previous_message_id": None},
        "inference_geo": None,
        "mcp_servers": [],
        "metadata": {"user_id": "u"},
        "output_config": {"effort": "max"},
        "service_tier": "auto",
        "speed": "standard",
        "stop_sequences": [],
        "system": [],
        "tools": [],
        "user_profile_id": "p",
        "workspace_id": "w",
    }
    async with over_asgi() as server:
        plainly = await prompt_of(server)
        assert await prompt_of(server, **fields) == plainly
        headers = {"x-api-key": "k", "anthropic-version": "2023-06-01", "anthropic-beta": "a,b"}
        found = await server.http.post("/v1/messages?beta=true", json=body(max_tokens=1), headers=headers)
        assert found.status_code == 200
        assert found.headers["request-id"] == found.headers["x-request-id"]


async def test_the_key_may_come_as_anthropics_clients_send_it():
    async with over_asgi(api_key="k") as server:
        for headers, status in (
            ({"x-api-key": "k"}, 200),
            ({"authorization": "Bearer k"}, 200),
            ({"x-api-key": "l"}, 401),
        ):
            response = await server.http.post("/v1/messages", json=body(max_tokens=1), headers=headers)
            assert response.status_code == status
        assert response.json()["error"]["type"] == "authentication_error"


async def test_errors_before_and_within_a_stream_have_the_same_form():
    async with over_asgi(engine={"refuse": lambda _: QUEUE_FULL}) as server:
        error = await ask(server, 503, stream=True)
        assert error["error"]["type"] == "overloaded_error"
    async with over_asgi(engine={"rule": lambda _: itertools.repeat(97)}) as server:
        server.engine.hold()
        asking = asyncio.create_task(server.http.post("/v1/messages", json=body(stream=True)))
        await server.engine.wait_for(lambda: server.engine.num_running == 1)
        await server.engine.step()
        server.engine.fail(server.engine.submitted[0].request_id, "out of pages")
        found = events(await asking)
    assert found[0]["type"] == "message_start"
    assert found[-1] == {"type": "error", "error": {"type": "api_error", "message": "out of pages"}}
    assert sum(event["type"] in ("error", "message_stop") for event in found) == 1


async def test_an_aborted_answer_is_an_error():
    async with over_asgi() as server:
        server.engine.hold()
        for stream in (False, True):
            asking = asyncio.create_task(
                server.http.post("/v1/messages", json=body(stream=stream), headers={"x-request-id": f"r{stream}"})
            )
            await server.engine.wait_for(lambda: server.engine.num_running == 1)
            await server.engine.step()
            done = await server.http.post("/abort_request", json={"rid": f"msg_r{stream}"})
            assert done.status_code == 200
            response = await asking
            if stream:
                assert events(response)[-1]["error"]["message"] == "The request was aborted"
            else:
                assert response.status_code == 499


PIECES = st.sampled_from(["<think>", "</think>", "\n", "a", " ü", CALL, CALL[:30], "</tool_call>", "<", "{}"])


@given(text=st.lists(PIECES, max_size=6).map("".join), step=st.integers(1, 9), inside=st.booleans())
async def test_any_split_into_tokens_gives_what_the_whole_has(text: str, step: int, inside: bool):
    template = REASONS if inside else THINKS
    async with over_asgi(template, engine=writes(text) | {"tokens_per_step": step}) as server:
        await ask_both_ways(server, tools=[WEATHER, TIME])
