"""Tools and reasoning over HTTP: what the engine is asked for, and what clients get of answers that a rule writes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any

import pytest

from jaxserve.api_types import EngineRequest
from tests.server.conftest import ServerUnderTest, over_asgi
from tests.server.openai.test_completions import events
from tests.server.tiny import END_ID, tiny_tokenizer

HELLO = [{"role": "user", "content": "hello"}]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"type": "function", "function": {"name": "weather", "description": "Says it.", "parameters": SCHEMA}}
TIME = {"type": "function", "function": {"name": "time"}}
TOOLS = [WEATHER, TIME]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'
THINKS = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% if add_generation_prompt %}assistant: {% if enable_thinking is defined and not enable_thinking %}"
    "<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
REASONS = "{% for m in messages %}{{ m.content }}{% endfor %}:<think>\n"


def writes(text: str) -> dict[str, Any]:
    """Return the settings of an engine that answers with a text and ends."""

    def rule(request: EngineRequest) -> Iterable[int]:
        return [*text.encode(), END_ID]

    return {"rule": rule, "max_model_len": 2048}


def chat_body(**fields: Any) -> dict[str, Any]:
    return {"messages": HELLO, "max_tokens": 400, "temperature": 0} | fields


async def ask(server: ServerUnderTest, status: int = 200, **fields: Any) -> dict[str, Any]:
    response = await server.http.post("/v1/chat/completions", json=chat_body(**fields))
    assert response.status_code == status, response.text
    return response.json()


async def ask_both_ways(server: ServerUnderTest, **fields: Any) -> dict[str, Any]:
    """Return the choice of a whole answer, after checking that a stream gives the same."""
    answer = await ask(server, **fields)
    [choice] = answer["choices"]
    response = await server.http.post(
        "/v1/chat/completions", json=chat_body(stream=True, stream_options={"include_usage": True}, **fields)
    )
    *chunks, last = events(response)
    assert last["usage"] == answer["usage"]
    message = assembled(chunks)
    ids = [call.pop("id") for call in message.get("tool_calls", ())]
    whole = json.loads(json.dumps(choice["message"]))
    ids += [call.pop("id") for call in whole.get("tool_calls", ())]
    assert len(ids) == len(set(ids))
    assert message == {name: value for name, value in whole.items() if value}
    assert chunks[-1]["choices"][0]["finish_reason"] == choice["finish_reason"]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    return choice | {"usage": answer["usage"]}


def assembled(chunks: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the message of a stream, put together as clients do."""
    message: dict[str, Any] = {}
    for chunk in chunks:
        delta = chunk["choices"][0]["delta"]
        for name in ("role", "content", "reasoning_content"):
            if delta.get(name):
                message[name] = message.get(name, "") + delta[name]
        for part in delta.get("tool_calls", ()):
            calls = message.setdefault("tool_calls", [])
            if part["index"] == len(calls):
                calls.append({"id": part["id"], "type": part["type"], "function": {**part["function"]}})
                assert part["function"]["name"]
            else:
                assert part["index"] == len(calls) - 1
                assert "id" not in part
                assert "name" not in part["function"]
                calls[-1]["function"]["arguments"] += part["function"]["arguments"]
    return message


async def test_calls_come_apart_from_the_text():
    async with over_asgi(engine=writes(f"I look.\n{CALL}\n{CALL}")) as server:
        choice = await ask_both_ways(server, tools=TOOLS)
    message = choice["message"]
    assert message["content"] == "I look."
    assert [call["function"] for call in message["tool_calls"]] == [
        {"name": "weather", "arguments": '{"city": "Köln"}'},
    ] * 2
    assert all(re.fullmatch("call_[0-9a-f]{24}", call["id"]) for call in message["tool_calls"])
    assert choice["finish_reason"] == "tool_calls"


async def test_an_answer_with_only_calls_has_no_content():
    async with over_asgi(engine=writes(CALL)) as server:
        assert (await ask(server, tools=TOOLS))["choices"][0]["message"]["content"] is None


async def test_one_call_if_calls_are_not_to_be_parallel():
    async with over_asgi(engine=writes(f"{CALL}\n{CALL}")) as server:
        choice = await ask_both_ways(server, tools=TOOLS, parallel_tool_calls=False)
    assert len(choice["message"]["tool_calls"]) == 1


