from __future__ import annotations

import re
from typing import Any

import httpx
import pytest
from starlette.routing import Route

from jaxserve.config.schema import EngineConfig
from jaxserve.config.server_schema import ServerConfig
from jaxserve.server.admin.schemas import _number_pattern
from jaxserve.server.app import make_app
from jaxserve.server.server_state import ServerState
from tests.server.conftest import ServerUnderTest, make_state, over_asgi
from tests.server.pooling.tasks import POOLED, task_of


@pytest.fixture
async def document(server: ServerUnderTest) -> dict[str, Any]:
    return (await server.http.get("/openapi.json")).json()


async def test_the_document_covers_exactly_the_routes(document: dict[str, Any]):
    state, _ = make_state()
    routes = {
        (route.path.replace(":path}", "}"), method.lower())
        for route in make_app(state).routes
        if isinstance(route, Route)
        for method in route.methods - {"HEAD"}
    }
    assert routes == {(path, method) for path, item in document["paths"].items() for method in item}


async def test_every_reference_resolves(document: dict[str, Any]):
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
            parameters = operation.get("parameters", ())
            names = {parameter["name"] for parameter in parameters if parameter["in"] == "path"}
            assert names == {part[1:-1] for part in path.split("/") if part.startswith("{")}


async def test_every_optional_field_may_be_null(document: dict[str, Any]):
    schemas = document["components"]["schemas"]
    for name in ("CompletionRequest", "ChatRequest", "GenerateRequest", "GenerateSampling", "TokenizeRequest"):
        for field, schema in schemas[name]["properties"].items():
            if field not in schemas[name]["required"] and ("enum" in schema or "anyOf" in schema or "type" in schema):
                choices = [*schema.get("enum", ()), *(one.get("type") for one in schema.get("anyOf", ()))]
                assert None in choices or "null" in choices, (name, field)


async def test_fields_are_described(document: dict[str, Any]):
    schemas = document["components"]["schemas"]
    assert "prompt" in schemas["CompletionRequest"]["required"]
    assert schemas["CompletionRequest"]["additionalProperties"] is False
    assert {"messages", "max_completion_tokens", "top_k"} <= set(schemas["ChatRequest"]["properties"])


async def test_errors_are_described_in_the_form_of_their_route(document: dict[str, Any], server: ServerUnderTest):
    for path, known in (("/v1/messages", {"type", "error"}), ("/v1/completions", {"error"})):
        answer = document["paths"][path]["post"]["responses"]["default"]["content"]["application/json"]["schema"]
        name = answer["anyOf"][0]["$ref"].rpartition("/")[2]
        found = (await server.http.post(path, json={"x": 1})).json()
        assert set(document["components"]["schemas"][name]["properties"]) == set(found) == known


async def test_security_is_documented_where_a_key_is_required():
    async with over_asgi(api_key="k") as server:
        headers = {"authorization": "Bearer k"}
        document = (await server.http.get("/openapi.json", headers=headers)).json()
    assert document["paths"]["/v1/completions"]["post"]["security"] == [{"bearer": []}, {"x-api-key": []}]
    assert set(document["components"]["securitySchemes"]) == {"bearer", "x-api-key"}
    assert "security" not in document["paths"]["/health"]["get"]


async def test_an_admin_key_is_documented_where_it_is_required():
    async with over_asgi(admin_api_key="a") as server:
        document = (await server.http.get("/openapi.json")).json()
    assert "security" in document["paths"]["/flush_cache"]["post"]
    assert "security" not in document["paths"]["/v1/completions"]["post"]
    assert set(document["components"]["securitySchemes"]) == {"bearer", "x-api-key"}


async def test_the_document_may_be_left_out():
    async with over_asgi(disable_fastapi_docs=True) as server:
        for path in ("/openapi.json", "/nothing"):
            answer = await server.http.get(path)
            assert (answer.status_code, answer.json()["error"]["message"]) == (404, "No such route")
        assert (await server.http.get("/v1/models")).status_code == 200


BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "a"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}], "logprobs": True},
    "/v1/messages": {"max_tokens": 4, "messages": [{"role": "user", "content": "a"}]},
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "a"}]},
    "/v1/responses": {"input": "a", "max_output_tokens": 4},
    "/v1/responses/input_tokens": {"input": "a"},
    "/generate": {"text": "a", "return_logprob": True},
    **POOLED,
    "/tokenize": {"messages": [{"role": "user", "content": "a"}]},
    "/detokenize": {"tokens": [1]},
    "/abort_request": {"rid": "nobody"},
}
# Texts in languages of their own: tests/server/test_structured_outputs.py
FORMS = {
    "response_format", "structured_outputs", "guided_json", "guided_regex", "guided_grammar", "guided_choice",
    "json_schema", "regex", "ebnf", "structural_tag",
}  # fmt: skip
# Fields of a path whose values have a condition with another field.
CONDITIONAL_FIELDS = {
    "/v1/completions": {"prompt", "stream_options", *FORMS},
    "/v1/chat/completions": {
        "messages", "stream_options", "tools", "tool_choice", *FORMS,
        "max_tokens", "max_completion_tokens", "min_tokens",
    },
    "/v1/messages": {"messages", "system", "tools", "tool_choice", "thinking", "output_config", "output_format"},
    "/v1/messages/count_tokens": {"messages", "tools", "tool_choice", "thinking", "output_config", "output_format"},
    "/v1/responses": {
        "input", "stream_options", "tools", "tool_choice", "text", "reasoning", "previous_response_id", "min_tokens",
    },
    "/v1/responses/input_tokens": {"input", "tools", "tool_choice", "text", "reasoning", "previous_response_id"},
    "/generate": {"text", "input_ids", "sampling_params", "rid", *FORMS},
    "/tokenize": {"messages", "prompt", "tools", "tool_choice"},
}  # fmt: skip
_TEXT_FIELDS = {
    "input", "messages", "dimensions", "prompt_name", "truncate_prompt_tokens", "add_generation_prompt",
    "continue_final_message", "chat_template_kwargs", "escape_marks", "task",
}  # fmt: skip
for _path in POOLED:
    CONDITIONAL_FIELDS[_path] = {
        *_TEXT_FIELDS, "text_1", "text_2", "data_1", "data_2", "queries", "documents", "items",
        "instruction", "instruct", "rank_fields", "text", "input_ids", "rid", "use_activation",
    }  # fmt: skip
