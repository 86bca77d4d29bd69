from __future__ import annotations

import pytest

from tests.server.conftest import over_asgi


@pytest.mark.parametrize("path", ["/v1/models", "/llm/v1/models", "/llm/v1/models/", "/llm//v1/models"])
async def test_requests_reach_routes_with_and_without_the_path_of_the_proxy(path: str):
    async with over_asgi(root_path="/llm") as server:
        assert (await server.http.get(path)).json()["data"][0]["id"] == "tiny"


@pytest.mark.parametrize("path", ["/llm", "/llm/", "/llmx/v1/models", "/llm/llm/v1/models", "/other/v1/models"])
async def test_other_paths_reach_none(path: str):
    async with over_asgi(root_path="/llm") as server:
        answer = await server.http.get(path)
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found")


async def test_the_path_of_the_proxy_counts_nowhere():
    async with over_asgi(root_path="/llm", api_key="k", admin_api_key="a") as server:
        assert (await server.http.get("/llm/health")).status_code == 200
        assert (await server.http.get("/llm/v1/models")).status_code == 401
        assert (await server.http.get("/llm/flush_cache", headers={"x-api-key": "k"})).status_code == 401
        error = (await server.http.post("/llm/v1/messages", json={}, headers={"x-api-key": "k"})).json()
        assert error["type"] == "error"


async def test_the_document_names_the_path():
    async with over_asgi(root_path="/llm") as server:
        document = (await server.http.get("/llm/openapi.json")).json()
        assert document["servers"] == [{"url": "/llm"}]
        assert "/v1/models" in document["paths"]
    async with over_asgi() as server:
        assert "servers" not in (await server.http.get("/openapi.json")).json()