@pytest.mark.parametrize("fields", [{}, {"tools": TOOLS, "tool_choice": "none"}, {"tools": [], "tool_choice": "auto"}])
async def test_without_tools_calls_are_text(fields: dict[str, Any]):
    async with over_asgi(engine=writes(CALL)) as server:
        choice = await ask_both_ways(server, **fields)
        prompt = tiny_tokenizer().decode(server.engine.submitted[0].prompt_ids)
    assert choice["message"]["content"] == CALL
    assert "tool_calls" not in choice["message"]
    assert choice["finish_reason"] == "stop"
    assert "weather" not in prompt


async def test_tools_are_described_in_the_prompt():
    async with over_asgi(engine=writes("ok")) as server:
        await ask(server, tools=[{**WEATHER, "function": WEATHER["function"] | {"strict": None}}])
        prompt = tiny_tokenizer().decode(server.engine.submitted[0].prompt_ids)
        counted = await server.http.post("/tokenize", json={"messages": HELLO, "tools": [WEATHER]})
    assert counted.json()["tokens"] == server.engine.submitted[0].prompt_ids
    assert '{"type": "function", "function": {"name": "weather", "description": "Says it.", "parameters"' in prompt
    assert prompt.index("weather") < prompt.index("hello")
    assert "strict" not in prompt


async def test_a_conversation_with_calls_and_results():
    calls = [{"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Köln"}'}}]
    messages = [
        *HELLO,
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "tool_call_id": "1", "content": "rain"},
        {"role": "tool", "tool_call_id": "2", "content": [{"type": "text", "text": "sun"}]},
    ]
    async with over_asgi(engine=writes("ok")) as server:
        await ask(server, messages=messages)
        prompt = tiny_tokenizer().decode(server.engine.submitted[0].prompt_ids)
    assert prompt == (
        f"user\nhello\nassistant\n{CALL}\nuser\n<tool_response>\nrain\n</tool_response>\n"
        "<tool_response>\nsun\n</tool_response>\nassistant\n"
    )


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"tools": [WEATHER, WEATHER]}, "tools[1].function.name", "another function"),
        ({"tools": [{"type": "custom", "custom": {}}]}, "tools[0]", "custom"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name", "matching regex"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name", "required"),
        ({"tools": [TIME] * 129}, "tools", "<= 128"),
        ({"tool_choice": "required"}, "tool_choice", "there are no tools"),
        ({"tool_choice": "any", "tools": TOOLS}, "tool_choice", "any"),
        (
            {"tool_choice": {"type": "function", "function": {"name": "no"}}, "tools": TOOLS},
            "tool_choice.function.name",
            "no tool is called 'no'",
        ),
        (
            {"tool_choice": "required", "tools": TOOLS, "response_format": {"type": "json_object"}},
            "tool_choice",
            "it can have one",
        ),
        (
            {
                "tool_choice": "required",
                "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "strange"}}}],
            },
            "tools",
            "strange",
        ),
        ({"messages": [*HELLO, {"role": "user", "content": "x", "tool_calls": [{}]}]}, "messages[1].tool_calls[0]", ""),
        (
            {
                "messages": [
                    *HELLO,
                    {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[1]"}}]},
                ]
            },
            "messages[1].tool_calls[0].function.arguments",
            "must be the JSON text of an object",
        ),
    ],
)
async def test_errors_name_the_field(server: ServerUnderTest, fields: dict[str, Any], param: str, words: str):
    error = (await ask(server, status=400, **fields))["error"]
    assert error["param"].startswith(param), error
    assert words in error["message"], error
    assert server.engine.submitted == []


async def test_a_required_call_is_held_and_streamed_in_pieces():
    text = f"{CALL}\n" + CALL.replace("weather", "time").replace('{"city": "Köln"}', "{}")
    async with over_asgi(engine=writes(text)) as server:
        choice = await ask_both_ways(server, tools=TOOLS, tool_choice="required")
        response = await server.http.post(
            "/v1/chat/completions", json=chat_body(tools=TOOLS, tool_choice="required", stream=True)
        )
        grammar = server.engine.submitted[0].grammar
    functions = [call["function"] for call in choice["message"]["tool_calls"]]
    assert functions == [
        {"name": "weather", "arguments": '{"city": "Köln"}'},
        {"name": "time", "arguments": "{}"},
    ]
    assert choice["finish_reason"] == "tool_calls"
    assert '\\"name\\": \\\\\\"weather' in grammar or "weather" in grammar
    pieces = [chunk["choices"][0]["delta"].get("tool_calls", []) for chunk in events(response)]
    assert sum(map(len, pieces)) > len('{"city": "Köln"}')


