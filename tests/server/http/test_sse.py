from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import pytest

from jaxserve.api_types import EngineRequest
from tests.server.conftest import over_asgi, over_socket
from tests.server.fake_engine import QUEUE_FULL
from tests.server.tiny import END_ID

TEXT = "a\u2028b\u2029c\x85d\r\ne\x0bf\x1cg"


async def test_a_line_of_an_event_has_no_other_line_break():
    """As Python's `splitlines`, and so httpx, would see one."""

    def rule(request: EngineRequest) -> Iterable[int]:
        return [*TEXT.encode(), END_ID]

    async with over_asgi(engine={"rule": rule}) as server:
        body = {"prompt": "x", "max_tokens": 99, "temperature": 0, "stream": True}
        async with server.http.stream("POST", "/v1/completions", json=body) as response:
            lines = [line async for line in response.aiter_lines() if line]
    assert lines.pop() == "data: [DONE]"
    assert "".join(json.loads(line.removeprefix("data: "))["choices"][0]["text"] for line in lines) == TEXT


COMMENT = ": keep-alive"
MESSAGES = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 3}
STREAMS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "a", "max_tokens": 3},
    "/v1/chat/completions": MESSAGES,
    "/v1/messages": MESSAGES,
    "/v1/responses": {"input": "a", "max_output_tokens": 3},
    "/generate": {"text": "a", "sampling_params": {"max_new_tokens": 3}},
}


@pytest.mark.parametrize("path", STREAMS)
async def test_every_stream_has_comments_while_it_is_silent(path: str):
    async with over_socket(sse_keep_alive_interval=0.02) as server:
        server.engine.hold()
        async with server.http.stream("POST", path, json=STREAMS[path] | {"stream": True}, timeout=30) as response:
            assert response.headers["content-type"].startswith("text/event-stream")
            lines = response.aiter_lines()
            events: list[str] = []
            for _ in range(3):  # before each token
                while (line := await anext(lines)) != COMMENT:
                    events.append(line)
                await server.engine.step()
            events += [line async for line in lines]
    expected = {"/v1/messages": '{"type":"message_stop"}', "/v1/responses": '{"type":"response.incomplete"'}
    data = [line.removeprefix("data: ") for line in events if line.startswith("data: ")]
    assert data[-1].startswith(expected.get(path, "[DONE]"))
    assert len(data) > 3


async def test_clients_pass_over_comments():
    async with over_socket(sse_keep_alive_interval=0.02) as server, server.openai(timeout=30) as client:
        server.engine.hold()
        body: dict[str, Any] = {"model": "tiny", "messages": MESSAGES["messages"], "max_tokens": 3}
        chunks = await client.chat.completions.create(**body, stream=True)  # returns at the first comment
        server.engine.release()
        text = "".join([choice.delta.content or "" async for chunk in chunks for choice in chunk.choices])
        assert len(text) == 3


@pytest.mark.parametrize(("interval", "path"), [(60.0, "/v1/completions"), (0.0, "/v1/completions")])
async def test_a_stream_that_is_not_silent_for_so_long_has_none(interval: float, path: str):
    async with over_socket(sse_keep_alive_interval=interval) as server:
        assert COMMENT not in (await server.http.post(path, json=STREAMS[path] | {"stream": True})).text


async def test_a_request_that_is_refused_at_once_still_has_its_own_status():
    async with over_socket(sse_keep_alive_interval=0.02, engine={"refuse": lambda _: QUEUE_FULL}) as server:
        answer = await server.http.post("/v1/completions", json=STREAMS["/v1/completions"] | {"stream": True})
        assert answer.status_code == 503


async def test_an_error_after_a_comment_is_an_event():
    async with over_socket(sse_keep_alive_interval=0.02) as server:
        server.engine.hold()
        body = STREAMS["/v1/completions"] | {"stream": True}
        async with server.http.stream("POST", "/v1/completions", json=body, timeout=30) as response:
            lines = response.aiter_lines()
            assert await anext(lines) == COMMENT
            server.engine.die("gone")
            *_, last = [line async for line in lines if line.startswith("data: ")]
            assert json.loads(last.removeprefix("data: "))["error"]["code"] == "engine_dead"
