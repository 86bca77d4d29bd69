from __future__ import annotations

from typing import Any

import pytest
from starlette.routing import Route

from jaxserve.server.app import make_app
from tests.server.conftest import Served, new_serving, over_asgi


@pytest.fixture
async def document(served: Served) -> dict[str, Any]:
    return (await served.http.get("/openapi.json")).json()


async def test_it_covers_all_routes_and_no_others(document: dict[str, Any]):
    serving, _ = new_serving()
    routes = {
        (route.path.replace(":path}", "}"), method.lower())
        for route in make_app(serving).routes
        if isinstance(route, Route)
        for method in route.methods - {"HEAD"}
    }
    assert routes == {(path, method) for path, item in document["paths"].items() for method in item}


async def test_every_reference_leads_somewhere(document: dict[str, Any]):
    def references(node: Any) -> list[str]:
        if isinstance(node, dict):
            own = [node["$ref"]] if isinstance(node.get("$ref"), str) else []
            return own + [name for value in node.values() for name in references(value)]
        if isinstance(node, list):
            return [name for value in node for name in references(value)]
        return []

    found = references(document)
    assert found
    for reference in found:
        node: Any = document
        for part in reference.removeprefix("#/").split("/"):
            node = node[part]


async def test_required_parts_of_openapi_31(document: dict[str, Any]):
    assert document["openapi"].startswith("3.1.")
    assert {"title", "version"} <= set(document["info"])
    operations = [operation for item in document["paths"].values() for operation in item.values()]
    assert len({operation["operationId"] for operation in operations}) == len(operations)
    for path, item in document["paths"].items():
        for operation in item.values():
            assert operation["responses"]
            names = {parameter["name"] for parameter in operation.get("parameters", ())}
            assert names == {part[1:-1] for part in path.split("/") if part.startswith("{")}


async def test_fields_are_described(document: dict[str, Any]):
    schemas = document["components"]["schemas"]
    assert "prompt" in schemas["CompletionRequest"]["required"]
    assert schemas["CompletionRequest"]["additionalProperties"] is False
    assert {"messages", "max_completion_tokens", "top_k"} <= set(schemas["ChatRequest"]["properties"])


async def test_the_key_is_mentioned_where_it_is_asked_for():
    async with over_asgi(api_key="k") as served:
        headers = {"authorization": "Bearer k"}
        document = (await served.http.get("/openapi.json", headers=headers)).json()
    assert document["paths"]["/v1/completions"]["post"]["security"] == [{"bearer": []}]
    assert "security" not in document["paths"]["/health"]["get"]
