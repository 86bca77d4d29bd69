"""Tools and reasoning over HTTP: what the engine is asked for, and what clients get of answers that a rule writes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any

import pytest

from jaxserve.api_types import EngineRequest
from jaxserve.text.answers.call_texts import written
from jaxserve.text.answers.formats import CALL_FORMATS
from tests.server.conftest import ServerUnderTest, over_asgi
from tests.server.openai.test_completions import events
from tests.server.tiny import END_ID, tiny_tokenizer
from tests.text.answers.parts import whole

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


def tool(parameters: Any, **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": parameters, **fields}}


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
        (
            {"tools": [WEATHER, {**TIME, "function": TIME["function"] | {"name": "weather"}}]},
            "tools[1].function.name",
            "another tool too; give each a name of its own",
        ),
        ({"tools": [{"type": "custom", "custom": {}}]}, "tools[0]", "custom"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name", "matching regex"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name", "required"),
        ({"tools": [TIME] * 1025}, "tools", "<= 1024"),
        ({"tool_choice": "required"}, "tool_choice", "there are no tools"),
        ({"tool_choice": "any", "tools": TOOLS}, "tool_choice", "any"),
        (
            {"tool_choice": {"type": "function", "function": {"name": "no"}}, "tools": TOOLS},
            "tool_choice.function.name",
            "no tool is called 'no'",
        ),
        (
            {
                "tool_choice": "required",
                "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "strange"}}}],
            },
            "tools[0].function.parameters.type",
            "arguments are an object, got 'strange'",
        ),
        (
            {"tool_choice": "required", "tools": [tool({"properties": {"s": {"pattern": "(?=a)"}}})]},
            "tools",
            "tools can't be used: f: properties.s.pattern: looking ahead or behind, at 0, is not supported",
        ),
        (
            {"tools": [tool({"properties": {"s": {"type": "array", "uniqueItems": True}}}, strict=True)]},
            "tools",
            "tools can't be used: f: properties.s.uniqueItems can't be held",
        ),
        ({"messages": [*HELLO, {"role": "user", "content": "x", "tool_calls": [{}]}]}, "messages[1].tool_calls[0]", ""),
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
    schema = {"type": "object", "anyOf": [{"required": ["city"]}, {"required": ["place"]}]}
    strict["function"] |= {"parameters": schema}
    for parser, field in (("qwen3_coder", "auto"), ("hermes", "auto"), ("qwen3_coder", "required")):
        refused = (parser, field) == ("qwen3_coder", "auto")
        async with over_asgi(engine=writes("x"), tool_call_parser=parser) as server:
            body = await ask(server, status=400 if refused else 200, tools=[strict], tool_choice=field)
            if refused:
                assert body["error"]["param"] == "tools"
                assert "weather: alternatives of all arguments can't be held" in body["error"]["message"]
            else:
                assert "weather" in server.engine.submitted[0].grammar


async def test_functions_beside_a_strict_one_have_any_arguments():
    strict = {**WEATHER, "function": WEATHER["function"] | {"strict": True}}
    schema = {"type": "object", "properties": {"a": {"not": {}, "type": "string"}}, "minProperties": 1}
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


async def test_a_call_that_must_come_needs_no_form_of_the_answer():
    """Agents with an output type send both."""
    form = {"type": "json_schema", "json_schema": {"schema": {"not": {}}}}
    async with over_asgi(engine=writes(CALL)) as server:
        for choice in ("required", {"type": "function", "function": {"name": "weather"}}):
            found = await ask_both_ways(server, tools=TOOLS, tool_choice=choice, response_format=form)
            assert len(found["message"]["tool_calls"]) == 1


async def test_a_held_answer_that_is_cut_has_no_part_of_a_call():
    strict = {**WEATHER, "function": WEATHER["function"] | {"strict": True}}
    form = {"response_format": {"type": "json_object"}}
    text = f"Ok.\n{CALL}".encode()
    async with over_asgi(engine=writes(text.decode())) as server:
        for size in range(1, len(text)):
            fields = {"tools": [strict]} if size % 2 else {"tools": [WEATHER], **form}
            choice = await ask_both_ways(server, **fields, max_tokens=size)
            assert choice["finish_reason"] == "length"
            content = choice["message"]["content"] or ""
            assert content in ("Ok.\n<", text[: min(size, 3)].decode(), text[: min(size, 4)].decode()), size


ITERATES = (
    "{% for m in messages %}{% for c in m.tool_calls or [] %}"
    "{{ c.function.name }}({% for key, value in c.function.arguments.items() %}{{ key }}={{ value }}{% endfor %})"
    "{% endfor %}{% endfor %}"
)
WRITES_JSON = (
    "{% for m in messages %}{% for c in m.tool_calls or [] %}{{ c.function.name }}:"
    "{{ c.function.arguments if c.function.arguments is string else c.function.arguments | tojson }}"
    "{% endfor %}{% endfor %}"
)
NO_OBJECTS = [
    '{"a": [1, 2',
    "[]",
    "null",
    "42",
    "NaN",
    '{"a": "x\ny"}',
    '"text"',
    '{"a": NaN}',
    "{",
    "\x00",
    "{}}",
    "tRue",
]


@pytest.mark.parametrize("given", NO_OBJECTS)
@pytest.mark.parametrize(
    ("template", "shown"),
    [(WRITES_JSON, "weather:{}"), (ITERATES, "weather()"), (None, '{{"name": "weather", "arguments": {}}}')],
)
async def test_arguments_that_are_no_object_reach_the_template(given: str, template: str | None, shown: str):
    """Our own answer that was cut off comes back, and what other models write."""
    call = {"id": "a", "type": "function", "function": {"name": "weather", "arguments": given}}
    messages = [*HELLO, {"role": "assistant", "content": None, "tool_calls": [call]}, {"role": "tool", "content": None}]
    async with over_asgi(**({} if template is None else {"template": template})) as server:
        await ask(server, messages=messages, max_tokens=1)
        prompt = tiny_tokenizer().decode(server.engine.submitted[0].prompt_ids)
    assert shown.format(given) in prompt


@pytest.mark.parametrize("value", [None, [], 42, {"a": 1}, ""])
async def test_arguments_may_be_json_itself(value: Any):
    call = {"function": {"name": "weather", "arguments": value, "parsed_arguments": {"a": 1}}, "type": None, "index": 0}
    async with over_asgi(template=WRITES_JSON) as server:
        await ask(server, messages=[*HELLO, {"role": "assistant", "tool_calls": [call]}], max_tokens=1)
        prompt = tiny_tokenizer().decode(server.engine.submitted[0].prompt_ids)
    assert prompt == f"weather:{json.dumps(value) if value else '{}' if value in (None, '') else value}"


async def test_what_agents_send_beside_is_taken(caplog: pytest.LogCaptureFixture):
    fields = {
        "client_metadata": {"a": 1},
        "include": [],
        "text": {},
        "web_search_options": {},
        "cache_control": {"x": 1},
    }
    marked = {**WEATHER, "cache_control": {"type": "ephemeral"}, "defer_loading": True}
    inside = {**TIME, "function": TIME["function"] | {"cache_control": {}, "defer_loading": False}}
    messages = [*HELLO, {"role": "assistant", "content": [{"type": "refusal", "refusal": "I won't."}]}, *HELLO]
    async with over_asgi(engine={"max_model_len": 4096}) as server:
        with caplog.at_level("INFO", "jaxserve"):
            for effort in ("none", "minimal", "low", "medium", "high", "xhigh"):
                for verbosity in ("low", "medium", "high"):
                    await ask(server, reasoning_effort=effort, verbosity=verbosity, max_tokens=1, **fields)
        await ask(server, tools=[marked, inside, marked, WEATHER | {}], messages=messages, max_tokens=1)
        assert "I won't." in tiny_tokenizer().decode(server.engine.submitted[-1].prompt_ids)
    changes = [line for line in caplog.messages if "changes nothing" in line]
    assert len(changes) == 2, changes


async def test_a_model_that_always_reasons_cannot_be_asked_not_to():
    async with over_asgi(template=REASONS) as server:
        await ask(server, reasoning_effort="low", max_tokens=1)
        error = (await ask(server, status=400, reasoning_effort="none"))["error"]
    assert error["param"] == "reasoning_effort"
    assert "leave the field out" in error["message"]


@pytest.mark.parametrize(
    "parser", [name for name in CALL_FORMATS if name not in ("gpt_oss", "llama3_json", "pythonic")]
)
async def test_a_template_without_tools_gets_calls_as_the_model_writes_them(parser: str):
    """What is shown is read as the same call: by the parser that reads the answers."""
    arguments = {"city": "Köln", "days": 3}
    call = {"id": "a", "type": "function", "function": {"name": "weather", "arguments": json.dumps(arguments)}}
    messages = [
        *HELLO,
        {"role": "assistant", "content": "Ok.", "tool_calls": [call]},
        {"role": "tool", "content": "sun"},
    ]
    async with over_asgi(engine={"max_model_len": 4096}, tool_call_parser=parser) as server:
        await ask(server, messages=messages, tools=[WEATHER], max_tokens=1)
        prompt = tiny_tokenizer().decode(server.engine.submitted[0].prompt_ids, skip_special_tokens=False)
    shown = written(CALL_FORMATS[parser].free, [("weather", arguments)])
    assert f"Ok.\n{shown}" in prompt
    assert written(CALL_FORMATS[parser].free, [("the function's name", {"an argument's name": "its value"})]) in prompt
    schemas = {"weather": {"properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}}
    parts = whole([CALL_FORMATS[parser].read(schemas)], shown)
    assert [part.text for part in parts if part.kind == "call"] == ["weather"]
    assert json.loads("".join(part.text for part in parts if part.kind == "arguments")) == arguments


@pytest.mark.parametrize(
    ("content", "text", "reasoning", "rest"),
    [
        ("<think>\nI add 3", " and 4.</think>\n\nIt is 7.", " and 4.", "It is 7."),
        ("<think>I add", " on", " on", None),
        ("<think>\nI add 3</think>\n\nIt", " is 7.", None, " is 7."),
        ("It", " is 7.", None, " is 7."),
        ("What does <think> mean? </think> So", " it is.", None, " it is."),
    ],
)
async def test_an_answer_goes_on_within_a_thought(content: str, text: str, reasoning: str | None, rest: str | None):
    messages = [{"role": "user", "content": "Say <think>"}, {"role": "assistant", "content": content}]
    form = {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}}
    async with over_asgi(template=THINKS, engine=writes(text)) as server:
        choice = await ask_both_ways(server, messages=messages, continue_final_message=True)
        await ask(server, messages=messages, continue_final_message=True, **form)
        grammar = server.engine.submitted[-1].grammar
    assert (choice["message"].get("reasoning_content") or "").strip() == (reasoning or "").strip()
    assert choice["message"]["content"] == rest
    assert ("start: thinking @answer" in grammar) == (reasoning is not None)
    assert "thinking?" not in grammar


async def test_a_users_mark_opens_no_thought():
    async with over_asgi(template=THINKS, engine=writes("Hi.")) as server:
        messages = [{"role": "user", "content": "What is <think>?"}]
        choice = await ask_both_ways(server, messages=messages)
    assert choice["message"]["content"] == "Hi."


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
