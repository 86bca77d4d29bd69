"""JSON that models write: where it ends, and its parts as they stand, so that nothing of them changes."""

from __future__ import annotations

import json
import re
from typing import Any

_OUTSIDE_STRING = re.compile(r'["{}\[\]]')
_INSIDE_STRING = re.compile(r'"|\\.', re.DOTALL)
_SPACE = re.compile(r"\s*")
_TYPES = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


# Values are read for their types and where they end: integers may have any length.
_DECODER = json.JSONDecoder(parse_constant=_refuse_constant, parse_int=len)


def json_type(text: str) -> str | None:
    """Return the type of a JSON text, as JSON schemas call it; None if it isn't JSON."""
    try:
        return type_of(_DECODER.decode(text))
    except (ValueError, RecursionError):
        return None


def type_of(value: Any) -> str:
    """Return the type of a value, as JSON schemas call it."""
    return _TYPES.get(type(value), "null")


def is_object(text: str) -> bool:
    """Return whether the text is a JSON object."""
    return text.startswith("{") and json_type(text) == "object"


def members(text: str) -> dict[str, str]:
    """Return the JSON texts of the members of a JSON object, as they stand. Raises `ValueError` if it is none."""
    found: dict[str, str] = {}
    if not text.startswith("{"):
        raise ValueError("not an object")
    at = skip_space(text, 1)
    while text[at : at + 1] != "}":
        name, at = _DECODER.raw_decode(text, at)
        start = skip_space(text, skip_space(text, at) + 1)
        _, at = _DECODER.raw_decode(text, start)
        found[str(name)] = text[start:at]
        at = skip_space(text, at)
        if text[at : at + 1] == ",":
            at = skip_space(text, at + 1)
    return found


def elements(text: str) -> list[str]:
    """Return the JSON texts of the elements of a JSON list, as they stand; any other text is its only element."""
    if not text.startswith("["):
        return [text]
    found = []
    at = skip_space(text, 1)
    while text[at : at + 1] != "]":
        _, end = _DECODER.raw_decode(text, at)
        found.append(text[at:end])
        at = skip_space(text, end)
        if text[at : at + 1] == ",":
            at = skip_space(text, at + 1)
    return found


def follow(text: str, at: int, depth: int = 0, in_string: bool = False) -> tuple[int, int, bool]:
    """Follow a JSON object or list to its end, where `depth` is 0, or to the end of the text.

    Return that place, and the state to go on from there.
    """
    while found := (_INSIDE_STRING if in_string else _OUTSIDE_STRING).search(text, at):
        at = found.end()
        if found[0] == '"':
            in_string = not in_string
        elif not in_string:
            depth += 1 if found[0] in "{[" else -1
            if not depth:
                return at, depth, in_string
    return len(text) - (in_string and text.endswith("\\")), depth, in_string


def skip_space(text: str, at: int) -> int:
    """Return where the blanks from `at` on end."""
    found = _SPACE.match(text, at)
    assert found is not None
    return found.end()
