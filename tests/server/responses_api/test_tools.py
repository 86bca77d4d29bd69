"""Tools of Responses: functions, custom tools, namespaces, choices among them, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.server.conftest import ServerUnderTest, over_asgi
from tests.server.openai.test_tools import writes
from tests.server.responses_api.ask import TIME, WEATHER, ask, ask_both_ways, prompt_of, stream

PATCH = {"type": "custom", "name": "patch", "description": "Changes files."}
NAMES = ["patch", "sky.weather", "sky.time", "quux"]
GRAMMAR = {"type": "grammar", "syntax": "lark", "definition": 'start: "a"+'}
SKY = {"type": "namespace", "name": "sky", "description": "What is above.", "tools": [WEATHER, TIME]}


def call(name: str, **arguments: Any) -> str:
    """Return a call as the model writes it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def shown_tools(server: ServerUnderTest) -> list[dict[str, Any]]:
    """Return the functions that the prompt shows."""
    text = prompt_of(server).partition("<tools>\n")[2].partition("\n</tools>")[0]
    return [json.loads(line)["function"] for line in text.splitlines()]


@pytest.mark.parametrize("text", ["", 'say "hi"\n\tto \\ him', "é😀\u2028", "x" * 300])
async def test_a_custom_tool(text: str):
    async with over_asgi(engine=writes(f"I do.\n{call('patch', input=text)}")) as server:
        response = await ask_both_ways(server, tools=[PATCH, WEATHER])
        events = await stream(server, tools=[PATCH])
        [shown] = shown_tools(server)
    item = response["output"][1]
    assert (item["type"], item["name"], item["input"]) == ("custom_tool_call", "patch", text)
    assert item["id"].startswith("ctc_")
    kinds = [event["type"] for event in events if "custom" in event["type"]]
    assert kinds == ["response.custom_tool_call_input.delta"] * bool(text) + ["response.custom_tool_call_input.done"]
    assert shown == {
        "name": "patch",
        "description": "Changes files.",
        "parameters": {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]},
    }


@pytest.mark.parametrize(
    ("written", "text"),
    [
        ('{"patch": "x"}', '{"patch": "x"}'),
        ('{"why": "so", "input": "x"}', "x"),
        ('{"input": 5}', '{"input": 5}'),
        ('{ "input" : "\\ud83d\\ude00\\n" }', "😀\n"),
        ('{"input": "\\ud83d"}', "\ufffd"),
    ],
)
async def test_inputs_that_no_grammar_holds(written: str, text: str):
    answer = '<tool_call>\n{"name": "patch", "arguments": ' + written + "}\n</tool_call>"
    async with over_asgi(engine=writes(answer)) as server:
        response = await ask_both_ways(server, tools=[PATCH])
    assert [item["input"] for item in response["output"]] == [text]


async def test_an_input_is_streamed_as_it_is_written():
    text = 'a"b\\c\n😀d'
    answer = '<tool_call>\n{"name": "patch", "arguments": ' + json.dumps({"input": text}) + "}\n</tool_call>"
    async with over_asgi(engine=writes(answer)) as server:
        response = await ask_both_ways(server, tools=[PATCH], tool_choice={"type": "custom", "name": "patch"})
        events = await stream(server, tools=[PATCH], tool_choice="required")
    assert response["output"][0]["input"] == text
    deltas = [event["delta"] for event in events if event["type"].endswith("input.delta")]
    assert "".join(deltas) == text
    assert len(deltas) > 5


async def test_a_namespace():
    async with over_asgi(engine=writes(call("sky.weather", city="Köln") + "\n" + call("weather"))) as server:
        response = await ask_both_ways(server, tools=[SKY, WEATHER | {"parameters": None}])
        shown = shown_tools(server)
    names = [(item["name"], item.get("namespace")) for item in response["output"]]
    assert names == [("weather", "sky"), ("weather", None)]
    assert [tool["name"] for tool in shown] == ["sky.weather", "sky.time", "weather"]
    assert [tool.get("description") for tool in shown] == ["sky: What is above.\n\nSays it.", None, "Says it."]


