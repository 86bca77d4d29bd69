"""What a JSON schema of arguments says about one of them: its schema and its types."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxserve.text.answers.json_text import type_of

# References that are followed, and schemas within schemas that are looked at.
_MAX_DEPTH = 20


def parameter_schema(arguments: Any, name: str) -> Any:
    """Return the schema of a parameter, {} if there is none."""
    arguments = resolved(arguments, arguments)
    if not isinstance(arguments, Mapping):
        return {}
    properties, others = arguments.get("properties"), arguments.get("additionalProperties", {})
    return properties[name] if isinstance(properties, Mapping) and name in properties else others


def resolved(schema: Any, root: Any) -> Any:
    """Follow the references of a schema in the document `root`."""
    for _ in range(_MAX_DEPTH):
        reference = schema.get("$ref") if isinstance(schema, Mapping) else None
        if not isinstance(reference, str) or not reference.startswith("#/"):
            break
        schema = root
        for part in reference[2:].split("/"):
            schema = schema.get(part, {}) if isinstance(schema, Mapping) else {}
    return schema


def types_of(schema: Any, root: Any, depth: int = 0) -> set[str]:
    """Return the types that a schema of the document `root` names; none if it names none."""
    schema = resolved(schema, root)
    if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
        return set()
    named = schema.get("type", [])
    types = {named} if isinstance(named, str) else {one for one in named if isinstance(one, str)}
    for key in ("anyOf", "oneOf", "allOf"):
        for one in schema.get(key, ()) if isinstance(schema.get(key), list) else ():
            types |= types_of(one, root, depth + 1)
    values = schema.get("enum", ()) if isinstance(schema.get("enum"), list) else ()
    return types | {type_of(value) for value in [*values, *([schema["const"]] if "const" in schema else [])]}
