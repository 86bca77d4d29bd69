"""The settings that fill in or limit what requests of several routes ask for: arguments of the chat template, the form
of contents, and log probabilities."""

from __future__ import annotations

from typing import Any

import pytest

from jaxserve.errors import ConfigError
from tests.server.conftest import ServerUnderTest, over_asgi
from tests.server.openai.test_tools import HELLO, writes
from tests.server.pooling.tasks import EMBED, RERANK, both, only
from tests.server.tiny import tiny_tokenizer

TEMPLATE = (
    "{% for m in messages %}{{ m.content }}{% endfor %}[{{ mood }}|{{ enable_thinking }}|{{ reasoning_effort }}]"
    "{% if enable_thinking == false %}<think></think>{% endif %}"
)
DEFAULTS = {"mood": "calm", "enable_thinking": False}
CHATS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HELLO},
    "/v1/chat/completions/render": {"messages": HELLO},
    "/tokenize": {"messages": HELLO},
    "/v1/messages": {"messages": HELLO, "max_tokens": 4},
    "/v1/messages/count_tokens": {"messages": HELLO},
    "/v1/responses": {"input": "hello"},
    "/v1/responses/input_tokens": {"input": "hello"},
    "/v1/embeddings": {"messages": HELLO},
    "/pooling": {"messages": HELLO},
}


async def post(server: ServerUnderTest, path: str, status: int = 200, **body: Any) -> Any:
    answer = await server.http.post(path, json=body)
    assert answer.status_code == status, answer.text
    return answer.json()


async def prompt_of(server: ServerUnderTest, path: str, **body: Any) -> str | int:
    """Return the prompt that a route makes, or how many tokens it has."""
    answer = await post(server, path, **CHATS[path], **body)
    ids = answer.get("tokens", answer.get("token_ids"))
    if ids is None and "input_tokens" in answer:
        return int(answer["input_tokens"])
    return tiny_tokenizer().decode(ids or server.engine.submitted[-1].prompt_ids)


@pytest.mark.parametrize("path", CHATS)
async def test_defaults_of_the_template_reach_every_route(path: str):
    async with over_asgi(TEMPLATE, task=both(EMBED), default_chat_template_kwargs=DEFAULTS) as server:
        prompt = await prompt_of(server, path)
        expected = "hello[calm|False|]<think></think>"
        assert prompt == (expected if isinstance(prompt, str) else len(expected))
        if "/messages" not in path:
            given = {"mood": "merry", "enable_thinking": None}
            prompt = await prompt_of(server, path, chat_template_kwargs=given)
            expected = expected.replace("calm", "merry")
            assert prompt == (expected if isinstance(prompt, str) else len(expected))


@pytest.mark.parametrize(
    ("path", "defaults", "body", "expected"),
    [
        ("/v1/chat/completions", {"enable_thinking": False}, {"reasoning_effort": "low"}, "True|low"),
        ("/v1/chat/completions", {"enable_thinking": True}, {"reasoning_effort": "none"}, "False|none"),
        ("/v1/chat/completions", {"reasoning_effort": "high"}, {"reasoning_effort": "low"}, "|low"),
        ("/v1/chat/completions", {"enable_thinking": False}, {"reasoning": {"enabled": True}}, "True|"),
        ("/v1/chat/completions", {"reasoning_effort": "none"}, {"reasoning": {"enabled": True}}, "True|"),
        (
            "/v1/chat/completions",
            {"enable_thinking": False},
            {"reasoning_effort": "low", "chat_template_kwargs": {"enable_thinking": False}},
            "False|low",
        ),
        ("/v1/responses", {"enable_thinking": False}, {"reasoning": {"effort": "low"}}, "True|low"),
        ("/v1/messages", {"enable_thinking": False}, {"thinking": {"type": "adaptive"}}, "True|"),
        ("/v1/messages", {"enable_thinking": True}, {"thinking": {"type": "disabled"}}, "False|"),
    ],
)
async def test_what_a_request_says_of_reasoning_wins(
    path: str, defaults: dict[str, Any], body: dict[str, Any], expected: str
):
    async with over_asgi(TEMPLATE, default_chat_template_kwargs=defaults) as server:
        prompt = str(await prompt_of(server, path, **body))
    assert prompt.partition("[")[2].partition("]")[0] == f"|{expected}"