async def test_a_named_function_is_the_only_one_and_the_answer_just_stops():
    named = {"type": "function", "function": {"name": "weather"}}
    async with over_asgi(engine=writes(CALL)) as server:
        choice = await ask_both_ways(server, tools=TOOLS, tool_choice=named)
        grammar = server.engine.submitted[0].grammar
    assert len(choice["message"]["tool_calls"]) == 1
    assert choice["finish_reason"] == "stop"
    assert "weather" in grammar
    assert "time" not in grammar


async def test_a_call_that_is_cut_off_has_the_arguments_so_far():
    async with over_asgi(engine=writes(CALL)) as server:
        choice = await ask_both_ways(server, tools=TOOLS, tool_choice="required", max_tokens=54)
    [call] = choice["message"]["tool_calls"]
    assert '{"city": "Köln"}'.startswith(call["function"]["arguments"])
    assert call["function"]["arguments"]
    assert choice["finish_reason"] == "length"


async def test_strict_functions_hold_the_calls_in_a_free_answer():
    strict = {**WEATHER, "function": WEATHER["function"] | {"strict": True}}
    async with over_asgi(engine=writes(f"Ok. {CALL}")) as server:
        choice = await ask_both_ways(server, tools=[strict])
        assert "weather" in server.engine.submitted[0].grammar
    assert choice["message"]["content"] == "Ok."
    schema = {"type": "object", "properties": {"city": {"type": "string", "pattern": "^K"}}}
    strict["function"] |= {"parameters": schema}
    for parser, field in (("qwen3_coder", "auto"), ("pythonic", "auto"), ("qwen3_coder", "required")):
        refused = (parser, field) == ("qwen3_coder", "auto")
        async with over_asgi(engine=writes("x"), tool_call_parser=parser) as server:
            body = await ask(server, status=400 if refused else 200, tools=[strict], tool_choice=field)
            if refused:
                assert body["error"]["param"] == "tools"
                assert "weather.city: pattern can't be held in calls in the model's format" in body["error"]["message"]
            else:
                assert "weather" in server.engine.submitted[0].grammar


async def test_functions_beside_a_strict_one_have_any_arguments():
    strict = {**WEATHER, "function": WEATHER["function"] | {"strict": True}}
    schema = {"type": "object", "properties": {"a": {"not": {}, "type": "string", "pattern": "x"}}, "minProperties": 1}
    loose = {"type": "function", "function": {"name": "loose", "parameters": schema}}
    for parser in ("hermes", "qwen3_coder", "gpt_oss"):
        async with over_asgi(engine=writes("x"), tool_call_parser=parser) as server:
            await ask(server, tools=[strict, loose])
            grammar = server.engine.submitted[0].grammar
        assert "loose" in grammar
        assert "minProperties" not in grammar


async def test_a_form_of_the_answer_leaves_room_for_calls():
    async with over_asgi(engine=writes('{"a": 1}')) as server:
        choice = await ask_both_ways(server, tools=TOOLS, response_format={"type": "json_object"})
        assert "@one | @other" in server.engine.submitted[0].grammar
    assert choice["message"]["content"] == '{"a": 1}'


async def test_mistral_has_short_ids_and_its_own_form():
    text = '[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Köln"}}]'
    async with over_asgi(engine=writes(text), tool_call_parser="mistral") as server:
        choice = await ask_both_ways(server, tools=TOOLS)
    [call] = choice["message"]["tool_calls"]
    assert call["function"]["name"] == "weather"
    assert re.fullmatch("[0-9a-f]{9}", call["id"])


async def test_samples_have_calls_of_their_own():
    def rule(request: EngineRequest) -> Iterable[int]:
        return [*(CALL if request.sample else "Just text").encode(), END_ID]

    async with over_asgi(engine={"rule": rule, "max_model_len": 2048}) as server:
        first, second = (await ask(server, tools=TOOLS, n=2, temperature=1))["choices"]
    assert first["message"]["content"] == "Just text"
    assert first["finish_reason"] == "stop"
    assert second["message"]["tool_calls"]
    assert second["finish_reason"] == "tool_calls"


