"""Makes `/openapi.json` from the request and response structs and the table of routes, so that it can't be outdated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

import jaxserve
from jaxserve.server.admin.schemas import request_schemas
from jaxserve.server.errors import MESSAGES_PATH
from jaxserve.server.http.auth import key_of
from jaxserve.server.server_state import ServerState


class ErrorObject(msgspec.Struct):
    """The error; `param` names the field at fault."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(msgspec.Struct):
    """The response of every status of 400 and above, except on `/v1/messages`."""

    error: ErrorObject


class MessagesErrorObject(msgspec.Struct):
    """The error in Anthropic's form."""

    type: str
    message: str


class MessagesErrorResponse(msgspec.Struct, tag="error"):
    """The response of every status of 400 and above on `/v1/messages`."""

    error: MessagesErrorObject


@dataclass(frozen=True)
class Operation:
    """One route of the document. `streams` marks a route that can answer with server-sent events; `query` has the
    schemas of its parameters."""

    method: str
    path: str
    summary: str
    body: type[msgspec.Struct] | None = None
    response: type | None = None
    streams: bool = False
    content_type: str = "application/json"
    query: Mapping[str, dict[str, Any]] = field(default_factory=dict)


def openapi_document(operations: Sequence[Operation], state: ServerState) -> bytes:
    """Return the OpenAPI 3.1 document of `operations`, with the limits of the served model."""
    types: list[type] = [kind for item in operations for kind in (item.body, item.response) if kind is not None]
    types += [ErrorResponse, MessagesErrorResponse]
    schemas, components = request_schemas(types, state)
    reference: dict[type, dict[str, Any]] = dict(zip(types, schemas))
    paths: dict[str, dict[str, Any]] = {}
    for item in operations:
        paths.setdefault(_plain_path(item.path), {})[item.method.lower()] = _operation(
            item, reference, with_key=key_of(item.path, state.config) is not None
        )
    result: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {
            "title": "jaxserve",
            "version": jaxserve.__version__,
            "description": "OpenAI's completions, chat and responses, Anthropic's messages, routes to run the server.",
        },
        "paths": paths,
        "components": {"schemas": components},
    }
    if state.config.root_path:
        result["servers"] = [{"url": state.config.root_path}]
    if state.config.api_key is not None or state.config.admin_api_key is not None:
        result["components"]["securitySchemes"] = {
            "bearer": {"type": "http", "scheme": "bearer"},
            "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
        }
    return msgspec.json.encode(result)


def _plain_path(path: str) -> str:
    return path.replace(":path}", "}")


def _operation(item: Operation, reference: dict[type, dict[str, Any]], *, with_key: bool) -> dict[str, Any]:
    schema = {} if item.response is None else reference[item.response]
    content: dict[str, Any] = {item.content_type: {"schema": schema}}
    if item.streams:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    error = {
        "description": "An error",
        "content": {
            "application/json": {
                "schema": {
                    "anyOf": [
                        reference[MessagesErrorResponse if item.path.startswith(MESSAGES_PATH) else ErrorResponse],
                        {"type": "object", "properties": {"status": {"type": "string"}}},
                    ]
                }
            }
        },
    }
    result: dict[str, Any] = {
        "summary": item.summary,
        "operationId": f"{item.method}_{_plain_path(item.path)}".lower().translate(str.maketrans("/{}.", "____")),
        "responses": {"200": {"description": "Success", "content": content}, "default": error},
    }
    if "{" in item.path:
        name = item.path.partition("{")[2].partition("}")[0].partition(":")[0]
        result["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}},
            *({"name": name, "in": "query", "schema": schema} for name, schema in item.query.items()),
        ]
    if item.body is not None:
        result["requestBody"] = {"required": True, "content": {"application/json": {"schema": reference[item.body]}}}
    if with_key:
        result["security"] = [{"bearer": []}, {"x-api-key": []}]
    return result
