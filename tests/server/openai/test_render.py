"""The ids that `/v1/completions` and `/v1/chat/completions` would compute, and their errors, without generating."""

from __future__ import annotations

from typing import Any

import pytest

from tests.server.conftest import ServerUnderTest
from tests.server.openai.test_chat import HELLO

TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "añ", "max_tokens": 3, "n": 2}),
        ("/v1/completions", {"prompt": ["a", "bc"], "temperature": 0.5, "stream": True, "priority": 0}),
        ("/v1/chat/completions", {"messages": HELLO, "max_tokens": 2, "cache_salt": "mine", "rid": "own"}),
        ("/v1/chat/completions", {"messages": HELLO, "max_tokens": 2, "tools": TOOLS}),
    ],
)
async def test_a_prompt_is_rendered_as_it_would_be_computed(
    server: ServerUnderTest, path: str, body: dict[str, Any]
) -> None:
    headers = {"x-request-id": "x"}
    rendered = (await server.http.post(f"{path}/render", json=body, headers=headers)).json()
    assert server.engine.submitted == []
    answer = await server.http.post(path, json=body, headers=headers)
    assert answer.status_code == 200
    computed = [request for request in server.engine.submitted if request.sample == 0]
    prompts = rendered if path == "/v1/completions" else [rendered]
    assert [prompt["token_ids"] for prompt in prompts] == [request.prompt_ids for request in computed]
    for prompt, request in zip(prompts, computed, strict=True):
        sampling = prompt["sampling_params"]
        assert (sampling["max_tokens"], sampling["temperature"], sampling["n"]) == (
            request.sampling.max_tokens,
            request.sampling.temperature,
            request.sampling.n,
        )
        assert prompt["model"] == "tiny"
        assert prompt["stream"] is bool(body.get("stream"))
        assert (prompt["cache_salt"], prompt["priority"]) == (body.get("cache_salt"), 0)
    if not body.get("stream"):
        assert prompts[0]["request_id"] == answer.json()["id"]
    elif len(prompts) > 1:
        assert [prompt["request_id"] for prompt in prompts] == ["cmpl-x-0", "cmpl-x-1"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": ""}),
        ("/v1/completions", {"prompt": "a" * 600}),
        ("/v1/completions", {"prompt": "a", "max_tokens": 600}),
        ("/v1/completions", {"prompt": "a", "structured_outputs": {"regex": "["}}),
        ("/v1/completions", {"prompt": "a", "suffix": "b"}),
        ("/v1/completions", {"prompt": "a", "model": "other"}),
        ("/v1/chat/completions", {"messages": []}),
        ("/v1/chat/completions", {"messages": HELLO, "top_p": 2}),
        ("/v1/chat/completions", {"messages": HELLO, "tools": [{"type": "x"}]}),
    ],
)
async def test_it_refuses_what_the_real_route_refuses(server: ServerUnderTest, path: str, body: dict[str, Any]) -> None:
    refused, rendered = [await server.http.post(f"{path}{end}", json=body) for end in ("", "/render")]
    assert refused.status_code >= 400
    assert (rendered.status_code, rendered.json()) == (refused.status_code, refused.json())
