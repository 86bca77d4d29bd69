"""Fields that ask for nothing: each is taken by each route, changes no prompt, and is refused if it asks for something.

The values are those that clients and gateways were seen to send.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from jaxserve.server.app import _POSTS
from jaxserve.server.generation.inert_fields import InertFields, InertToolFields
from jaxserve.server.http.fields import _unsupported_fields
from tests.server.conftest import ServerUnderTest, over_asgi
from tests.server.openai.test_chat import HELLO
from tests.server.pooling.tasks import POOLED, task_of

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": HELLO, "max_tokens": 1},
    "/v1/completions": {"prompt": "a", "max_tokens": 1},
    "/generate": {"text": "a", "sampling_params": {"max_new_tokens": 1}},
    MESSAGES: {"messages": HELLO, "max_tokens": 1},
    RESPONSES: {"input": "a", "max_output_tokens": 1},
    **POOLED,
}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


def message_tool(**more: Any) -> dict[str, Any]:
    return {"name": "f", "input_schema": SCHEMA} | more


def chat_tool(**more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": SCHEMA}} | more


def chat_function(**more: Any) -> dict[str, Any]:
    return chat_tool(function={"name": "f", "parameters": SCHEMA} | more)


def chat_custom(**more: Any) -> dict[str, Any]:
    return {"type": "custom", "custom": {"name": "f"} | more}


def response_tool(**more: Any) -> dict[str, Any]:
    return {"type": "function", "name": "f", "parameters": SCHEMA} | more


def response_custom(**more: Any) -> dict[str, Any]:
    return {"type": "custom", "name": "f"} | more


# Where tools have fields: a path, the place in a tool, and the tool with more fields there.
TOOLS: list[tuple[str, str, Callable[..., dict[str, Any]]]] = [
    (MESSAGES, "", message_tool),
    (CHAT, "", chat_tool),
    (CHAT, "function.", chat_function),
    (CHAT, "custom.", chat_custom),
    (RESPONSES, "", response_tool),
    (RESPONSES, "", response_custom),
]

# Values that ask for nothing, on all routes; then those of single routes.
HARMLESS: dict[str, list[Any]] = {
    "user": ["u", {"id": 1}],
    "metadata": [{"user_id": "u"}],
    "client_metadata": [{"x-codex-installation-id": "i"}],
    "safety_identifier": ["s"],
    "prompt_cache_key": ["k"],
    "prompt_cache_retention": ["24h"],
    "prompt_cache_options": [{"mode": "implicit"}],
    "service_tier": ["auto", "default", "standard_only"],
    "store": [False],
    "background": [False],
    "background_options": [{}],
    "include": [[]],
    "moderation": [None],
    "access_programs": [{}],
    "previous_response_id": [None],
    "conversation": [None],
    "truncation": ["disabled"],
    "web_search_options": [{}],
    "cache_control": [{"type": "ephemeral"}],
    "user_profile_id": ["p"],
    "workspace_id": ["w"],
    "betas": [["a-2025"]],
    "anthropic_beta": [["a-2025"]],
    "anthropic_version": ["bedrock-2023-05-31"],
    "container": [None],
    "inference_geo": [None],
    "speed": ["standard"],
    "mcp_servers": [[]],
    "billing_policy": [None],
    "compaction": [None],
    "context_management": [None],
    "fallbacks": [[]],
    "fallback_credit_token": [None],
    "thread": [None],
    "trace": [{"trace_id": "t"}],
    "models": [[]],
    "provider": [{}],
    "route": ["fallback"],
    "preset": [None],
    "plugins": [[]],
    "transforms": [[]],
    "usage": [{}, {"include": True}],
    "provider_specific_fields": [{}],
    "extra_body": [{}],
    "extra_headers": [{}],
    "extra_query": [{}],
    "timeout": [None],
}
OF_ROUTES: dict[str, dict[str, list[Any]]] = {
    CHAT: {
        "tools": [[]],
        "functions": [[]],
        "modalities": [[], ["text"]],
        "text": [{}],
        "thinking": [None],
        "context_management": [[], {}],
    },
    "/v1/completions": {"suffix": [""], "context_management": [[], {}]},
    RESPONSES: {"tools": [[]], "text": [{}], "reasoning": [{}], "instructions": [""], "stream": [False]},
    MESSAGES: {"tools": [[]], "system": [[]], "context_management": [{"edits": []}], "diagnostics": [{}]},
}
# A value that asks for something, and a word of the advice.
HARMFUL: dict[str, tuple[Any, str]] = {
    "service_tier": ("priority", "leave it out"),
    "store": (True, "whole conversation"),
    "background": (True, "stream the response"),
    "background_options": ({"completion_window": "2h"}, "leave it out"),
    "include": (["reasoning.encrypted_content"], "leave it out"),
    "moderation": ({"model": "m"}, "leave it out"),
    "access_programs": ({"cyber": "daybreak_red"}, "leave it out"),
    "previous_response_id": ("resp_1", "whole conversation"),
    "conversation": ("conv_1", "whole conversation"),
    "truncation": ("auto", "shorten"),
    "web_search_options": ({"search_context_size": "low"}, "offer your own in tools"),
    "container": ("c", "offer your own in tools"),
    "inference_geo": ("eu", "leave it out"),
    "speed": ("fast", "leave it out"),
    "mcp_servers": ([{"type": "url"}], "offer your own in tools"),
    "billing_policy": ({"type": "p"}, "leave it out"),
    "compaction": ({"type": "c"}, "shorten"),
    "context_management": ([{"type": "compaction"}], "shorten"),
    "fallbacks": ([{"model": "m"}], "leave it out"),
    "fallback_credit_token": ("t", "leave it out"),
    "thread": ({"id": "t"}, "whole conversation"),
    "models": (["a", "b"], "leave it out"),
    "provider": ({"order": ["a"]}, "leave it out"),
    "route": ("sort", "leave it out"),
    "preset": ("p", "leave it out"),
    "plugins": ([{"id": "web"}], "offer your own in tools"),
    "transforms": (["middle-out"], "shorten"),
    "provider_specific_fields": ({"a": 1}, "leave it out"),
    "extra_body": ({"top_k": 1}, "beside the others"),
    "extra_headers": ({"a": "b"}, "as headers"),
    "extra_query": ({"a": "b"}, "leave it out"),
    "timeout": (60, "close the connection"),
}
HARMFUL_OF_ROUTES: dict[str, dict[str, tuple[Any, str]]] = {
    CHAT: {
        "functions": ([{"name": "f"}], "tools"),
        "function_call": ({"name": "f"}, "tool_choice"),
        "audio": ({"voice": "v"}, "text"),
        "modalities": (["text", "audio"], "text"),
        "text": ({"format": {"type": "text"}}, "response_format"),
        "thinking": ({"type": "disabled"}, "reasoning_effort"),
        "enable_thinking": (False, "reasoning"),
        "prompt_logprobs": (1, "/v1/completions"),
        "use_beam_search": (True, "temperature: 0"),
        "truncate_prompt_tokens": (8, "/tokenize"),
        "logits_processors": (["p"], "logit_bias"),
        "lora_path": ("l", "merged"),
        "chat_template": ("{{ 1 }}", "--trust-request-chat-template"),
        "input_ids": ([1], "/v1/completions"),
    },
    "/v1/completions": {"suffix": ("s", "infilling")},
    RESPONSES: {"conversation": ("conv_1", "previous_response_id"), "prompt": ({"id": "p"}, "instructions")},
}


async def prompt_of(server: ServerUnderTest, path: str, **given: Any) -> list[int]:
    """Return the prompt of a request, which must be answered."""
    response = await server.http.post(path, json=BODIES[path] | given)
    assert response.status_code == 200, (path, given, response.text)
    return server.engine.submitted[-1].prompt_ids


async def refusal(server: ServerUnderTest, path: str, **given: Any) -> str:
    """Return the message of the 400 that a request gets."""
    response = await server.http.post(path, json=BODIES[path] | given)
    assert response.status_code == 400, (path, given, response.text)
    return response.json()["error"]["message"]


def refusable(kind: type[msgspec.Struct]) -> set[str]:
    """Return the fields of a request that are accepted only while they ask for nothing."""
    return {field.name for field, _ in _unsupported_fields(kind)}


def test_the_tables_have_every_field():
    assert HARMLESS.keys() == set(InertFields.__struct_fields__)
    assert HARMFUL.keys() == refusable(InertFields)


@pytest.mark.parametrize("path", BODIES)
async def test_what_asks_for_nothing_changes_nothing(path: str):
    fields = HARMLESS | OF_ROUTES.get(path, {})
    async with over_asgi(engine={"max_model_len": 4096}, task=task_of(path)) as server:
        plain = await prompt_of(server, path)
        for name, values in fields.items():
            for value in (None, *values) if name != "system" else values:
                assert await prompt_of(server, path, **{name: value}) == plain
        assert await prompt_of(server, path, **{name: values[-1] for name, values in fields.items()}) == plain


@pytest.mark.parametrize("path", BODIES)
async def test_what_asks_for_something_is_refused_with_advice(path: str):
    [kind] = [item.body for item, _ in _POSTS if item.path == path]
    # Where a field means something, the route has it with another type.
    fields = {name: one for name, one in HARMFUL.items() if name in refusable(kind)} | HARMFUL_OF_ROUTES.get(path, {})
    assert len(fields) > len(HARMFUL) // 2
    async with over_asgi(task=task_of(path)) as server:
        for name, (value, advice) in fields.items():
            message = await refusal(server, path, **{name: value})
            assert message.startswith(f"{name} is not supported"), message
            assert advice in message
        assert not server.engine.submitted


@pytest.mark.parametrize("include", [True, False])
@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
async def test_openrouters_usage_asks_streams_for_counts(server: ServerUnderTest, path: str, include: bool):
    response = await server.http.post(path, json=BODIES[path] | {"stream": True, "usage": {"include": include}})
    assert ('"total_tokens":' in response.text) == include


TOOL_FIELDS: dict[str, list[Any]] = {
    "cache_control": [{"type": "ephemeral"}],
    "defer_loading": [False],
    "allowed_callers": [["direct"]],
    "eager_input_streaming": [True],
    "input_examples": [[{"a": 1}]],
    "output_schema": [SCHEMA],
    "async": [False],
    "provider_specific_fields": [{}],
}


def test_the_table_of_tools_has_every_field():
    assert TOOL_FIELDS.keys() == set(InertToolFields.__struct_encode_fields__)


@pytest.mark.parametrize(("path", "place", "tool"), TOOLS)
async def test_fields_of_tools_that_ask_for_nothing_change_nothing(
    path: str, place: str, tool: Callable[..., dict[str, Any]]
):
    async with over_asgi(engine={"max_model_len": 4096}) as server:
        plain = await prompt_of(server, path, tools=[tool()])
        for name, values in TOOL_FIELDS.items():
            for value in (None, *values):
                assert await prompt_of(server, path, tools=[tool(**{name: value})]) == plain
        every = {name: values[-1] for name, values in TOOL_FIELDS.items()}
        assert await prompt_of(server, path, tools=[tool(**every)]) == plain
        for name, value in (("async", True), ("provider_specific_fields", {"a": 1})):
            message = await refusal(server, path, tools=[tool(**{name: value})])
            assert message.startswith(f"tools[0].{place}{name} is not supported")
            assert "leave it out" in message
        if path == MESSAGES:
            for given in ({**tool(), "type": None}, tool(strict=None)):
                assert await prompt_of(server, path, tools=[given]) == plain


# Shows templates' view: every key of a message.
SHOWS_ALL = "{% for m in messages %}{{ m | tojson }}{% endfor %}"
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}


async def test_what_answers_are_sent_back_with_reaches_no_template():
    extras = dict.fromkeys(
        ("name", "refusal", "audio", "function_call", "annotations", "provider_specific_fields", "reasoning_details",
         "reasoning_content", "prefix", "partial", "phase", "cache_control")
    )  # fmt: skip
    full = {"annotations": [], "cache_control": {"type": "ephemeral"}, "provider_specific_fields": {"a": 1}}
    inside = CALL | {"index": 0, "provider_specific_fields": None, "cache_control": None}
    texts = [{"type": "text", "text": "a"}]
    marked = [texts[0] | {"cache_control": {"type": "ephemeral"}, "annotations": None, "provider_specific_fields": {}}]
    answer, called = {"role": "assistant", "content": "b"}, {"role": "assistant", "content": None, "tool_calls": [CALL]}
    async with over_asgi(SHOWS_ALL, engine={"max_model_len": 4096}) as server:

        async def shown(*messages: dict[str, Any]) -> list[int]:
            return await prompt_of(server, CHAT, messages=[*messages, *HELLO])

        plain = await shown(answer)
        for more in (*({name: value} for name, value in (extras | full).items()), extras, full):
            assert await shown(answer | more) == plain, more
        assert await shown(answer | {"tool_calls": []}) == plain
        assert await shown(answer | {"tool_calls": None}) == plain
        assert await shown(called | {"tool_calls": [inside]}) == await shown(called)
        assert await shown({"role": "user", "content": marked}) == await shown({"role": "user", "content": texts})


@pytest.mark.parametrize(
    ("more", "advice"),
    [
        ({"function_call": {"name": "f", "arguments": "{}"}}, "tool_calls"),
        ({"audio": {"id": "a"}}, "content"),
        ({"prefix": True}, "continue_final_message"),
        ({"partial": True}, "continue_final_message"),
        ({"content": [{"type": "image_url", "image_url": {"url": "u"}}]}, "describe them in a text"),
    ],
)
async def test_refused_parts_of_messages_say_what_to_do(server: ServerUnderTest, more: dict[str, Any], advice: str):
    message = await refusal(server, CHAT, messages=[{"role": "assistant", "content": "b"} | more, *HELLO])
    assert message.startswith(f"messages[0].{next(iter(more))}")
    assert advice in message