async def test_an_answer_is_read_as_the_defaults_begin_it():
    """The template ends the reasoning in the prompt, so that a form holds all of the answer."""
    form = {"response_format": {"type": "json_object"}}
    grammars = []
    for defaults in (None, DEFAULTS):
        async with over_asgi(
            TEMPLATE, engine=writes("{}"), default_chat_template_kwargs=defaults, reasoning_parser="qwen3"
        ) as server:
            await post(server, "/v1/chat/completions", messages=HELLO, **form)
            grammars.append(server.engine.submitted[0].grammar)
    assert ["thinking" in grammar for grammar in grammars] == [True, False]


async def test_defaults_reach_a_template_of_queries_and_documents():
    template = (
        "{% for m in messages %}{% if m.role == 'query' or m.role == 'document' %}{{ m.content }};{% endif %}"
        "{% endfor %}{{ mood }}"
    )
    body = {"query": "q", "documents": ["d"]}
    async with over_asgi(template, task=only(RERANK), default_chat_template_kwargs={"mood": "calm"}) as server:
        for more, mood in (({}, b"calm"), ({"chat_template_kwargs": {"mood": "merry"}}, b"merry")):
            await post(server, "/v1/rerank", **body, **more)
            assert server.engine.submitted[-1].prompt_ids == [*b"q;d;", *mood]


async def test_a_wrong_default_ends_the_start():
    with pytest.raises(ConfigError, match=r"default_chat_template_kwargs\.tools"):
        async with over_asgi(TEMPLATE, default_chat_template_kwargs={"tools": []}):
            pass


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
async def test_the_form_of_contents_reaches_the_template(path: str):
    template = "{% for m in messages %}{{ m.content is string }}{% endfor %}"
    for content_format, expected in (("auto", "True"), ("string", "True"), ("openai", "False")):
        async with over_asgi(template, chat_template_content_format=content_format) as server:
            assert await prompt_of(server, path) == expected


@pytest.mark.parametrize(
    ("path", "name", "body"),
    [
        ("/v1/completions", "logprobs", {"prompt": "a", "max_tokens": 2}),
        ("/v1/completions", "logprobs", {"prompt": "a", "max_tokens": 0, "echo": True}),
        ("/v1/completions/render", "logprobs", {"prompt": "a"}),
        ("/v1/chat/completions", "top_logprobs", {"messages": HELLO, "logprobs": True, "max_tokens": 2}),
        ("/v1/responses", "top_logprobs", {"input": "a", "max_output_tokens": 2}),
        ("/generate", "top_logprobs_num", {"text": "a", "return_logprob": True, "logprob_start_len": 0}),
    ],
)
async def test_more_alternatives_than_the_server_allows_are_refused(path: str, name: str, body: dict[str, Any]):
    async with over_asgi(max_logprobs=3) as server:
        schemas = (await server.http.get("/openapi.json")).json()["components"]["schemas"]
        limits = [
            one.get("maximum")
            for kind in ("CompletionRequest", "ChatRequest", "ResponsesRequest", "GenerateRequest")
            for one in schemas[kind]["properties"].get(name, {}).get("anyOf", ())
            if one["type"] == "integer"
        ]
        assert limits
        assert set(limits) == {3}
        await post(server, path, **body, **{name: 3})
        error = (await post(server, path, 400, **body, **{name: 4}))["error"]
    assert error["param"] == name
    assert "at most 3, got 4" in error["message"]
    assert "--max-logprobs" in error["message"]
