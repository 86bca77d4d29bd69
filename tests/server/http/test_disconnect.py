from __future__ import annotations

import asyncio
import random
from typing import Any

import httpx
import pytest

from tests.server.conftest import Served, over_asgi


@pytest.fixture
async def held(live: Served) -> Served:
    """A live server whose engine makes no step unless told to: what ends there was aborted, not finished."""
    live.engine.hold()
    return live


async def submitted(served: Served, count: int) -> list[str]:
    await served.engine.wait_for(lambda: len(served.engine.submitted) == count)
    return [request.request_id for request in served.engine.submitted]


async def all_aborted(served: Served, names: list[str]) -> None:
    await served.engine.wait_for(lambda: set(names) <= set(served.engine.aborted))
    await served.serving.idle.wait()
    assert served.engine.num_running == 0


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 3])
async def test_hanging_up_ends_the_engines_work(held: Served, path: str, stream: bool, n: int):
    prompt: dict[str, Any] = {"prompt": "a"} if "chat" not in path else {"messages": [{"role": "user", "content": "a"}]}
    task = asyncio.ensure_future(held.http.post(path, json=prompt | {"stream": stream, "n": n}))
    names = await submitted(held, n)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await all_aborted(held, names)


async def test_hanging_up_in_the_middle_of_a_stream(held: Served):
    body = {"prompt": "a", "stream": True, "max_tokens": 100}
    async with httpx.AsyncClient(base_url=held.url) as client:
        request = client.build_request("POST", "/v1/completions", json=body)
        sending = asyncio.ensure_future(client.send(request, stream=True))
        names = await submitted(held, 1)
        await held.engine.step()
        response = await sending
        assert "data: " in await anext(response.aiter_text())
        await response.aclose()
    await all_aborted(held, names)


async def test_openai_clients_cancellation(held: Served):
    async with held.openai() as client:
        creating = asyncio.ensure_future(
            client.chat.completions.create(
                model="tiny", messages=[{"role": "user", "content": "a"}], stream=True, max_tokens=100
            )
        )
        names = await submitted(held, 1)
        await held.engine.step()
        chunks = await creating
        await anext(aiter(chunks))
        await chunks.close()
        await all_aborted(held, names)


async def test_leaving_before_the_body_is_sent_submits_nothing(held: Served):
    _, writer = await asyncio.open_connection(*held.url.removeprefix("http://").split(":"))
    writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{")
    await writer.drain()
    while held.serving.num_open == 0:
        await asyncio.sleep(0)
    writer.close()
    await held.serving.idle.wait()
    assert not held.engine.submitted


async def test_a_third_of_64_clients_hang_up_midway(live: Served):
    dice = random.Random(7)

    async def client(number: int) -> int:
        leaves = number % 3 == 0
        length = dice.randrange(20, 400)
        body = {"prompt": "a" * dice.randrange(1, 100), "max_tokens": length, "stream": True, "ignore_eos": True}
        count = 0
        async with live.http.stream("POST", "/v1/completions", json=body, timeout=60) as response:
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
    await live.serving.idle.wait()
    assert live.engine.num_running == 0
    info = (await live.http.get("/server_info")).json()
    assert info["open_requests"] == 0
    metrics = live.serving.metrics.registry
    ended = {
        reason: metrics.get_sample_value(
            "jaxserve:request_success_total", {"model_name": "tiny", "finished_reason": reason}
        )
        for reason in ("length", "abort")
    }
    assert ended == {"length": 42, "abort": 22}


class TestAbortRequest:
    @pytest.mark.parametrize("by", ["response id", "request id"])
    async def test_ends_an_open_request(self, held: Served, by: str):
        task = asyncio.ensure_future(
            held.http.post("/v1/completions", json={"prompt": "a", "n": 2}, headers={"x-request-id": "mine"})
        )
        names = await submitted(held, 2)
        rid = names[0].rsplit("-", 2)[0] if by == "response id" else "mine"
        answer = await held.http.post("/abort_request", json={"rid": rid})
        assert answer.json() == {"rid": rid, "aborted": 2}
        choices = (await task).json()["choices"]
        assert [choice["finish_reason"] for choice in choices] == ["abort", "abort"]

    async def test_unknown_ids_are_nothing(self):
        async with over_asgi() as served:
            answer = await served.http.post("/abort_request", json={"rid": "nobody"})
            assert answer.json() == {"rid": "nobody", "aborted": 0}