@pytest.mark.parametrize(
    ("choice", "required", "may_call"),
    [
        ("auto", False, ["patch", "sky.weather", "sky.time", "quux"]),
        ("required", True, ["patch", "sky.weather", "sky.time", "quux"]),
        ({"type": "function", "name": "quux"}, True, ["quux"]),
        ({"type": "function", "name": "time"}, True, ["sky.time"]),
        ({"type": "function", "name": "sky.time"}, True, ["sky.time"]),
        ({"type": "function", "name": "time", "namespace": "sky"}, True, ["sky.time"]),
        ({"type": "custom", "name": "patch"}, True, ["patch"]),
        ({"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "quux"}]}, False, ["quux"]),
        (
            {
                "type": "allowed_tools",
                "mode": "required",
                "tools": [{"type": "namespace", "name": "sky"}, {"type": "custom", "name": "patch"}],
            },
            True,
            ["patch", "sky.weather", "sky.time"],
        ),
    ],
)
async def test_choices(choice: Any, required: bool, may_call: list[str]):
    tools = [PATCH, SKY, {"type": "function", "name": "quux"}]
    async with over_asgi(engine=writes("Hi.")) as server:
        plain = await ask(server, tools=tools)
        prompt = prompt_of(server)
        response = await ask(server, tools=tools, tool_choice=choice)
        assert prompt_of(server) == prompt  # the prompt begins alike, whatever may be called
        grammar = server.engine.submitted[-1].grammar
    assert response["tool_choice"] == choice
    assert plain["tool_choice"] == "auto"
    assert bool(grammar) == (required or len(may_call) < len(NAMES))
    assert [name for name in NAMES if name in grammar] == (may_call if grammar else [])


async def test_without_a_call_the_model_still_sees_the_tools():
    async with over_asgi(engine=writes(call("weather", city="x"))) as server:
        response = await ask_both_ways(server, tools=[WEATHER], tool_choice="none")
        assert [tool["name"] for tool in shown_tools(server)] == ["weather"]
    assert [item["type"] for item in response["output"]] == ["message"]


async def test_one_call_if_calls_are_not_to_be_parallel():
    async with over_asgi(engine=writes(call("patch", input="a") + call("patch", input="b"))) as server:
        response = await ask_both_ways(server, tools=[PATCH], parallel_tool_calls=False)
    assert [item["input"] for item in response["output"]] == ["a"]


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", "this server has none; leave it out, or define"),
        ({"tools": [{"type": "mcp", "server_label": "x"}]}, "tools[0].type", "'mcp'"),
        ({"tools": [{"name": "f"}]}, "tools[0].type", "must be one of function, custom, namespace"),
        ({"tools": [{"type": [], "name": "f"}]}, "tools[0].type", "must be one of"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools[0].function", "move them there"),
        ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name", ""),
        ({"tools": [{"type": "function", "name": "f", "parameters": {"type": "array"}}]},
         "tools[0].parameters.type", "arguments are an object"),
        ({"tools": [{"type": "function", "name": "f", "strange": 1}]}, "tools[0].strange", "Unknown field"),
        ({"tools": [WEATHER, WEATHER | {"description": "x"}]}, "tools[1].name", "another tool too"),
        ({"tools": [SKY, {"type": "custom", "name": "sky.time"}]}, "tools[1].name", "another tool too"),
        ({"tools": [SKY | {"tools": [SKY]}]}, "tools[0].tools[0].type", "function, custom, got 'namespace'"),
        ({"tools": [PATCH | {"format": {"type": "grammar"}}]}, "tools[0].format.", ""),
        ({"tools": [PATCH | {"format": GRAMMAR | {"syntax": "ebnf"}}]}, "tools[0].format.syntax", "ebnf"),
        ({"tool_choice": "required"}, "tool_choice", "there are no tools"),
        ({"tool_choice": {"type": "function", "name": "f"}, "tools": [WEATHER]}, "tool_choice.name", "no tool"),
        ({"tool_choice": {"type": "web_search"}, "tools": [WEATHER]}, "tool_choice.type", "OpenAI runs"),
        ({"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}, "tools": [WEATHER]},
         "tool_choice.tools", ""),
        ({"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}]},
          "tools": [WEATHER]}, "tool_choice.tools[0].name", "no tool is called 'f'"),
        ({"tools": [{"type": "function", "name": f"f{number}"} for number in range(1025)]}, "tools", "1024"),
    ],
)  # fmt: skip
async def test_errors_name_the_tool(server: ServerUnderTest, fields: dict[str, Any], param: str, words: str):
    error = await ask(server, 400, **fields)
    assert error["param"].startswith(param), error
    assert words in error["message"]
