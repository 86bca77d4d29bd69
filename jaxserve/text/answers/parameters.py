"""What a JSON schema of arguments says about one of them: its schema and its types."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxserve.text.answers.json_text import type_of
from jaxserve.text.grammars.custom.custom_text import CustomText
from jaxserve.text.grammars.json_schema import resolved

LARK = "lark"
"""The type of a text in a grammar, which is written as JSON."""
# The depth to which schemas within schemas are looked at.
_MAX_DEPTH = 20


def parameter_schema(arguments: Any, name: str) -> Any:
    """Return the schema of a parameter, {} if there is none."""
    arguments = resolved(arguments, arguments)
    if not isinstance(arguments, Mapping):
        return {}
    properties, others = arguments.get("properties"), arguments.get("additionalProperties", {})
    return properties[name] if isinstance(properties, Mapping) and name in properties else others


def types_of(schema: Any, root: Any, depth: int = 0) -> set[str]:
    """Return the types that a schema of the document `root` names; none if it names none.

    A text in Lark has a type of its own: it is written as JSON where other texts stand without quotes.
    """
    schema = resolved(schema, root)
    if isinstance(schema, CustomText):
        return {"string" if schema.syntax == "regex" else LARK}
    if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
        return set()
    named = schema.get("type", [])
    types = {named} if isinstance(named, str) else {one for one in named if isinstance(one, str)}
    for key in ("anyOf", "oneOf", "allOf"):
        for one in schema.get(key, ()) if isinstance(schema.get(key), list) else ():
            types |= types_of(one, root, depth + 1)
    values = schema.get("enum", ()) if isinstance(schema.get("enum"), list) else ()
    return types | {type_of(value) for value in [*values, *([schema["const"]] if "const" in schema else [])]}
