"""Formats whose calls are written like XML, a parameter at a time: qwen3_coder, seed_oss, minimax_m2, glm45."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from jaxserve.text.answers.reader import Format, Reader, Steps

# References that are followed to find the types of a parameter.
_MAX_REFERENCES = 20


class Markup(NamedTuple):
    """How calls are written: what begins and ends them, a pattern of one call, and one of a parameter within it."""

    begins: tuple[str, ...]
    end: str
    call: re.Pattern[str]
    parameter: re.Pattern[str]


def _parameters_by_name(tag: str) -> re.Pattern[str]:
    """Return the pattern of `<parameter=name>value</parameter>`; the last part is missing sometimes."""
    return re.compile(rf"<parameter{tag}>(.*?)(?:</parameter>|(?=<parameter)|$)", re.DOTALL)


_FUNCTION = re.compile(r"<function=([^>\n]{1,256})>(.*?)(?:</function>|$)", re.DOTALL)
_PARAMETER = _parameters_by_name(r"=([^>\n]{1,256})")
QWEN3_CODER = Markup(("<tool_call>", "<function="), "</tool_call>", _FUNCTION, _PARAMETER)
SEED_OSS = Markup(("<seed:tool_call>",), "</seed:tool_call>", _FUNCTION, _PARAMETER)
MINIMAX_M2 = Markup(
    ("<minimax:tool_call>",),
    "</minimax:tool_call>",
    re.compile(r"<invoke name=\"?([^>\"\n]{1,256})\"?>(.*?)(?:</invoke>|$)", re.DOTALL),
    _parameters_by_name(r" name=\"?([^>\"\n]{1,256})\"?"),
)
GLM45 = Markup(
    ("<tool_call>",),
    "</tool_call>",
    re.compile(r"\s*([\w.\-/]{1,256})\s*((?:<arg_key>.*)?)$", re.DOTALL),
    re.compile(r"<arg_key>([^<]{1,256})</arg_key>\s*<arg_value>(.*?)(?:</arg_value>|$)", re.DOTALL),
)


def markup(form: Markup, tools: Mapping[str, Any]) -> Format:
    """Return the format of calls of `tools`, JSON schemas of the parameters by function, which give values types."""

    def read(reader: Reader) -> Steps[None]:
        while True:
            blanks, mark = yield from reader.copy("content", *form.begins)
            if not mark:
                return
            end = form.end
            opening = mark
            if mark.endswith("="):  # a call without the marks around it
                end, opening = "</function>", ""
            body, ended = yield from reader.take_until(end)
            inside = body if opening else mark + body
            calls = _calls(form, inside, tools)
            for name, arguments in calls:
                reader.add_call(name, arguments)
            if not calls:
                reader.add("content", blanks + mark + body + ended)
            elif not opening:
                blanks = yield from reader.take_space()
                if not (yield from reader.take(form.end)):
                    reader.add("content", blanks)

    return read


def _calls(form: Markup, text: str, tools: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the calls in a text that holds nothing else; else none."""
    found = []
    at = 0
    for call in form.call.finditer(text):
        if text[at : call.start()].strip():
            return []
        at = call.end()
        name, body = call[1].strip(), call[2]
        if form.parameter.sub("", body).strip():
            return []
        schema = tools.get(name)
        arguments = {
            key.strip(): _value(value, _parameter(schema, key.strip())) for key, value in form.parameter.findall(body)
        }
        found.append((name, _dump(arguments)))
    return [] if text[at:].strip() else found


def _dump(arguments: dict[str, Any]) -> str:
    try:
        text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        text.encode()
    except (ValueError, RecursionError):
        return json.dumps({name: str(value) for name, value in arguments.items()})
    return text


def _parameter(schema: Any, name: str) -> Any:
    properties = schema.get("properties") if isinstance(schema, Mapping) else None
    found = properties.get(name, {}) if isinstance(properties, Mapping) else {}
    for _ in range(_MAX_REFERENCES):
        reference = found.get("$ref") if isinstance(found, Mapping) else None
        if not isinstance(reference, str) or not reference.startswith("#/"):
            break
        found = schema
        for part in reference[2:].split("/"):
            found = found.get(part, {}) if isinstance(found, Mapping) else {}
    return found


def _value(text: str, schema: Any) -> Any:
    """Return a value as its schema wants it: as JSON if that has one of its types, else as text."""
    text = text.removeprefix("\n").removesuffix("\n")
    types = _types(schema)
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        lowered = text.strip().lower()
        named = {"true": True, "false": False, "none": None, "null": None}  # as Python writes them
        return named[lowered] if lowered in named and "string" not in types and types else text
    if not types or isinstance(value, str):
        return text if not types or "string" in types else value
    return value if _type_of(value) & types or "string" not in types else text


def _types(schema: Any) -> set[str]:
    """Return the types that a schema names, through `anyOf` and `oneOf`; none if it names none."""
    if not isinstance(schema, Mapping):
        return set()
    named = schema.get("type", [])
    types = {named} if isinstance(named, str) else {one for one in named if isinstance(one, str)}
    for key in ("anyOf", "oneOf", "allOf"):
        for one in schema.get(key, ()) if isinstance(schema.get(key), list) else ():
            types |= _types(one)
    for value in schema.get("enum", ()) if isinstance(schema.get("enum"), list) else ():
        types |= _type_of(value)
    return types


def _type_of(value: Any) -> set[str]:
    if isinstance(value, bool):
        return {"boolean"}
    if isinstance(value, int | float):
        return {"number", "integer"} if isinstance(value, int) else {"number"}
    names = {str: "string", list: "array", dict: "object", type(None): "null"}
    return {names[type(value)]}
