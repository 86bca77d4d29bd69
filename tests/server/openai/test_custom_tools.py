"""Custom tools and allowed tools of chat: what the model sees, what is held, and what clients get."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.server.conftest import ServerUnderTest, over_asgi
from tests.server.openai.test_completions import events
from tests.server.openai.test_tools import CALL, TIME, WEATHER, ask, chat_body, writes
from tests.server.tiny import tiny_tokenizer

PATCH = {"type": "custom", "custom": {"name": "patch", "description": "Changes files."}}
TERM = {"type": "grammar", "grammar": {"syntax": "lark", "definition": 'start: "a"+ "\\""'}}
DIGITS = {"type": "grammar", "grammar": {"syntax": "regex", "definition": "[0-9]+"}}
WRITTEN = '<tool_call>\n{"name": "patch", "arguments": {"input": "say \\"hi\\"\\n"}}\n</tool_call>'


def held(form: dict[str, Any]) -> dict[str, Any]:
    return {"type": "custom", "custom": {"name": "patch", "format": form}}


def prompt_of(server: ServerUnderTest) -> str:
    return tiny_tokenizer().decode(server.engine.submitted[-1].prompt_ids)


@pytest.mark.parametrize("choice", ["auto", "required", {"type": "custom", "custom": {"name": "patch"}}])
async def test_a_call_whole_and_streamed(choice: Any):
    async with over_asgi(engine=writes(WRITTEN)) as server:
        fields = {"tools": [PATCH, WEATHER], "tool_choice": choice}
        [answer] = (await ask(server, **fields))["choices"]
        response = await server.http.post("/v1/chat/completions", json=chat_body(stream=True, **fields))
    [call] = answer["message"]["tool_calls"]
    assert call.pop("id").startswith("call_")
    assert call == {"type": "custom", "custom": {"name": "patch", "input": 'say "hi"\n'}}
    assert answer["finish_reason"] == ("stop" if isinstance(choice, dict) else "tool_calls")
    parts = [part for chunk in events(response) for part in chunk["choices"][0]["delta"].get("tool_calls", ())]
    assert (parts[0]["type"], parts[0]["custom"]["name"], "function" in parts[0]) == ("custom", "patch", False)
    assert "".join(part["custom"]["input"] for part in parts) == 'say "hi"\n'
    assert all("id" not in part for part in parts[1:])


async def test_a_custom_tool_and_a_function_in_one_answer():
    async with over_asgi(engine=writes(f"{WRITTEN}\n{CALL}")) as server:
        [answer] = (await ask(server, tools=[PATCH, WEATHER]))["choices"]
    assert [call["type"] for call in answer["message"]["tool_calls"]] == ["custom", "function"]


async def test_calls_that_are_sent_back():
    call = {"id": "c1", "type": "custom", "custom": {"name": "patch", "input": 'say "hi"\n'}}
    messages = [
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "done"},
    ]
    async with over_asgi(engine=writes("Hi.")) as server:
        await ask(server, messages=messages, tools=[PATCH])
        assert WRITTEN in prompt_of(server)
        del call["type"]
        await ask(server, messages=messages, tools=[PATCH])
        assert WRITTEN in prompt_of(server)


@pytest.mark.parametrize("form", [TERM, DIGITS])
async def test_a_grammar_is_shown_and_held_in_any_answer(form: dict[str, Any]):
    async with over_asgi(engine=writes("Hi.")) as server:
        for choice in ("auto", "required"):
            await ask(server, tools=[held(form), TIME], tool_choice=choice)
            request = server.engine.submitted[-1]
            assert "patch" in request.grammar
            assert json.dumps(form["grammar"]["definition"])[1:-1] in prompt_of(server)
        await ask(server, tools=[PATCH, TIME])
        assert server.engine.submitted[-1].grammar == ""


@pytest.mark.parametrize(("mode", "required"), [("auto", False), ("required", True)])
async def test_allowed_tools(mode: str, required: bool):
    tools = [{"type": "function", "function": {"name": "weather"}}, {"type": "custom", "custom": {"name": "patch"}}]
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}
    async with over_asgi(engine=writes("Hi.")) as server:
        await ask(server, tools=[PATCH, WEATHER, TIME])
        plain = prompt_of(server)
        await ask(server, tools=[PATCH, WEATHER, TIME], tool_choice=choice)
        assert prompt_of(server) == plain
        grammar = server.engine.submitted[-1].grammar
    assert [name in grammar for name in ("patch", "weather", '"time')] == [True, True, False]
    assert ("TEXT" in grammar) is not required


@pytest.mark.parametrize(
    ("tools", "choice", "param", "words"),
    [
        ([held({"type": "grammar", "grammar": {"syntax": "lark", "definition": "start: nothing"}})], "auto", "tools",
         "patch: "),
        ([held({"type": "grammar", "grammar": {"syntax": "regex", "definition": "(?=a)"}})], "auto", "tools",
         "patch: "),
        ([held({"type": "grammar", "grammar": {"syntax": "gbnf", "definition": "x"}})], "auto",
         "tools[0].custom.format.grammar.syntax", "gbnf"),
        ([held({"type": "grammar"})], "auto", "tools[0].custom.format.grammar", "required"),
        ([PATCH, {"type": "function", "function": {"name": "patch"}}], "auto", "tools[1].function.name",
         "another tool"),
        ([PATCH], {"type": "custom", "custom": {"name": "x"}}, "tool_choice.custom.name", "no tool is called 'x'"),
        ([PATCH], {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}},
         "tool_choice.allowed_tools.tools", ""),
        ([PATCH], {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [
            {"type": "custom", "custom": {"name": "x"}}]}}, "tool_choice.allowed_tools.tools[0].custom.name", "'x'"),
    ],
)  # fmt: skip
async def test_errors_name_the_field(server: ServerUnderTest, tools: list[Any], choice: Any, param: str, words: str):
    error = (await ask(server, status=400, tools=tools, tool_choice=choice))["error"]
    assert error["param"].startswith(param), error
    assert words in error["message"]
