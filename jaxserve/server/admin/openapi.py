"""`/openapi.json`, made from the request and response structs and the table of routes, so that it can't fall behind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

import jaxserve
from jaxserve.server.admin.schemas import fitted_schemas
from jaxserve.server.http.auth import OPEN_PATHS
from jaxserve.server.server_state import Serving


class ErrorObject(msgspec.Struct):
    """What went wrong; `param` names the field at fault."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(msgspec.Struct):
    """Every answer with a status of 400 and above."""

    error: ErrorObject


@dataclass(frozen=True)
class Operation:
    """One route as the document tells it. `streams` marks those that can answer with server-sent events."""

    method: str
    path: str
    summary: str
    body: type[msgspec.Struct] | None = None
    response: type[msgspec.Struct] | None = None
    streams: bool = False
    content_type: str = "application/json"


def document(operations: Sequence[Operation], serving: Serving) -> bytes:
    """The OpenAPI 3.1 document of `operations`, as they are for what is served now."""
    with_key = serving.config.api_key is not None
    types: list[type] = [kind for item in operations for kind in (item.body, item.response) if kind is not None]
    schemas, components = fitted_schemas([*types, ErrorResponse], serving)
    reference: dict[type, dict[str, Any]] = dict(zip([*types, ErrorResponse], schemas))
    paths: dict[str, dict[str, Any]] = {}
    for item in operations:
        paths.setdefault(_plain(item.path), {})[item.method.lower()] = _operation(item, reference, with_key=with_key)
    result: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {
            "title": "jaxserve",
            "version": jaxserve.__version__,
            "description": "OpenAI's completions and chat, and routes to run the server.",
        },
        "paths": paths,
        "components": {"schemas": components},
    }
    if with_key:
        result["components"]["securitySchemes"] = {"bearer": {"type": "http", "scheme": "bearer"}}
    return msgspec.json.encode(result)


def _plain(path: str) -> str:
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
                        reference[ErrorResponse],
                        {"type": "object", "properties": {"status": {"type": "string"}}},
                    ]
                }
            }
        },
    }
    result: dict[str, Any] = {
        "summary": item.summary,
        "operationId": f"{item.method}_{_plain(item.path)}".lower().translate(str.maketrans("/{}.", "____")),
        "responses": {"200": {"description": "Success", "content": content}, "default": error},
    }
    if "{" in item.path:
        name = item.path.partition("{")[2].partition(":")[0].rstrip("}")
        result["parameters"] = [{"name": name, "in": "path", "required": True, "schema": {"type": "string"}}]
    if item.body is not None:
        result["requestBody"] = {"required": True, "content": {"application/json": {"schema": reference[item.body]}}}
    if with_key and item.path not in OPEN_PATHS:
        result["security"] = [{"bearer": []}]
    return result
