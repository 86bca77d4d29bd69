"""`allow_auto_truncate`: prompts that don't fit lose their end, and limits of answers are what the context leaves."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from tests.server.conftest import ServerUnderTest, over_asgi
from tests.server.pooling.tasks import EMBED, both

LENGTH = 64
LONG = "ab" * LENGTH
KEPT = [*LONG.encode()][: LENGTH - 1]
CHAT = [{"role": "user", "content": LONG}]


async def ask(server: ServerUnderTest, path: str, **body: Any) -> Any:
    response = await server.http.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


def truncating(**settings: Any) -> Any:
    return over_asgi(engine={"max_model_len": LENGTH}, allow_auto_truncate=True, **settings)


@pytest.mark.parametrize("prompt", [LONG, [*LONG.encode()], [LONG, LONG]])
async def test_completions(prompt: Any, caplog: pytest.LogCaptureFixture):
    async with truncating() as server:
        with caplog.at_level(logging.WARNING, "jaxserve.server"):
            answer = await ask(server, "/v1/completions", prompt=prompt, max_tokens=10)
    assert f"{2 * LENGTH} tokens of prompt are truncated to the first {LENGTH - 1}" in caplog.text
    assert {(tuple(one.prompt_ids), one.sampling.max_tokens) for one in server.engine.submitted} == {(tuple(KEPT), 1)}
    assert answer["usage"]["prompt_tokens"] == len(server.engine.submitted) * (LENGTH - 1)


async def test_an_echo_is_what_was_computed():
    async with truncating() as server:
        answer = await ask(server, "/v1/completions", prompt=LONG, max_tokens=0, echo=True, logprobs=0)
    [choice] = answer["choices"]
    assert choice["text"] == LONG[: LENGTH - 1]
    assert choice["logprobs"]["text_offset"] == [*range(LENGTH - 1)]


async def test_every_route_that_generates():
    async with truncating() as server:
        answer = await ask(server, "/generate", text=LONG, sampling_params={"max_new_tokens": 10})
        assert answer["meta_info"]["prompt_tokens"] == LENGTH - 1
        chat = await ask(server, "/v1/chat/completions", messages=CHAT, max_tokens=10)
        assert chat["usage"]["prompt_tokens"] == LENGTH - 1
        rendered = await ask(server, "/v1/chat/completions/render", messages=CHAT)
        counted = await ask(server, "/tokenize", messages=CHAT)
        assert rendered["token_ids"] == counted["tokens"][: LENGTH - 1]
        message = await ask(server, "/v1/messages", messages=CHAT, max_tokens=10)
        assert message["usage"]["input_tokens"] == LENGTH - 1
        response = await ask(server, "/v1/responses", input=CHAT, max_output_tokens=10)
        assert response["usage"]["input_tokens"] == LENGTH - 1


async def test_limits_of_answers_shrink():
    async with truncating() as server:
        await ask(server, "/v1/completions", prompt="abcd", max_tokens=10**6)
        await ask(server, "/generate", text="abcd", sampling_params={"max_new_tokens": 10**6})
        assert [one.sampling.max_tokens for one in server.engine.submitted] == [LENGTH - 4] * 2
        schemas = (await server.http.get("/openapi.json")).json()["components"]["schemas"]
        assert {"type": "integer", "minimum": 0, "maximum": 2**31 - 1} in [
            {name: one[name] for name in ("type", "minimum", "maximum") if name in one}
            for one in schemas["CompletionRequest"]["properties"]["max_tokens"]["anyOf"]
        ]


async def test_truncation_auto_still_leaves_out_the_oldest_messages():
    history = [{"role": role, "content": "old " * 10} for role in ("user", "assistant")]
    async with truncating() as server:
        question = [{"role": "user", "content": "now"}]
        response = await ask(server, "/v1/responses", input=[*history, *question], truncation="auto")
        alone = await ask(server, "/v1/responses/input_tokens", input=question)
        assert response["usage"]["input_tokens"] == alone["input_tokens"]
        whole = await ask(server, "/v1/responses", input=CHAT, truncation="auto")
        assert whole["usage"]["input_tokens"] == LENGTH - 1


async def test_texts_for_embeddings_and_scores():
    async with truncating(task=both(EMBED)) as server:
        for path, body in (
            ("/v1/embeddings", {"input": LONG}),
            ("/v1/embeddings", {"input": [[*LONG.encode()]]}),
            ("/encode", {"text": LONG}),
            ("/v1/score", {"text_1": LONG, "text_2": LONG}),
        ):
            await ask(server, path, **body)
        assert {len(one.prompt_ids) for one in server.engine.submitted} == {LENGTH}
