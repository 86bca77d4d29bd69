"""Routes that a model can't answer say what it can, and information about the server is true."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from jaxserve.config.schema import EngineConfig
from jaxserve.config.server_schema import ServerConfig
from jaxserve.model_source.pooling import ModelTask
from jaxserve.server.app import make_app
from jaxserve.server.server_state import ServerState
from tests.server.conftest import over_asgi
from tests.server.pooling.tasks import EMBED, LABELS, POOLED, RERANK, both, only

HELLO = [{"role": "user", "content": "hello"}]
GENERATING: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "a"},
    "/v1/chat/completions": {"messages": HELLO},
    "/v1/messages": {"messages": HELLO, "max_tokens": 2},
    "/v1/responses": {"input": "a"},
    "/generate": {"text": "a"},
}
PAIRS = {"/v1/rerank", "/v2/rerank", "/rerank", "/v1/score", "/score"}
ALWAYS = {"/pooling", "/encode"}


@pytest.mark.parametrize(
    ("task", "answered"),
    [
        (ModelTask(), {*GENERATING}),
        (only(EMBED), {"/v1/embeddings", *PAIRS, *ALWAYS}),
        (only(RERANK), {"/classify", *PAIRS, *ALWAYS}),
        (only(LABELS), {"/classify", *ALWAYS}),
        (both(EMBED), {*GENERATING, "/v1/embeddings", *PAIRS, *ALWAYS}),
    ],
)
async def test_each_model_answers_its_routes_and_names_them(task: ModelTask, answered: set[str]):
    async with over_asgi(task=task) as server:
        for path, body in (GENERATING | POOLED).items():
            response = await server.http.post(path, json=body)
            assert response.status_code == (200 if path in answered else 400), (path, response.text)
            if path in answered:
                continue
            message = response.json()["error"]["message"]
            assert set(response.json()) == ({"error", "type"} if path == "/v1/messages" else {"error"})
            # Other names of routes are left out
            named = answered - {"/v2/rerank", "/rerank", "/score"}
            if task.generates and path in POOLED and task.pooled is not None:
                named -= {*GENERATING}
            assert all(one in message for one in named), message
            assert "--runner pooling" in message or task.pooled is not None
        assert (await server.http.post("/tokenize", json={"prompt": "a"})).status_code == 200


@pytest.mark.parametrize("task", [ModelTask(), only(EMBED), both(LABELS)])
async def test_information_about_the_server(task: ModelTask):
    async with over_asgi(task=task) as server:
        assert (await server.http.get("/model_info")).json()["is_generation"] == task.generates
        assert (await server.http.get("/server_info")).json()["is_embedding"] != task.generates
        assert (await server.http.get("/v1/models")).json()["data"][0]["id"] == "tiny"
        assert (await server.http.get("/health_generate")).status_code == 200
        [request] = server.engine.submitted
        assert request.pooled != task.generates


async def test_information_before_the_model_is_loaded():
    for runner, generates in (("auto", True), ("pooling", False)):
        state = ServerState(ServerConfig(), EngineConfig(runner=runner))
        transport = httpx.ASGITransport(make_app(state))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
            assert (await http.get("/model_info")).json()["is_generation"] == generates


async def test_a_hanging_engine_that_pools_is_not_healthy(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("jaxserve.server.admin.routes._GENERATE_TIMEOUT", 0.01)
    async with over_asgi(task=only(EMBED)) as server:
        server.engine.hold()
        response = await server.http.get("/health_generate")
        assert response.status_code == 503
        assert "computed no prompt" in response.text
