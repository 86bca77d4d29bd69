"""Random request bodies: the response is never a 500, errors have the form of their API, and nothing keeps running."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import hypothesis.strategies as st
from hypothesis import given, settings

from jaxserve.server.anthropic.protocol import MessagesRequest
from jaxserve.server.openai.protocol import ChatRequest, CompletionRequest
from jaxserve.server.pooling.protocol import (
    ClassifyRequest,
    EmbeddingRequest,
    EncodeRequest,
    PoolingRequest,
    RerankRequest,
    ScoreRequest,
)
from jaxserve.server.responses_api.protocol import ResponsesRequest
from tests.selection import examples
from tests.server.conftest import over_asgi
from tests.server.pooling.tasks import POOLED, task_of

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.integers(-3, 300)
    | st.floats(allow_nan=True, allow_infinity=True)
    | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
NUMBER = st.integers(-2, 30) | st.floats(-3, 3) | JSON
MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "system", "developer", "tool"]) | JSON},
    optional={"content": st.text(max_size=30) | JSON, "name": JSON, "tool_calls": JSON},
)
BLOCK = st.fixed_dictionaries(
    {"type": st.sampled_from(["text", "thinking", "tool_use", "tool_result", "tool_reference", "image"]) | JSON},
    optional={name: st.text(max_size=5) | JSON for name in ("text", "thinking", "id", "name", "content", "tool_use_id")}
    | {"input": st.dictionaries(st.text(max_size=3), JSON, max_size=2), "is_error": st.booleans()},
)
BLOCKS = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "system"]), "content": st.lists(BLOCK, max_size=3)}
)
ITEM_TYPES = [
    "message", "reasoning", "function_call", "function_call_output", "custom_tool_call", "custom_tool_call_output",
    "item_reference",
]  # fmt: skip
PART = st.fixed_dictionaries({"type": st.sampled_from(["input_text", "output_text", "input_image"]) | JSON})
ITEM = st.fixed_dictionaries(
    {"type": st.sampled_from(ITEM_TYPES) | JSON},
    optional={"role": st.sampled_from(["user", "assistant", "developer"]) | JSON, "arguments": JSON, "summary": JSON}
    | {name: st.sampled_from(["c", "d"]) | JSON for name in ("id", "call_id", "name", "input", "output")}
    | {"content": st.text(max_size=5) | st.lists(PART, max_size=2) | JSON},
)
SENSIBLE: dict[str, st.SearchStrategy[Any]] = {
    "prompt": st.text(max_size=30) | st.lists(st.integers(-1, 260), max_size=5) | st.lists(st.text(), max_size=3),
    "messages": st.lists(MESSAGE | BLOCKS, max_size=3),
    "input": st.text(max_size=20) | st.lists(ITEM, max_size=4),
    "include": st.lists(st.sampled_from(["reasoning.encrypted_content", "message.output_text.logprobs"]), max_size=2),
    **{name: st.text(max_size=8) | st.lists(st.text(max_size=8), max_size=4) for name in ("text", "text_1", "text_2")},
    "query": st.text(max_size=8),
    "documents": st.lists(
        st.text(max_size=8) | st.fixed_dictionaries({"text": st.text(max_size=8) | JSON}), max_size=4
    ),
    "truncate_prompt_tokens": st.integers(-2, 70),
    "max_tokens": st.integers(0, 9),
    "max_output_tokens": st.integers(0, 9),
    "stream": st.booleans(),
    "echo": st.booleans(),
    "stop": st.lists(st.text(max_size=3), max_size=3) | st.text(max_size=3),
    "logprobs": st.integers(-1, 21) | st.booleans(),
    "logit_bias": st.dictionaries(st.integers(-1, 260).map(str) | st.text(max_size=3), NUMBER, max_size=3),
    "stream_options": st.fixed_dictionaries({}, optional={"include_usage": JSON, "x": JSON}),
    "n": st.integers(-1, 4),
    "model": st.just("tiny"),
}


def bodies(fields: tuple[str, ...], *required: str) -> st.SearchStrategy[dict[str, Any]]:
    values = {name: SENSIBLE.get(name, NUMBER) | JSON for name in fields}
    some = st.lists(st.sampled_from(fields), max_size=5, unique=True).flatmap(
        lambda names: st.fixed_dictionaries({name: values[name] for name in names})
    )
    always = st.fixed_dictionaries({name: SENSIBLE[name] for name in required})
    return st.tuples(always, some).map(lambda pair: pair[0] | pair[1])


REQUESTS = st.one_of(
    st.tuples(st.just(path), bodies(kind.__struct_fields__, *required))
    for path, kind, *required in (
        ("/v1/completions", CompletionRequest, "prompt"),
        ("/v1/chat/completions", ChatRequest, "messages"),
        ("/v1/messages", MessagesRequest, "messages", "max_tokens"),
        ("/v1/responses", ResponsesRequest, "input"),
        ("/v1/embeddings", EmbeddingRequest, "input"),
        ("/v1/rerank", RerankRequest, "query", "documents"),
        ("/v1/score", ScoreRequest, "text_1", "text_2"),
        ("/classify", ClassifyRequest, "input"),
        ("/pooling", PoolingRequest, "input"),
        ("/encode", EncodeRequest, "text"),
    )
)


def check(path: str, body: bytes) -> None:
    async def run() -> None:
        async with over_asgi(engine={"max_model_len": 64}, task=task_of(path)) as server:
            response = await server.http.post(path, content=body)
            assert response.status_code in (200, 400, 404), response.text
            if response.status_code != 200:
                assert set(response.json()) - {"type"} == {"error"}
                assert response.json()["error"]["message"]
            elif "event-stream" in response.headers["content-type"]:
                ends = "data: [DONE]", 'data: {"type":"message_stop"}', 'data: {"type":"response.'
                assert response.text.rstrip().rpartition("\n")[2].startswith(ends)
            assert server.engine.num_running == 0
            assert server.state.num_open_requests == 0

    asyncio.run(run())


@settings(max_examples=examples(300), derandomize=True)
@given(REQUESTS)
def test_any_values_in_any_fields(request_: tuple[str, dict[str, Any]]):
    path, body = request_
    check(path, json.dumps(body).encode("utf-8", "surrogatepass"))


@settings(max_examples=examples(100), derandomize=True)
@given(
    st.sampled_from(
        [
            "/v1/completions",
            "/v1/completions/render",
            "/v1/chat/completions",
            "/v1/chat/completions/render",
            "/v1/responses",
            "/v1/responses/input_tokens",
            "/v1/messages",
            "/v1/messages/count_tokens",
            *POOLED,
            "/tokenize",
            "/detokenize",
            "/abort_request",
        ]
    ),
    JSON,
)
def test_any_json(path: str, body: Any):
    check(path, json.dumps(body).encode())


@settings(max_examples=examples(100), derandomize=True)
@given(st.binary(max_size=60) | st.binary(max_size=20).map(lambda tail: b'{"prompt": "a", "user": ' + tail))
def test_any_bytes(body: bytes):
    check("/v1/completions", body)
