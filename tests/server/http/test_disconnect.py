from __future__ import annotations

import asyncio
import random
from typing import Any

import httpx
import pytest

from tests.server.conftest import ServerUnderTest, over_asgi


@pytest.fixture
async def held_server(live_server: ServerUnderTest) -> ServerUnderTest:
    """Return a live server whose engine makes no step by itself, so that requests end only by an abort."""
    live_server.engine.hold()
    return live_server


async def submitted(server: ServerUnderTest, count: int) -> list[str]:
    await server.engine.wait_for(lambda: len(server.engine.submitted) == count)
    return [request.request_id for request in server.engine.submitted]


async def assert_all_aborted(server: ServerUnderTest, names: list[str]) -> None:
    await server.engine.wait_for(lambda: set(names) <= set(server.engine.aborted))
    await server.state.idle.wait()
    assert server.engine.num_running == 0


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 3])
async def test_a_disconnect_aborts_the_sequences(held_server: ServerUnderTest, path: str, stream: bool, n: int):
    prompt: dict[str, Any] = {"prompt": "a"} if "chat" not in path else {"messages": [{"role": "user", "content": "a"}]}
    task = asyncio.ensure_future(held_server.http.post(path, json=prompt | {"stream": stream, "n": n}))
    names = await submitted(held_server, n)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await assert_all_aborted(held_server, names)


async def test_a_disconnect_during_a_stream(held_server: ServerUnderTest):
    body = {"prompt": "a", "stream": True, "max_tokens": 100}
    async with httpx.AsyncClient(base_url=held_server.url) as client:
        request = client.build_request("POST", "/v1/completions", json=body)
        sending = asyncio.ensure_future(client.send(request, stream=True))
        names = await submitted(held_server, 1)
        await held_server.engine.step()
        response = await sending
        assert "data: " in await anext(response.aiter_text())
        await response.aclose()
    await assert_all_aborted(held_server, names)


async def test_openai_clients_cancellation(held_server: ServerUnderTest):
    async with held_server.openai() as client:
        creating = asyncio.ensure_future(
            client.chat.completions.create(
                model="tiny", messages=[{"role": "user", "content": "a"}], stream=True, max_tokens=100
            )
        )
        names = await submitted(held_server, 1)
        await held_server.engine.step()
        chunks = await creating
        await anext(aiter(chunks))
        await chunks.close()
        await assert_all_aborted(held_server, names)


async def test_a_disconnect_before_the_body_submits_nothing(held_server: ServerUnderTest):
    _, writer = await asyncio.open_connection(*held_server.url.removeprefix("http://").split(":"))
    writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{")
    await writer.drain()
    while held_server.state.num_open_requests == 0:
        await asyncio.sleep(0)
    writer.close()
    await held_server.state.idle.wait()
    assert not held_server.engine.submitted


async def test_a_third_of_64_clients_disconnect_midway(live_server: ServerUnderTest):
    dice = random.Random(7)

    async def client(number: int) -> int:
        leaves = number % 3 == 0
        length = dice.randrange(20, 400)
        body = {"prompt": "a" * dice.randrange(1, 100), "max_tokens": length, "stream": True, "ignore_eos": True}
        count = 0
        async with live_server.http.stream("POST", "/v1/completions", json=body, timeout=60) as response:
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    count += 1
                    if leaves and count == length // 2:
                        return 0
                elif line == "data: [DONE]":
                    return length - count
        raise AssertionError("the stream ended without [DONE]")

    missing = await asyncio.gather(*(client(number) for number in range(64)))
    assert missing == [0] * 64
    await live_server.state.idle.wait()
    assert live_server.engine.num_running == 0
    info = (await live_server.http.get("/server_info")).json()
    assert info["open_requests"] == 0
    metrics = live_server.state.metrics.registry
    ended = {
        reason: metrics.get_sample_value(
            "jaxserve:request_success_total", {"model_name": "tiny", "finished_reason": reason}
        )
        for reason in ("length", "abort")
    }
    assert ended == {"length": 42, "abort": 22}


class TestAbortRequest:
    @pytest.mark.parametrize("by", ["response id", "request id"])
    async def test_aborts_an_open_request(self, held_server: ServerUnderTest, by: str):
        task = asyncio.ensure_future(
            held_server.http.post("/v1/completions", json={"prompt": "a", "n": 2}, headers={"x-request-id": "mine"})
        )
        names = await submitted(held_server, 2)
        rid = names[0].rsplit("-", 3)[0] if by == "response id" else "mine"
        answer = await held_server.http.post("/abort_request", json={"rid": rid})
        assert answer.json() == {"rid": rid, "aborted": 2}
        choices = (await task).json()["choices"]
        assert [choice["finish_reason"] for choice in choices] == ["abort", "abort"]

    async def test_unknown_ids_abort_nothing(self):
        async with over_asgi() as server:
            answer = await server.http.post("/abort_request", json={"rid": "nobody"})
            assert answer.json() == {"rid": "nobody", "aborted": 0}
