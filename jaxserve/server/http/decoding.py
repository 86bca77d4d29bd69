"""Decodes request bodies, with errors that name the field at fault. Knows no route."""

from __future__ import annotations

import difflib
import re
from typing import Any

import msgspec

from jaxserve.errors import InvalidRequestError


def decode_body[T](decoder: msgspec.json.Decoder[T], body: bytes, fields: tuple[str, ...]) -> T:
    """Decode `body`. Raises `InvalidRequestError` naming the field at fault; for an unknown field it suggests the
    nearest of `fields`."""
    try:
        try:
            return decoder.decode(body)
        except msgspec.ValidationError as error:
            if "`, got `float`" not in str(error):
                raise
            # In JSON, 72.0 is an integer too, and some clients write it so.
            return decoder.decode(msgspec.json.encode(_with_integers(msgspec.json.decode(body))))
    except msgspec.ValidationError as error:
        raise validation_error(str(error), fields=fields, body=body) from error
    except RecursionError as error:
        raise InvalidRequestError("The JSON body is nested too deep") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        hint = " (NaN and Infinity are not JSON)" if b"NaN" in body or b"Infinity" in body else ""
        raise InvalidRequestError(f"The body is not valid JSON: {error}{hint}") from error


def _with_integers(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**63:
        return int(value)
    if isinstance(value, list):
        return [_with_integers(item) for item in value]
    if isinstance(value, dict):
        return {name: _with_integers(item) for name, item in value.items()}
    return value


def validation_error(
    problem: str, where: str = "", *, fields: tuple[str, ...] = (), body: bytes = b""
) -> InvalidRequestError:
    """Return the client's error for `problem`, the text of a `msgspec.ValidationError` in the value at `where`."""
    message, _, path = problem.partition(" - at `$")
    path = (where + path.rstrip("`")).lstrip(".")
    if message.startswith(("Object contains unknown field", "Object missing required field")):
        name = message.split("`")[1]
        full = f"{path}.{name}" if path else name
        if message.startswith("Object missing"):
            return InvalidRequestError(f"Field {full!r} is required", param=full)
        near = difflib.get_close_matches(name, fields, n=1) if not path else []
        advice = f"; did you mean {near[0]!r}?" if near else ""
        return InvalidRequestError(f"Unknown field {full[:200]!r}{advice}", param=full[:200])
    if not path:
        return InvalidRequestError(f"The body must be a JSON object: {message}")
    got = "" if ", got" in message else _got(body, path)
    return InvalidRequestError(f"{path}: {message[0].lower()}{message[1:].replace(' | null', '')}{got}", param=path)


def _got(body: bytes, path: str) -> str:
    """Return ", got VALUE" for the value at `path`, for an error that names only the limit; "" for invalid JSON."""
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
