"""Decodes request bodies, with errors that name the field at fault. Knows no route."""

from __future__ import annotations

import difflib
import re
from typing import Any

import msgspec
import msgspec.inspect

from jaxserve.errors import InvalidRequestError

# Reading this many holds the server for about 0.1 s.
_MAX_VALUES = 2**21
_MAX_PARTS = 2**18
_MAX_SHOWN = 200
# In longer fields, only lists of numbers may have integers written as floats.
_SHORT_FIELD = 2**14
_LONG_BODY = 2**20
_STRING = rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"'
_MORE_VALUES = re.compile(rb'(?:[^",]*+(?:%b[^",]*+)*+,){%d}+' % (_STRING, _MAX_VALUES), re.DOTALL)
_MORE_PARTS = re.compile(rb'(?:[^"\[{]*+(?:%b|[\[{])){%d}+' % (_STRING, _MAX_PARTS + 1), re.DOTALL)


def decode_body[T: msgspec.Struct](decoder: msgspec.json.Decoder[T], body: bytes, kind: type[T]) -> T:
    """Decode `body` as a struct of this kind. Raises `InvalidRequestError` naming the field at fault; for an unknown
    field it suggests the nearest one."""
    _check_size(body)
    try:
        try:
            return decoder.decode(body)
        except msgspec.ValidationError as error:
            return decoder.decode(_with_integers(body, error))
    except msgspec.ValidationError as error:
        raise validation_error(str(error), kind=kind, body=body) from error
    except RecursionError as error:
        raise InvalidRequestError("The JSON body is nested too deep") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        hint = " (NaN and Infinity are not JSON)" if b"NaN" in body or b"Infinity" in body else ""
        raise InvalidRequestError(f"The body is not valid JSON: {error}{hint}") from error


def _check_size(body: bytes) -> None:
    """Raise `InvalidRequestError` for a body that takes long to read."""
    num_parts = body.count(b'"') // 2 + body.count(b"[") + body.count(b"{")
    if num_parts > _MAX_PARTS and _MORE_PARTS.match(body):
        raise InvalidRequestError(
            f"The body has more than {_MAX_PARTS} strings, lists and objects; send several requests"
        )
    if body.count(b",") >= _MAX_VALUES and _MORE_VALUES.match(body):
        raise InvalidRequestError(f"The body has more than {_MAX_VALUES} values; send several requests")


def _with_integers(body: bytes, error: msgspec.ValidationError) -> bytes:
    """Return a body with integers in place of numbers like 72.0, as some clients write integers. Raises `error` unless
    it is about one."""
    if "`, got `float`" not in str(error):
        raise error
    fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    for name, raw in fields.items():
        value = bytes(raw)
        if len(value) < _SHORT_FIELD:
            value = msgspec.json.encode(_integers(msgspec.json.decode(value)))
        elif value.startswith(b"[") and b'"' not in value:
            value = value.replace(b".0,", b",").replace(b".0]", b"]")
        fields[name] = msgspec.Raw(value)
    return msgspec.json.encode(fields)


def _integers(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**63:
        return int(value)
    if isinstance(value, list):
        return [_integers(item) for item in value]
    if isinstance(value, dict):
        return {name: _integers(item) for name, item in value.items()}
    return value


def validation_error(
    problem: str, where: str = "", *, kind: type[msgspec.Struct], body: bytes = b""
) -> InvalidRequestError:
    """Return the client's error for `problem`, the text of a `msgspec.ValidationError` in the value at `where`, which
    should be of this kind."""
    message, _, inner = problem.partition(" - at `$")
    inner = inner.rstrip("`")
    path = (where + inner).lstrip(".")
    if message.startswith(("Object contains unknown field", "Object missing required field")):
        name = message.split("`")[1][:_MAX_SHOWN]
        full = f"{path}.{name}" if path else name
        if message.startswith("Object missing"):
            return InvalidRequestError(f"Field {full!r} is required", param=full)
        near = difflib.get_close_matches(name, kind.__struct_fields__, n=1) if path == where else []
        advice = f"did you mean {near[0]!r}?" if near else "leave it out"
        return InvalidRequestError(f"Unknown field {full!r}; {advice}", param=full)
    if not path:
        return InvalidRequestError(f"The body must be a JSON object: {message}")
    if message.startswith(("Invalid value", "Invalid enum value")):
        possible = ", ".join(map(str, _possible_values(kind, inner)))
        shown = message[:_MAX_SHOWN]
        return InvalidRequestError(f"{path}: {shown[0].lower()}{shown[1:]}; it can be {possible}", param=path)
    got = "" if ", got" in message else _got(body, path)
    return InvalidRequestError(f"{path}: {message[0].lower()}{message[1:].replace(' | null', '')}{got}", param=path)


def _possible_values(kind: type[msgspec.Struct], path: str) -> list[object]:
    """Return the values that the part at `path` of a struct can have, which are few."""
    options: list[Any] = [msgspec.inspect.type_info(kind)]
    found: list[object] = []
    for name in re.findall(r"[^.\[\]]+|\[", path):
        inner = []
        for one in options:
            if isinstance(one, msgspec.inspect.StructType):
                inner += [field.type for field in one.fields if field.encode_name == name]
                found += [one.tag] if one.tag_field == name else []
            elif isinstance(one, msgspec.inspect.ListType) and name == "[":
                inner.append(one.item_type)
        options = [option for one in inner for option in _options(one)]
    return found + [value for one in options if isinstance(one, msgspec.inspect.LiteralType) for value in one.values]


def _options(kind: msgspec.inspect.Type) -> list[Any]:
    """Return the types of which a value has one."""
    if isinstance(kind, msgspec.inspect.Metadata):
        return _options(kind.type)
    if isinstance(kind, msgspec.inspect.UnionType):
        return [option for one in kind.types for option in _options(one)]
    return [kind]


def _got(body: bytes, path: str) -> str:
    """Return ", got VALUE" for the value at `path`, for an error that names only the limit; "" for invalid JSON, and
    for a body that takes long to decode again."""
    if len(body) > _LONG_BODY:
        return ""
    try:
        value = msgspec.json.decode(body)
        for name, number in re.findall(r"([^.\[\]]+)|\[(\d+)\]", path):
            value = value[int(number) if number else name]
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, LookupError, TypeError):
        return ""
    if isinstance(value, list | dict):
        return f", got {len(value)} entries"
    shown = msgspec.json.encode(value).decode()
    return f", got {shown[:40]}"
