"""The settings of streams, on all routes that stream: how many tokens a chunk has, token counts, and that no answer
changes by them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.server.anthropic import test_messages as anthropic
from tests.server.conftest import ServerUnderTest, over_asgi
from tests.server.openai import test_tools as chat
from tests.server.openai.test_completions import complete, events, letters, stream
from tests.server.responses_api import ask as responses

ANSWER = f"<think>\nI must look, first of all.</think>I look at the map.\n{chat.CALL}\n{chat.CALL}\nThat is all."
COMPLETION = {"prompt": "a", "max_tokens": 20}


async def chunks_of(server: ServerUnderTest, path: str, **body: Any) -> list[dict[str, Any]]:
    return events(await server.http.post(path, json={"stream": True} | body))


def sizes(chunks: list[dict[str, Any]]) -> list[int]:
    """Return the number of tokens of each chunk of a stream of completions."""
    return [len(chunk["choices"][0]["token_ids"]) for chunk in chunks]


@pytest.mark.parametrize(
    ("per_step", "default", "asked", "expected"),
    [
        (1, 1, None, [1] * 20),
        (1, 6, None, [1, 6, 6, 6, 1]),
        (1, 6, 2, [1, 6, 6, 6, 1]),
        (1, 2, 9, [1, 9, 9, 1]),
        (1, 1, 50, [1, 19]),
        (4, 6, None, [4, 8, 8]),
    ],
)
async def test_a_chunk_has_the_tokens_of_the_interval(
    per_step: int, default: int, asked: int | None, expected: list[int]
):
    async with over_asgi(engine={"tokens_per_step": per_step}, stream_interval=default) as server:
        chunks = await stream(server, **COMPLETION, return_token_ids=True, stream_interval=asked)
        whole = await complete(server, **COMPLETION, stream_interval=asked)
    assert sizes(chunks) == expected
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == whole["choices"][0]["text"]


async def test_every_route_has_the_interval():
    asked = {"max_tokens": 20, "messages": chat.HELLO, "stream": True}
    expected = [1, 6, 6, 6, 1]
    async with over_asgi(stream_interval=6) as server:
        chunks = await chunks_of(server, "/v1/chat/completions", **asked)
        further = await chunks_of(server, "/v1/chat/completions", **asked, stream_interval=9)
        blocks = anthropic.events(await server.http.post("/v1/messages", json=asked))
        items = await responses.stream(server, max_output_tokens=20)
    texts = [[chunk["choices"][0]["delta"]["content"] for chunk in chunks[1:]] for chunks in (chunks, further)]
    texts.append([event["delta"]["text"] for event in blocks if event["type"] == "content_block_delta"])
    texts.append([event["delta"] for event in items if event["type"] == "response.output_text.delta"])
    assert [[*map(len, found)] for found in texts] == [expected, [1, 9, 9, 1], expected, expected]


async def test_each_sequence_of_generate_may_have_its_interval():
    sampling = [{"max_new_tokens": 8, "stream_interval": asked} for asked in (None, 1, 5)]
    async with over_asgi(stream_interval=3) as server:
        chunks = await chunks_of(server, "/generate", text=["a", "b", "c"], sampling_params=sampling)
    counts = [
        [chunk["meta_info"]["completion_tokens"] for chunk in chunks if chunk["index"] == index] for index in range(3)
    ]
    assert counts == [[1, 4, 7, 8], [1, 2, 3, 4, 5, 6, 7, 8], [1, 6, 8]]


@pytest.mark.parametrize("interval", [2, 7, 1000])
async def test_answers_are_the_same_with_any_interval(interval: int):
    offered = [{"name": "weather", "input_schema": chat.SCHEMA}]
    async with over_asgi(chat.THINKS, engine=chat.writes(ANSWER), stream_interval=interval) as server:
        choice = await chat.ask_both_ways(server, tools=chat.TOOLS)
        await anthropic.ask_both_ways(server, tools=offered)
        await anthropic.ask_both_ways(server, tools=offered, stop_sequences=["the map"])
        await responses.ask_both_ways(server, tools=[responses.WEATHER])
        await responses.ask_both_ways(server, include=["message.output_text.logprobs"])
    assert len(choice["message"]["tool_calls"]) == 2
    assert choice["message"]["reasoning_content"] == "I must look, first of all."


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("stop", [None, "mno"])
async def test_log_probabilities_and_stop_strings_with_an_interval(path: str, stop: str | None):
    asked = {"prompt": "a", "logprobs": 2} if path == "/v1/completions" else {"messages": chat.HELLO, "logprobs": True}
    body = {"max_tokens": 26, "stop": stop, **asked}
    async with over_asgi(stream_interval=4) as server:
        whole = (await server.http.post(path, json=body)).json()["choices"][0]
        parts = [chunk["choices"][0] for chunk in await chunks_of(server, path, **body)]
        assert len(server.engine.aborted) == (0 if stop is None else 2)
    for name in whole["logprobs"]:
        found = [entry for part in parts if part["logprobs"] for entry in part["logprobs"][name] or ()]
        assert found == (whole["logprobs"][name] or [])
    for name in ("finish_reason", "stop_reason", "matched_stop"):
        assert parts[-1][name] == whole[name]


async def test_an_interval_hides_no_token_from_the_metrics():
    counts = []
    for interval in (1, 5):
        async with over_asgi(stream_interval=interval) as server:
            await stream(server, **COMPLETION)
            lines = (await server.http.get("/metrics")).text.splitlines()
        counts.append([line for line in lines if "inter_token_latency_seconds_count" in line])
    assert counts[0] == counts[1] != []


async def test_an_aborted_stream_loses_no_token():
    async with over_asgi(stream_interval=100) as server:
        server.engine.hold()
        asking = asyncio.create_task(stream(server, **COMPLETION))
        await server.engine.wait_for(lambda: server.engine.num_running == 1)
        for _ in range(5):
            await server.engine.step()
        await server.state.abort(None)
        server.engine.release()
        first, last = [chunk["choices"][0] for chunk in await asking]
    assert (first["text"], last["text"]) == (letters("a", 5)[:1], letters("a", 5)[1:])
    assert last["finish_reason"] == "abort"


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("options", [None, {"include_usage": False}, {"continuous_usage_stats": True}])
@pytest.mark.parametrize("setting", ["enable_force_include_usage", "stream_response_default_include_usage"])
async def test_token_counts_without_being_asked_for(path: str, options: dict[str, Any] | None, setting: str):
    prompt = {"prompt": "hello"} if path == "/v1/completions" else {"messages": chat.HELLO}
    async with over_asgi(**{setting: True}) as server:
        *chunks, last = await chunks_of(server, path, **prompt, max_tokens=3, stream_options=options)
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 3
    counts = [chunk["usage"] and chunk["usage"]["completion_tokens"] for chunk in chunks]
    if setting == "enable_force_include_usage" or (options and "continuous_usage_stats" in options):
        assert counts == [*range(4 - len(counts), 4)]
    else:
        assert counts == [None] * len(chunks)


async def test_a_stream_of_generate_may_have_only_what_is_new():
    body = {
        "text": ["ab", "b"],
        "sampling_params": {"max_new_tokens": 7, "stream_interval": 3, "stop": letters("b", 9)[5:7]},
        "return_logprob": True,
        "logprob_start_len": 0,
        "top_logprobs_num": 1,
    }
    async with over_asgi(incremental_streaming_output=True) as server:
        whole = (await server.http.post("/generate", json=body)).json()
        chunks = await chunks_of(server, "/generate", **body)
    for index, output in enumerate(whole):
        mine = [chunk for chunk in chunks if chunk["index"] == index]
        assert len(mine) > 2
        assert "".join(chunk["text"] for chunk in mine) == output["text"]
        assert [token for chunk in mine for token in chunk["output_ids"]] == output["output_ids"]
        for name in ("output_token_logprobs", "output_top_logprobs"):
            assert [entry for chunk in mine for entry in chunk["meta_info"][name]] == output["meta_info"][name]
        for name in ("input_token_logprobs", "input_top_logprobs"):
            assert [chunk["meta_info"][name] for chunk in mine] == [output["meta_info"][name]] * len(mine)
        assert mine[-1]["meta_info"]["finish_reason"] == output["meta_info"]["finish_reason"]
        assert mine[-1]["meta_info"]["completion_tokens"] == output["meta_info"]["completion_tokens"]