for _path in ("/v1/completions", "/v1/chat/completions"):
    BODIES[f"{_path}/render"] = BODIES[_path]
    CONDITIONAL_FIELDS[f"{_path}/render"] = CONDITIONAL_FIELDS[_path]


def boundary_values(schema: dict[str, Any]) -> tuple[list[Any], list[Any]]:
    """Return values at the limits of a schema: those that are just valid, and those that are just invalid."""
    good: list[Any] = []
    bad: list[Any] = []
    if "anyOf" in schema:
        for one in schema["anyOf"]:
            more_good, more_bad = boundary_values(one)
            good, bad = good + more_good, bad + more_bad
        return good, bad
    if "enum" in schema:
        return schema["enum"], [{"no": "such"}]
    kind = schema.get("type")
    if kind in ("integer", "number"):
        step = 1 if kind == "integer" else 0.25
        for name, sign in (("minimum", -1), ("maximum", 1)):
            if name in schema:
                good.append(schema[name])
                bad.append(schema[name] + sign * step)
        if "exclusiveMinimum" in schema:
            bad.append(schema["exclusiveMinimum"])
            good.append(schema["exclusiveMinimum"] + step)
        return [*good, 1], [*bad, "1", True]
    if kind == "boolean":
        return [True, False], [0, "true"]
    if kind == "string":
        length = schema.get("maxLength")
        good = ["a" * max(schema.get("minLength", 0), 1)] + ([] if length is None else ["a" * length])
        return good, ([""] if schema.get("minLength") else []) + ([] if length is None else ["a" * (length + 1)])
    if kind == "array":
        good_items, bad_items = boundary_values(schema.get("items", {}))
        good, bad = [[item] for item in good_items], [[item] for item in bad_items]
        if "maxItems" in schema and good_items:
            good.append([good_items[-1]] * schema["maxItems"])
            bad.append([good_items[-1]] * (schema["maxItems"] + 1))
    return good, bad


@pytest.mark.parametrize("path", BODIES)
async def test_the_document_is_as_strict_as_the_server(path: str):
    async with over_asgi(engine={"max_model_len": 48}, task=task_of(path)) as server:
        document = (await server.http.get("/openapi.json")).json()
        reference = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]["$ref"]
        schemas = document["components"]["schemas"]
        schema = schemas[reference.rsplit("/", 1)[1]]
        assert schema["additionalProperties"] is False
        left = CONDITIONAL_FIELDS.get(path, set())
        checked = [((), name, one) for name, one in schema["properties"].items() if name not in left]
        if path == "/generate":
            inner = schemas["GenerateSampling"]["properties"].items()
            checked += [(("sampling_params",), name, one) for name, one in inner if name not in left]
        for where, name, one in checked:
            good, bad = boundary_values(one)
            for status, values in ((200, good), (400, bad)):
                for value in values:
                    inner = {name: value}
                    for outer in where:
                        inner = {outer: inner}
                    response = await server.http.post(path, json=BODIES[path] | inner)
                    # Another model than the served one is a 404.
                    got = 400 if name == "model" and response.status_code == 404 else response.status_code
                    assert got == status, (name, value, response.text)


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/v1/completions", {"prompt": [72.0, 239.0], "n": 1.0}, 200),
        ("/v1/completions", {"prompt": [72.5]}, 400),
        ("/v1/completions", {"prompt": "a", "logit_bias": {"258": 1}}, 200),
        ("/v1/completions", {"prompt": "a", "logit_bias": {"0258": 1}}, 400),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {"mood": 1}},
            200,
        ),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {"mo": 1}},
            400,
        ),
        ("/generate", {}, 400),
        ("/tokenize", {"prompt": "a", "continue_final_message": True}, 400),
        ("/abort_request", {"rid": None}, 400),
    ],
)
async def test_conditions_that_boundary_values_do_not_cover(
    server: ServerUnderTest, path: str, body: dict[str, Any], status: int
):
    assert (await server.http.post(path, json=body)).status_code == status


def test_the_pattern_of_token_keys():
    for last in (0, 5, 9, 10, 99, 100, 258, 1000, 49151):
        pattern = re.compile(_number_pattern(last))
        numbers = [number for number in range(last + 1100) if pattern.search(str(number))]
        assert numbers == list(range(last + 1))
        assert not pattern.search("01")


async def test_limits_are_wide_before_the_model_is_loaded(server: ServerUnderTest):
    state = ServerState(ServerConfig(), EngineConfig())
    transport = httpx.ASGITransport(make_app(state))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        starting = (await http.get("/openapi.json")).json()["components"]["schemas"]["DetokenizeRequest"]
        state.set_loaded(server.state.require_loaded())
        loaded = (await http.get("/openapi.json")).json()["components"]["schemas"]["DetokenizeRequest"]
    assert starting["properties"]["tokens"]["items"]["maximum"] == 2**31 - 1
    assert loaded["properties"]["tokens"]["items"]["maximum"] == 258
