"""How pooled requests end: hang-ups, aborts, failures, limits of the queue; and what is counted of them."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import numpy as np
import pytest

from jaxserve.api_types import EngineRequest
from jaxserve.text.tokenizers.tokenizer import Tokenizer
from tests.server.admin.test_metrics import scrape
from tests.server.conftest import ServerUnderTest, over_asgi, over_socket
from tests.server.fake_engine import QUEUE_FULL, vector_of
from tests.server.http.test_disconnect import assert_all_aborted, submitted
from tests.server.pooling.tasks import EMBED, POOLED, both, only

MANY: dict[str, dict[str, Any]] = {
    "/v1/embeddings": {"input": ["a", "b", "c"]},
    "/v1/rerank": {"query": "q", "documents": ["a", "b"]},
    "/encode": {"text": ["a", "b", "c"]},
}


@pytest.mark.parametrize("path", MANY)
async def test_a_disconnect_aborts_all(path: str):
    async with over_socket(task=only(EMBED)) as server:
        server.engine.hold()
        task = asyncio.ensure_future(server.http.post(path, json=MANY[path]))
        names = await submitted(server, 3)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await assert_all_aborted(server, names)


@pytest.mark.parametrize("rid", ["embd-mine", "mine", "r"])
async def test_aborts_by_id(rid: str):
    async with over_socket(task=both(EMBED)) as server:
        server.engine.hold()
        body = MANY["/v1/embeddings"] | {"rid": rid if rid == "r" else None}
        task = asyncio.ensure_future(server.http.post("/v1/embeddings", json=body, headers={"x-request-id": "mine"}))
        names = await submitted(server, 3)
        assert (await server.http.post("/abort_request", json={"rid": rid})).json()["aborted"] == 3
        response = await task
        assert (response.status_code, response.json()["error"]["type"]) == (499, "request_aborted")
        await assert_all_aborted(server, names)


async def test_one_aborted_text_ends_the_request():
    async with over_asgi(task=both(EMBED)) as server:
        server.engine.hold()
        task = asyncio.ensure_future(server.http.post("/encode", json={"text": ["a", "b"], "rid": "x"}))
        await submitted(server, 2)
        assert (await server.http.post("/abort_request", json={"rid": "x_1"})).json()["aborted"] == 1
        assert (await task).status_code == 499
        assert server.engine.num_running == 0


async def test_a_draining_server_answers_what_it_ends():
    async with over_asgi(task=only(EMBED)) as server:
        server.engine.hold()
        task = asyncio.ensure_future(server.http.post("/v1/embeddings", json=MANY["/v1/embeddings"]))
        await submitted(server, 3)
        server.state.mark_draining()
        assert (await server.http.post("/v1/embeddings", json={"input": "a"})).status_code == 503
        server.state.abort_own()
        response = await task
        assert (response.status_code, response.json()["error"]["code"]) == (503, "unavailable")


async def test_a_failed_text_ends_the_others():
    def refuse(request: EngineRequest) -> str | None:
        return "that one is too much" if request.prompt_ids == [98] else None

    async with over_asgi(task=only(EMBED), engine={"refuse": refuse}) as server:
        server.engine.hold()
        response = await server.http.post("/v1/embeddings", json={"input": ["a", "b", "c"]})
        assert (response.status_code, response.json()["error"]["code"]) == (500, "request_failed")
        assert server.engine.num_running == 0


@pytest.mark.parametrize("path", sorted(POOLED.keys() - {"/classify"}))
async def test_a_full_queue(path: str):
    async with over_asgi(task=only(EMBED), engine={"refuse": lambda _: QUEUE_FULL}) as server:
        response = await server.http.post(path, json=POOLED[path])
        assert (response.status_code, response.json()["error"]["code"]) == (503, "queue_full")
        assert int(response.headers["retry-after"]) >= 1
        assert (await scrape(server))['jaxserve:admission_rejections_total{reason="max_num_queued_reqs"}'] >= 1


@pytest.mark.parametrize("wrong", [np.nan, np.inf])
async def test_numbers_that_are_not_finite_are_an_error(wrong: float, caplog: pytest.LogCaptureFixture):
    def vector(ids: Any) -> np.ndarray:
        return np.where(np.arange(4) == 2, wrong, vector_of(ids)).astype(np.float32)

    async with over_asgi(task=only(EMBED), engine={"vector": vector}) as server:
        for path in ("/v1/embeddings", "/v1/score", "/encode"):
            response = await server.http.post(path, json=POOLED[path])
            assert response.status_code == 500
            assert "not finite" in response.json()["error"]["message"]


async def test_metrics():
    async with over_asgi(task=both(EMBED)) as server:
        await server.http.post("/v1/embeddings", json={"input": ["a", "bc"]})
        found = await scrape(server)
        prefix = "jaxserve:"
        assert found[f'{prefix}request_success_total{{finished_reason="stop"}}'] == 2
        assert found[f"{prefix}request_prompt_tokens_sum"] == 3
        assert found[f"{prefix}e2e_request_latency_seconds_count"] == 2
        assert found[f"{prefix}request_queue_time_seconds_sum"] == 0.5
        for name in ("time_to_first_token_seconds", "request_generation_tokens", "request_params_max_tokens"):
            assert found[f"{prefix}{name}_count"] == 0
        route = 'handler="/v1/embeddings",method="POST",status="2xx"'
        assert found[f"{prefix}http_requests_total{{{route}}}"] == 1


async def test_large_answers_are_whole():
    """They are written on a thread."""
    async with over_asgi(task=only(EMBED)) as server:
        texts = [f"{number:03}" for number in range(1500)]
        data = (await server.http.post("/v1/embeddings", json={"input": texts, "normalize": False})).json()["data"]
        assert [item["index"] for item in data] == [*range(1500)]
        assert data[7]["embedding"] == vector_of([*b"007"]).tolist()


async def test_clients_that_embed_and_chat_while_a_third_hangs_up(live_server: ServerUnderTest):
    object.__setattr__(live_server.state.require_loaded(), "task", both(EMBED))

    async def client(number: int) -> None:
        path, body = ("/v1/embeddings", {"input": [f"text {number}"] * 5})
        if number % 2:
            path, body = "/v1/completions", {"prompt": f"text {number}", "max_tokens": 40}
        asking = asyncio.ensure_future(live_server.http.post(path, json=body, timeout=60))
        if number % 3 == 0:
            ids = [*f"text {number}".encode()]
            await live_server.engine.wait_for(
                lambda: any(request.prompt_ids == ids for request in live_server.engine.submitted)
            )
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
            return
        assert (await asking).status_code == 200

    await asyncio.gather(*map(client, range(64)))
    await live_server.state.idle.wait()
    assert live_server.engine.num_running == 0


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/score"])
async def test_long_texts_are_tokenized_on_threads(path: str, monkeypatch: pytest.MonkeyPatch):
    """The event loop goes on meanwhile."""
    threads: list[str] = []
    encode = Tokenizer.encode_batch

    def recorded(*args: Any, **options: Any) -> list[list[int]]:
        threads.append(threading.current_thread().name)
        return encode(*args, **options)

    monkeypatch.setattr(Tokenizer, "encode_batch", recorded)
    async with over_asgi(task=only(EMBED)) as server:
        for length, name in ((10, "MainThread"), (10_000, "tokenize_0")):
            text = "a" * length
            body = {"input": text} if path == "/v1/embeddings" else {"text_1": text, "text_2": "b"}
            response = await server.http.post(path, json=body | {"truncate_prompt_tokens": -1})
            assert response.status_code == 200
            assert set(threads) == {name}
            threads.clear()
