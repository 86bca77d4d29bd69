"""Each public gateway, as PyPI has it, before two servers: clients, loads, a server that is killed and comes back."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import time
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import openai
import pytest
import zmq

from tests.e2e.gateways import GATEWAYS, HEADERS, KEY, Worker, gateway, reach, until
from tests.selection import grid

pytestmark = pytest.mark.process

POLICIES = [
    *(("sglang_router", policy) for policy in ("power_of_two", "cache_aware", "random", "manual")),
    *(("smg", policy) for policy in ("least_load", "power_of_two", "cache_aware", "random", "manual")),
    *(("smg", policy) for policy in ("prefix_hash", "consistent_hashing")),
    *(("vllm_router", policy) for policy in ("cache_aware", "power_of_two", "random", "consistent_hash")),
    ("vllm_router", "sticky_least_loaded"),
]
# Those that ask the servers for more than health.
INFORMED = [("sglang_router", "power_of_two"), ("smg", "least_load"), ("vllm_router", "cache_aware")]
CALL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}


@pytest.fixture(scope="module")
def workers() -> Iterator[list[Worker]]:
    found = [Worker(), Worker()]
    try:
        for worker in found:
            worker.wait_until_ready()
        yield found
    finally:
        for worker in found:
            worker.kill()


@pytest.fixture(scope="module", params=GATEWAYS)
def name(request: pytest.FixtureRequest) -> str:
    return installed(request.param)


@pytest.fixture(scope="module")
def url(name: str, workers: list[Worker]) -> Iterator[str]:
    with gateway(name, workers, "round_robin") as found:
        reach(found, workers)
        yield found


def installed(name: str) -> str:
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed")
    return name


def post(url: str, path: str, body: dict[str, Any]) -> httpx.Response:
    return httpx.post(f"{url}{path}", json={"model": "fake"} | body, headers=HEADERS, timeout=60)


def test_official_clients(name: str, url: str) -> None:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0)
    hello: list[Any] = [{"role": "user", "content": "hi"}]
    chat: dict[str, Any] = {"model": "fake", "messages": hello, "max_tokens": 3}
    assert client.chat.completions.create(**chat, tools=[CALL]).usage.completion_tokens == 3
    chunks = list(client.chat.completions.create(**chat, stream=True, stream_options={"include_usage": True}))
    assert chunks[-1].usage.completion_tokens == 3
    assert client.completions.create(model="fake", prompt="abc", max_tokens=3).usage.completion_tokens == 3
    with pytest.raises(openai.BadRequestError, match="top_p"):
        client.chat.completions.create(**chat, extra_body={"top_p": 2.5})
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=f"{url}/v1", api_key="another", max_retries=0).chat.completions.create(**chat)

    claude = anthropic.Anthropic(base_url=url, auth_token=KEY, max_retries=0)
    if name == "sglang_router":  # it has no such route
        with pytest.raises(anthropic.NotFoundError):
            claude.messages.create(**chat)
        return
    assert claude.messages.create(**chat).usage.output_tokens == 3
    with claude.messages.stream(**chat) as stream:
        assert stream.get_final_message().usage.output_tokens == 3
    assert claude.messages.count_tokens(model="fake", messages=hello).input_tokens > 0


def test_other_routes(name: str, url: str) -> None:
    answer = post(url, "/generate", {"text": "abc", "sampling_params": {"max_new_tokens": 3}})
    assert answer.json()["meta_info"]["completion_tokens"] == 3
    # smg writes a model of its own where there is none
    unnamed = {"text": "abc", "sampling_params": {"max_new_tokens": 3}, "stream": True}
    streamed = httpx.post(f"{url}/generate", json=unnamed, headers=HEADERS)
    assert '"completion_tokens":3' in streamed.text
    response = post(url, "/v1/responses", {"input": "abc", "max_output_tokens": 3})
    assert (response.status_code, response.json()["usage"]["output_tokens"]) == (200, 3)
    streamed = post(url, "/v1/responses", {"input": "abc", "max_output_tokens": 3, "stream": True})
    assert "event: response.incomplete" in streamed.text
    if name != "vllm_router":  # it sends no key with this
        assert httpx.post(f"{url}/flush_cache", headers=HEADERS).status_code == 200


async def test_a_killed_server_costs_its_streams_and_comes_back(url: str, workers: list[Worker]) -> None:
    victim = workers[1]
    body = {"model": "fake", "prompt": "abc", "max_tokens": 20}
    async with httpx.AsyncClient(base_url=url, headers=HEADERS, timeout=60) as http:
        streams = []
        for _ in range(4):  # one after the other, so that each server gets some
            begun = asyncio.Event()
            streams.append(asyncio.ensure_future(_stream_ends_well(http, begun)))
            await begun.wait()
        whole = [asyncio.ensure_future(http.post("/v1/completions", json=body)) for _ in range(8)]
        await asyncio.to_thread(until, lambda: victim.num_running() > 2)
        victim.kill()
        try:
            answers = await asyncio.gather(*whole)
            ends = await asyncio.gather(*streams)
        finally:
            victim.start()
            await asyncio.to_thread(victim.wait_until_ready)
    assert [answer.status_code for answer in answers] == [200] * 8
    assert {answer.json()["usage"]["completion_tokens"] for answer in answers} == {20}
    assert set(ends) == {True, False}
    await asyncio.to_thread(reach, url, [victim])


async def _stream_ends_well(http: httpx.AsyncClient, begun: asyncio.Event) -> bool:
    """Whether a stream has all its tokens; else it ends with an error."""
    body = {"model": "fake", "prompt": "abc", "max_tokens": 100, "stream": True, "return_token_ids": True}
    events: list[dict[str, Any]] = []
    try:
        async with http.stream("POST", "/v1/completions", json=body) as answer:
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    events.append(json.loads(line.removeprefix("data: ")))
                    begun.set()
    except httpx.RemoteProtocolError:
        return False
    finally:
        begun.set()
    if "error" in events[-1]:
        return False
    assert sum(len(event["choices"][0]["token_ids"]) for event in events) == 100
    return True


@pytest.mark.parametrize(("gateway_name", "policy"), grid(POLICIES, lambda pair: pair in INFORMED))
def test_policies(gateway_name: str, policy: str, workers: list[Worker]) -> None:
    for worker in workers:
        worker.wait_until_ready()
    with gateway(installed(gateway_name), workers, policy) as url:
        chat = {"messages": [{"role": "user", "content": "a b c " * 20}], "max_tokens": 2}
        for _ in range(4):
            assert post(url, "/v1/chat/completions", chat).status_code == 200
        if gateway_name != "vllm_router":
            body = {"model": "fake", "prompt": "abc", "max_tokens": 200, "stream": True}
            with httpx.stream("POST", f"{url}/v1/completions", json=body, headers=HEADERS) as running:
                lines = running.iter_lines()  # the request is aborted when they are collected
                next(lines)
                until(lambda: max(_loads(url)) > 0)
        elif policy == "cache_aware":
            path = "/v1/chat/completions/render"
            assert sum(worker.answered(path) for worker in workers) > 0
            assert sum(worker.answered(path, "4xx") for worker in workers) == 0


def test_events_say_where_a_prefix_is(workers: list[Worker]) -> None:
    for worker in workers:
        worker.wait_until_ready()
    with (
        gateway(installed("vllm_router"), workers, "kv_aware") as url,
        zmq.Context() as context,
        context.socket(zmq.SUB) as heard,
    ):
        heard.subscribe("")
        for worker in workers:
            heard.connect(worker.events)
            while not heard.poll(100):
                post(worker.url, "/v1/completions", {"prompt": str(time.monotonic())})
        for number in range(6):
            body = {"prompt": f"{number} is the number of this prompt", "max_tokens": 1}
            assert post(workers[number % 2].url, "/v1/completions", body).status_code == 200
            while heard.poll(100):  # until this test has heard of all pages, and with it the gateway
                heard.recv_multipart()
            usage = post(url, "/v1/completions", body).json()["usage"]
            assert usage["prompt_tokens_details"]["cached_tokens"] == 28


def _loads(url: str) -> list[int]:
    """The tokens in use on each server that the gateway has read of."""
    found = httpx.get(f"{url}/get_loads", headers=HEADERS).json()
    if "workers" in found:
        return [worker["load"] for worker in found["workers"]]
    return [0, *(load["num_used_tokens"] for load in found["loads"])]
