"""What a field of a request may hold, said once, in its type: the check and the JSON Schema both come from there.

Owns the types that say more than Python's: bounds that the schema learns when the model is loaded (`Fitted`), fields
that are known but not built and take only values that ask for nothing (`only`), and schemas written by hand
(`described`).
"""

from __future__ import annotations

import functools
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from jaxserve.api_types import MAX_LOGIT_BIAS, MAX_STOP_IDS
from jaxserve.errors import InvalidRequestError
from jaxserve.text.requests import MAX_PRIORITY

MAX_SEQUENCES = 2048
MAX_STOP_STRINGS = 16
TOKEN_KEY = "^(0|[1-9][0-9]{0,9})$"

# Keys of a schema's node that `schemas.py` replaces: by the node itself, and by bounds of what is served.
DESCRIBED, FITTED = "x-described", "x-fitted"

type Fitted = Literal[
    "documents",
    "model",
    "priority",
    "prompt_ids",
    "stop_ids",
    "template_arguments",
    "token_count",
    "token_id",
    "token_key",
]


def only(*values: object) -> Meta:
    """Null and `values` ask for nothing and pass; `refuse_asking` refuses whatever else by name."""
    # Said in words too, or `Annotated` takes [None, 1] for [None, True], which are equal, and gives the other type.
    shown = " or ".join(msgspec.json.encode(value).decode() for value in (None, *values))
    return Meta(description=f"known, not supported: only {shown}", extra_json_schema={"enum": [None, *values]})


def described(schema: dict[str, Any]) -> Meta:
    """The schema of a field whose type can't say it all; the rest is checked where the field is used."""
    return Meta(extra_json_schema={DESCRIBED: schema})


def fitted(bound: Fitted) -> dict[str, Any]:
    """Marks a node of a schema whose bound depends on what is served."""
    return {FITTED: bound}


def one_of(*names: str) -> dict[str, Any]:
    """The schema of an object in which one of these fields is given and the others are null."""
    null = {"type": "null"}
    return {
        "anyOf": [
            {"required": [name], "properties": {other: {"not": null} if other == name else null for other in names}}
            for name in names
        ]
    }


def needs(name: str, unless: list[object], other: str) -> dict[str, Any]:
    """The schema of an object in which a field has one of the values `unless`, or `other` is true."""
    return {
        "anyOf": [
            {"properties": {name: {"enum": unless}}},
            {"required": [other], "properties": {other: {"const": True}}},
        ]
    }


Null = Annotated[Any, only()]
NullOrFalse = Annotated[Any, only(False)]
NullOrTrue = Annotated[Any, only(True)]
NullOrZero = Annotated[Any, only(0)]
NullOrOne = Annotated[Any, only(1)]
NullOrNoText = Annotated[Any, only("")]
NullOrNoList = Annotated[Any, only([])]
NullOrNoObject = Annotated[Any, only({})]

Text = Annotated[str, Meta(min_length=1)]
Name = Annotated[str, Meta(min_length=1, max_length=256)]
ModelName = Annotated[str, Meta(extra_json_schema=fitted("model"))]
TokenIdHere = Annotated[int, Meta(extra_json_schema={"minimum": 0, "maximum": 2**31 - 1, **fitted("token_id")})]
TokenLimit = Annotated[int, Meta(ge=0, extra_json_schema=fitted("token_count"))]
Priority = Annotated[int, Meta(ge=-MAX_PRIORITY, le=MAX_PRIORITY, extra_json_schema=fitted("priority"))]
StopStrings = Text | Annotated[list[Text], Meta(max_length=MAX_STOP_STRINGS)]
_Pattern = Annotated[str, Meta(min_length=1, max_length=512, extra_json_schema={"format": "regex"})]
StopPatterns = _Pattern | Annotated[list[_Pattern], Meta(max_length=MAX_STOP_STRINGS)]
StopIds = Annotated[list[TokenIdHere], Meta(max_length=MAX_STOP_IDS, extra_json_schema=fitted("stop_ids"))]
# Errors of keys and values name them best where they are used.
_Key = Annotated[str, Meta(extra_json_schema={"pattern": TOKEN_KEY, **fitted("token_key")})]
_Bias = Annotated[float, Meta(extra_json_schema={"minimum": -100, "maximum": 100})]
LogitBias = Annotated[dict[_Key, _Bias], Meta(extra_json_schema={"maxProperties": MAX_LOGIT_BIAS})]


@functools.cache
def _asking_nothing(kind: type[msgspec.Struct]) -> tuple[tuple[str, tuple[object, ...]], ...]:
    """The fields of a request that are known and not built, each with the values that pass."""
    found = []
    for field in msgspec.structs.fields(kind):
        for meta in getattr(field.type, "__metadata__", ()):
            schema = meta.extra_json_schema or {}
            if "enum" in schema:
                found.append((field.name, tuple(schema["enum"])))
    return tuple(found)


def refuse_asking(request: msgspec.Struct, where: str = "") -> None:
    """Raises `InvalidRequestError` for a field that isn't built and whose value asks for something."""
    for name, passing in _asking_nothing(type(request)):
        value = getattr(request, name)
        # False is no 0 in JSON.
        if value is None or any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in passing):
            continue
        shown = " or ".join(msgspec.json.encode(one).decode() for one in passing)
        raise InvalidRequestError(f"{where}{name} is not supported: only {shown} is accepted", param=where + name)