@pytest.mark.parametrize(
    ("template", "text", "reasoning", "content"),
    [
        (THINKS, "<think>\nHm, ö.\n</think>\n\nHi ö.", "Hm, ö.", "Hi ö."),
        (THINKS, "Hi.", None, "Hi."),
        (REASONS, "Hm.\n</think>\n\nHi.", "Hm.", "Hi."),
        (REASONS, "Hm", "Hm", None),
    ],
)
async def test_reasoning_comes_apart(template: str, text: str, reasoning: str | None, content: str | None):
    async with over_asgi(template=template, engine=writes(text)) as server:
        choice = await ask_both_ways(server)
        assert choice["message"]["content"] == content
        assert choice["message"]["reasoning_content"] == reasoning
        end = len(text.encode().partition(b"</think>")[0]) + len("</think>") if "</think>" in text else len(text) + 1
        expected = 0 if reasoning is None else end
        assert choice["usage"]["completion_tokens_details"] == {"reasoning_tokens": expected}
        assert (await ask(server, separate_reasoning=False))["choices"][0]["message"]["content"] == text
        hidden = await ask_both_ways(server, include_reasoning=False)
        assert hidden["message"]["content"] == (content or "")
        assert "reasoning_content" not in hidden["message"]


async def test_calls_after_reasoning():
    async with over_asgi(template=THINKS, engine=writes(f"<think>Hm.</think>\n\n{CALL}")) as server:
        for choice in ("auto", "required"):
            together = await ask_both_ways(server, tools=TOOLS, tool_choice=choice, separate_reasoning=False)
            assert together["message"]["content"] == "Hm."
            assert len(together["message"]["tool_calls"]) == 1
        message = (await ask_both_ways(server, tools=TOOLS))["message"]
    assert message["reasoning_content"] == "Hm."
    assert message["content"] is None
    assert len(message["tool_calls"]) == 1


async def test_a_form_begins_after_reasoning():
    form = {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}}
    async with over_asgi(template=THINKS, engine=writes('{"city": "x"}')) as server:
        for fields in ({}, {"chat_template_kwargs": {"enable_thinking": False}}, {"reasoning_effort": "none"}):
            await ask(server, **form, **fields)
        free, *plain = [request.grammar for request in server.engine.submitted]
    assert "start: thinking? @answer" in free
    assert all("thinking" not in grammar for grammar in plain)
    async with over_asgi(template=REASONS, engine=writes("x")) as server:
        await ask(server, **form)
        await ask(server, tools=TOOLS, tool_choice="required")
        assert all("start: thinking @answer" in request.grammar for request in server.engine.submitted)


async def test_the_effort_of_reasoning_reaches_the_template():
    template = "{{ messages[0].content }} {{ reasoning_effort }}:"
    async with over_asgi(template=template) as server:
        await ask(server, reasoning_effort="low", max_tokens=1)
        assert tiny_tokenizer().decode(server.engine.submitted[0].prompt_ids) == "hello low:"
    async with over_asgi(template=THINKS) as server:
        await ask(server, reasoning_effort="none", max_tokens=1)
        assert tiny_tokenizer().decode(server.engine.submitted[0].prompt_ids).endswith("<think>\n\n</think>\n\n")


async def test_harmony_has_reasoning_calls_and_forms():
    text = (
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary to=functions.weather "
        '<|constrain|>json<|message|>{"city": "Köln"}'
    )
    parsers = {"tool_call_parser": "openai", "reasoning_parser": "openai_gptoss"}
    async with over_asgi(engine=writes(text), **parsers) as server:
        choice = await ask_both_ways(server, tools=TOOLS)
        assert choice["message"]["reasoning_content"] == "Hm."
        assert choice["message"]["content"] is None
        assert choice["message"]["tool_calls"][0]["function"] == {"name": "weather", "arguments": '{"city": "Köln"}'}
        together = (await ask_both_ways(server, tools=TOOLS, separate_reasoning=False))["message"]
        assert together["content"] == "Hm."
        assert together["tool_calls"]
        await ask(server, tools=TOOLS, tool_choice="required")
        assert "start: analysis? (call_0 | call_1)" in server.engine.submitted[-1].grammar
        await ask(server, tools=TOOLS, response_format={"type": "json_object"})
        assert "start: analysis? (final | call_0 | call_1)" in server.engine.submitted[-1].grammar
        await ask(server, response_format={"type": "json_object"})
        assert "start: analysis? (final)" in server.engine.submitted[-1].grammar
