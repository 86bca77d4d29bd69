"""Budgets for reasoning over HTTP: what the engine is asked for, and what clients get."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from jaxserve.api_types import EngineRequest, ThinkingBudget
from jaxserve.engine.scheduling.thinking import ThinkingCounter
from tests.server.conftest import ServerUnderTest, over_asgi
from tests.server.openai.test_tools import HELLO, REASONS, SCHEMA, THINKS, ask, ask_both_ways, writes
from tests.server.tiny import END_ID, tiny_tokenizer

HARMONY = {"reasoning_parser": "gpt_oss"}
SWITCH = "{{ messages[0].content }}:{% if thinking %}<think>{% else %}</think>{% endif %}"


def ponders(request: EngineRequest) -> Iterable[int]:
    """Write a long thought within the budget of a request, then an answer."""
    counter = None if request.thinking is None else ThinkingCounter(request.thinking)
    for byte in b"I think and think and think":
        if counter is not None and counter.is_used_up:
            break
        yield byte
        if counter is not None:
            counter.push([byte])
    ended = request.prompt_ids[-8:] == list(b"</think>")
    yield from b"" if ended else b"</think>"
    yield from b"\n\nHi."
    yield END_ID


def budget_of(server: ServerUnderTest) -> ThinkingBudget | None:
    return server.engine.submitted[-1].thinking


def prompt_of(server: ServerUnderTest) -> str:
    return tiny_tokenizer().decode(server.engine.submitted[-1].prompt_ids)


@pytest.mark.parametrize("budget", [1, 7, 27, 400])
async def test_reasoning_is_cut_whole_and_streamed(budget: int):
    async with over_asgi(template=REASONS, engine={"rule": ponders}) as server:
        choice = await ask_both_ways(server, thinking_token_budget=budget)
        sent = budget_of(server)
    assert sent is not None
    assert (sent.num_tokens, sent.inside, sent.once) == (budget, True, True)
    assert choice["message"]["reasoning_content"] == "I think and think and think"[:budget].rstrip()
    assert choice["message"]["content"] == "Hi."
    spent = min(budget, 27) + len("</think>")
    assert choice["usage"]["completion_tokens_details"]["reasoning_tokens"] == spent


async def test_a_budget_of_nothing_ends_the_thought_in_the_prompt():
    form = {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}}
    async with over_asgi(template=REASONS, engine=writes("\n\nHi.")) as server:
        choice = await ask_both_ways(server, thinking_token_budget=0)
        assert prompt_of(server) == "hello:<think></think>"
        await ask(server, thinking_token_budget=0, **form)
        assert "thinking" not in server.engine.submitted[-1].grammar
    assert choice["message"]["content"] == "Hi."
    assert choice["message"]["reasoning_content"] is None
    async with over_asgi(template=THINKS, engine=writes("Hi.")) as server:
        await ask(server, thinking_token_budget=0)
        before = budget_of(server)
    assert before is not None
    assert (before.num_tokens, before.inside) == (0, False)


async def test_the_servers_budget_is_for_requests_that_name_none():
    async with over_asgi(template=REASONS, engine=writes("x"), default_thinking_budget=5) as server:
        for fields, expected in (
            ({}, 5),
            ({"thinking_token_budget": None}, 5),
            ({"reasoning": {"enabled": True}}, 5),
            ({"thinking_token_budget": 3}, 3),
            ({"thinking_token_budget": -1}, None),
        ):
            await ask(server, **fields)
            found = budget_of(server)
            assert (None if found is None else found.num_tokens) == expected
    async with over_asgi(template=REASONS, engine=writes("x")) as server:
        await ask(server)
        assert budget_of(server) is None


async def test_a_model_without_reasoning_has_nothing_to_bound():
    async with over_asgi(default_thinking_budget=5) as server:
        for fields in ({}, {"thinking_token_budget": 0}, {"reasoning": {"enabled": False, "max_tokens": 9}}):
            await ask(server, max_tokens=1, **fields)
            assert budget_of(server) is None


async def test_channels_have_a_budget():
    async with over_asgi(engine=writes("<|channel|>final<|message|>Hi"), **HARMONY) as server:
        await ask(server, thinking_token_budget=9)
        sent = budget_of(server)
    assert sent is not None
    assert (sent.num_tokens, sent.inside, sent.once) == (9, False, False)
    assert [tiny_tokenizer().decode(ids) for ids in sent.closings] == [
        "<|end|><|start|>assistant",
        "<|end|><|start|>assistant<|channel|>final<|message|>",
    ]


async def test_openrouters_options_say_the_same():
    async with over_asgi(template=REASONS, engine={"rule": ponders}) as server:
        choice = await ask_both_ways(server, reasoning={"max_tokens": 7, "exclude": True, "effort": "low"})
        assert "reasoning_content" not in choice["message"]
        assert choice["message"]["content"] == "Hi."
        assert choice["usage"]["completion_tokens_details"]["reasoning_tokens"] == 7 + len("</think>")
        for fields in ({"thinking_token_budget": 7}, {"reasoning_effort": "low"}, {"include_reasoning": True}):
            same = {"max_tokens": 7, "effort": "low", "exclude": False}
            await ask(server, reasoning=same, **fields)
            await ask(server, reasoning={}, **fields)
            await ask(server, reasoning=None, **fields)
        await ask(server, reasoning={"enabled": False}, reasoning_effort="none")
        assert prompt_of(server).endswith("<think></think>")
    async with over_asgi(template=SWITCH, engine=writes("x")) as server:
        await ask(server, reasoning={"enabled": True})
        assert prompt_of(server) == "hello:<think>"
        await ask(server, reasoning={"enabled": False})
        assert prompt_of(server) == "hello:</think>"
        await ask(server, reasoning={"enabled": False}, chat_template_kwargs={"thinking": True})
        assert prompt_of(server) == "hello:<think>"
        assert budget_of(server) is None


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"thinking_token_budget": -2}, "thinking_token_budget", ">= -1"),
        ({"thinking_token_budget": 1.5}, "thinking_token_budget", "int"),
        ({"reasoning": {"max_tokens": -1}}, "reasoning.max_tokens", ">= 0"),
        ({"reasoning": {"summary": "auto"}}, "reasoning.summary", "summary"),
        (
            {"reasoning": {"max_tokens": 1}, "thinking_token_budget": 2},
            "thinking_token_budget",
            "reasoning.max_tokens say different",
        ),
        ({"reasoning": {"effort": "low"}, "reasoning_effort": "high"}, "reasoning_effort", "reasoning.effort"),
        ({"reasoning": {"exclude": True}, "include_reasoning": True}, "include_reasoning", "reasoning.exclude"),
    ],
)
async def test_errors_name_the_field(fields: dict[str, Any], param: str, words: str):
    async with over_asgi(template=REASONS, engine=writes("x")) as server:
        error = (await ask(server, status=400, **fields))["error"]
    assert error["param"] == param
    assert words in error["message"]


async def test_prompts_have_no_known_place_in_reasoning(server: ServerUnderTest):
    for value, status in ((None, 200), (-1, 200), (5, 400)):
        response = await server.http.post(
            "/v1/completions", json={"prompt": "a", "max_tokens": 1, "thinking_token_budget": value}
        )
        assert response.status_code == status, response.text


@pytest.mark.parametrize(
    ("template", "argument", "words"),
    [
        (REASONS, {"enable_thinking": True}, None),
        (REASONS, {"thinking": True, "reasoning_effort": "low"}, None),
        (REASONS, {"enable_thinking": False}, "send thinking_token_budget: 0"),
        (REASONS, {"reasoning_effort": "none"}, "send thinking_token_budget: 0"),
        (REASONS, {"reasoning_effort": "much"}, "leave it out"),
        (REASONS, {"enable_thinking": "no"}, "leave it out"),
        (REASONS, {"enable_thinkin": True}, "does not use it"),
        (THINKS, {"thinking": True}, "it uses enable_thinking instead"),
        (THINKS, {"enable_thinking": False}, None),
        ("{{ messages[0].content }}", {"enable_thinking": False, "reasoning_effort": "none"}, None),
        ("{{ messages[0].content }}", {"enable_thinking": True}, "never reasons; leave it out"),
        ("{{ messages[0].content }}", {"enable_thinking": 0}, "leave it out"),
    ],
)
async def test_arguments_that_the_template_ignores(template: str, argument: dict[str, Any], words: str | None):
    async with over_asgi(template=template, engine=writes("x")) as server:
        answer = await ask(server, status=400 if words else 200, chat_template_kwargs=argument)
        schema = (await server.http.get("/openapi.json")).json()["components"]["schemas"]["ChatRequest"]
    if words:
        [name] = argument
        assert answer["error"]["param"] == f"chat_template_kwargs.{name}"
        assert words in answer["error"]["message"]
    accepted = next(one for one in schema["properties"]["chat_template_kwargs"]["anyOf"] if one["type"] == "object")
    fits = all(
        name in accepted["propertyNames"]["enum"]
        and (name not in accepted["properties"] or _is_one_of(value, accepted["properties"][name]["enum"]))
        for name, value in argument.items()
    )
    assert fits == (words is None)


def _is_one_of(value: Any, values: list[Any]) -> bool:
    return any(type(value) is type(one) and value == one for one in values)


async def test_the_first_requests_with_a_budget_share_the_marks():
    async with over_asgi(template=REASONS, engine=writes("x")) as server:
        loaded = server.state.require_loaded()
        assert "thought_marks" not in loaded.template_facts
        for _ in range(2):
            await ask(server, messages=HELLO, thinking_token_budget=9)
        first, second = (request.thinking for request in server.engine.submitted)
    assert first is not None
    assert second is not None
    assert first.fragments is second.fragments
