"""Types of request fields. Both the check of a value and its JSON Schema come from the field's type.

Owns the types that say more than Python's: limits known once the model is loaded (`bound_at_load`), unsupported fields,
which accept only values without an effect (`accepts_only`), and schemas written by hand (`explicit_schema`).
"""

from __future__ import annotations

import functools
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from jaxserve import api_types
from jaxserve.api_types import MAX_LOGIT_BIAS, MAX_STOP_IDS
from jaxserve.errors import InvalidRequestError
from jaxserve.text.requests import MAX_PRIORITY

MAX_SEQUENCES = 2048
MAX_STOP_STRINGS = 16
TOKEN_KEY = "^(0|[1-9][0-9]{0,9})$"

# Keys in a schema that `schemas.py` replaces: the first by its own value, the second by limits of the served model.
EXPLICIT_SCHEMA, LOAD_BOUND = "x-explicit-schema", "x-bound-at-load"

type LoadBound = Literal[
    "chat_template",
    "documents",
    "model",
    "num_logprobs",
    "pooled_ids",
    "priority",
    "prompt_ids",
    "reasoning_effort",
    "stop_ids",
    "template_arguments",
    "token_count",
    "token_id",
    "token_key",
]


def accepts_only(*values: object, advice: str = "leave it out") -> Meta:
    """Return the type of an unsupported field, whose only accepted values are null and `values`: they have no effect.

    `refuse_unsupported_fields` checks it, and `advice` says there what to do instead.
    """
    # The description keeps types apart whose values are equal in Python: `Annotated` would cache one for 1 and True.
    shown = " or ".join(msgspec.json.encode(value).decode() for value in (None, *values))
    problem = f"not supported: only {shown} is accepted; {advice}"
    return Meta(description=problem, extra_json_schema={"enum": [None, *values]})


def explicit_schema(schema: dict[str, Any]) -> Meta:
    """Return `schema` as a field's schema, where its type can't express it; the field's user checks the rest."""
    return Meta(extra_json_schema={EXPLICIT_SCHEMA: schema})


def bound_at_load(bound: LoadBound) -> dict[str, Any]:
    """Return the mark of a schema whose limit depends on the served model."""
    return {LOAD_BOUND: bound}


def one_of(*names: str) -> dict[str, Any]:
    """Return the schema of an object in which exactly one of these fields is not null."""
    null = {"type": "null"}
    return {
        "anyOf": [
            {"required": [name], "properties": {other: {"not": null} if other == name else null for other in names}}
            for name in names
        ]
    }


def requires(name: str, unless: list[object], other: str) -> dict[str, Any]:
    """Return the schema of an object whose field `name` has one of the values `unless`, or whose `other` is true."""
    return {
        "anyOf": [
            {"properties": {name: {"enum": unless}}},
            {"required": [other], "properties": {other: {"const": True}}},
        ]
    }


Null = Annotated[Any, accepts_only()]
NullOrFalse = Annotated[Any, accepts_only(False)]
NullOrTrue = Annotated[Any, accepts_only(True)]
NullOrZero = Annotated[Any, accepts_only(0)]
NullOrOne = Annotated[Any, accepts_only(1)]
NullOrEmptyText = Annotated[Any, accepts_only("")]
NullOrEmptyList = Annotated[Any, accepts_only([])]
NullOrEmptyObject = Annotated[Any, accepts_only({})]

Text = Annotated[str, Meta(min_length=1)]
Name = Annotated[str, Meta(min_length=1, max_length=256)]
ModelName = Annotated[str, Meta(extra_json_schema=bound_at_load("model"))]
VocabularyId = Annotated[int, Meta(extra_json_schema={"minimum": 0, "maximum": 2**31 - 1, **bound_at_load("token_id")})]
NumLogprobs = Annotated[api_types.NumLogprobs, Meta(extra_json_schema=bound_at_load("num_logprobs"))]
StreamInterval = Annotated[int, Meta(ge=1)]
TokenLimit = Annotated[int, Meta(ge=0, extra_json_schema=bound_at_load("token_count"))]
Priority = Annotated[int, Meta(ge=-MAX_PRIORITY, le=MAX_PRIORITY, extra_json_schema=bound_at_load("priority"))]
StopStrings = Text | Annotated[list[Text], Meta(max_length=MAX_STOP_STRINGS)]
_Pattern = Annotated[str, Meta(min_length=1, max_length=512, extra_json_schema={"format": "regex"})]
StopPatterns = _Pattern | Annotated[list[_Pattern], Meta(max_length=MAX_STOP_STRINGS)]
StopIds = Annotated[list[VocabularyId], Meta(max_length=MAX_STOP_IDS, extra_json_schema=bound_at_load("stop_ids"))]
# Keys and values are checked where they are used, since errors there can name both.
_Key = Annotated[str, Meta(extra_json_schema={"pattern": TOKEN_KEY, **bound_at_load("token_key")})]
_Bias = Annotated[float, Meta(extra_json_schema={"minimum": -100, "maximum": 100})]
LogitBias = Annotated[dict[_Key, _Bias], Meta(extra_json_schema={"maxProperties": MAX_LOGIT_BIAS})]


_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0, **bound_at_load("token_id")}}
PROMPT_IDS = {**_IDS, **bound_at_load("prompt_ids")}
POOLED_IDS = {**_IDS, **bound_at_load("pooled_ids")}
PROMPT_TEXT = {"type": "string", "minLength": 1}


def prompt_schema(*kinds: dict[str, Any]) -> Meta:
    """Return the schema of a prompt of one of these kinds, or of a list of prompts of one kind."""
    listed = [{"type": "array", "items": kind, "minItems": 1, "maxItems": MAX_SEQUENCES} for kind in kinds]
    return explicit_schema({"anyOf": [*kinds, *listed]})


@functools.cache
def _unsupported_fields(kind: type[msgspec.Struct]) -> tuple[tuple[msgspec.structs.FieldInfo, Meta], ...]:
    """Return the unsupported fields of a request type, each with what `accepts_only` says of it."""
    return tuple(
        (field, meta)
        for field in msgspec.structs.fields(kind)
        for meta in getattr(field.type, "__metadata__", ())
        if "enum" in (meta.extra_json_schema or {})
    )


def refuse_unsupported_fields(request: msgspec.Struct, where: str = "") -> None:
    """Raise `InvalidRequestError` for an unsupported field with a value that is not accepted."""
    for field, meta in _unsupported_fields(type(request)):
        value = getattr(request, field.name)
        if value is None:
            continue
        accepted = (meta.extra_json_schema or {})["enum"]
        # In JSON, false is not 0.
        if any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in accepted):
            continue
        param = where + field.encode_name
        raise InvalidRequestError(f"{param} is {meta.description}", param=param)
