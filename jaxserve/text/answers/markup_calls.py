"""Formats whose calls are written like XML, a parameter at a time: qwen3_coder, seed_oss, minimax_m2, glm45."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from jaxserve.text.answers.json_text import follow, json_type, skip_space
from jaxserve.text.answers.parameters import LARK, parameter_schema, types_of
from jaxserve.text.answers.reader import Format, Reader, Steps


class Markup(NamedTuple):
    """How calls are written: the marks that begin and end them, and patterns of the beginning and the end of a call, of
    the beginning of a parameter, and of the end of its value."""

    begins: tuple[str, ...]
    end: str
    call: re.Pattern[str]
    call_end: re.Pattern[str]
    parameter: re.Pattern[str]
    value_end: re.Pattern[str]


# What a custom tool with a grammar gets: a JSON text, in which no mark counts. Each end within one has the call read
# anew.
_TEXT = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)
_MAX_ENDS = 64
_PYTHON_NAMES = {"true": "true", "false": "false", "none": "null", "null": "null"}
_FUNCTION = re.compile(r"\s*<function=([^>\n]{1,256})>")
_FUNCTION_END = re.compile(r"\s*(?:</function>|\Z)")
_PARAMETER = re.compile(r"\s*<parameter=([^>\n]{1,256})>")
_PARAMETER_END = re.compile(r"</parameter>|(?=<parameter=)|(?=</function>)|\Z")
_FUNCTIONS = (_FUNCTION, _FUNCTION_END, _PARAMETER, _PARAMETER_END)
QWEN3_CODER = Markup(("<tool_call>", "<function="), "</tool_call>", *_FUNCTIONS)
SEED_OSS = Markup(("<seed:tool_call>",), "</seed:tool_call>", *_FUNCTIONS)
MINIMAX_M2 = Markup(
    ("<minimax:tool_call>",),
    "</minimax:tool_call>",
    re.compile(r"\s*<invoke name=\"?([^>\"\n]{1,256})\"?>"),
    re.compile(r"\s*(?:</invoke>|\Z)"),
    re.compile(r"\s*<parameter name=\"?([^>\"\n]{1,256})\"?>"),
    re.compile(r"</parameter>|(?=<parameter name=)|(?=</invoke>)|\Z"),
)
GLM45 = Markup(
    ("<tool_call>",),
    "</tool_call>",
    re.compile(r"\s*([\w.\-/]{1,256})\s*(?=<arg_key>|\Z)"),
    re.compile(r"\s*\Z"),
    re.compile(r"\s*<arg_key>([^<]{1,256})</arg_key>\s*<arg_value>"),
    re.compile(r"</arg_value>|\Z"),
)


def markup(form: Markup, tools: Mapping[str, Any]) -> Format:
    """Return the format of calls of `tools`, JSON schemas of the parameters by function, which give values' types."""

    def read(reader: Reader) -> Steps[None]:
        while True:
            blanks, mark = yield from reader.copy("content", *form.begins)
            if not mark:
                return
            end = form.end
            opening = mark
            if mark.endswith("="):  # a call without the marks around it
                end, opening = "</function>", ""
            body = ended = ""
            calls = None
            for _ in range(_MAX_ENDS):
                more, again = yield from reader.take_until(end)
                body, ended = body + ended + more, again
                calls = _calls(form, body if opening else mark + body, tools, cut=not ended)
                if calls is not None or not ended:
                    break
            for name, arguments in calls or ():
                reader.add_call(name, arguments)
            if not calls:
                reader.add("content", blanks + mark + body + ended)
            elif not opening:
                blanks = yield from reader.take_space()
                if not (yield from reader.take(form.end)):
                    reader.add("content", blanks)

    return read


def _calls(form: Markup, text: str, tools: Mapping[str, Any], *, cut: bool) -> list[tuple[str, str]] | None:
    """Return the calls in a text that holds nothing else; else an empty list, or None if it ends within a JSON text.

    Models leave out end marks sometimes; but where the text may be `cut` off, a call without one may lack arguments.
    """
    found = []
    at, holds_json = 0, True
    while call := form.call.match(text, at):
        name, at = call[1].strip(), call.end()
        schema = tools.get(name)
        arguments: dict[str, str] = {}
        while parameter := form.parameter.match(text, at):
            key, at = parameter[1].strip(), parameter.end()
            types = types_of(parameter_schema(schema, key), schema)
            taken = None
            if LARK in types and text.startswith('"', skip_space(text, at)):
                given = _TEXT.match(text, skip_space(text, at))
                if given is None:
                    return None
                ended = form.value_end.match(text, skip_space(text, given.end()))
                taken = None if ended is None else (given[0], ended.end())
            elif holds_json and types & {"object", "array"}:
                taken = _take_json(text, at, form.value_end)
                holds_json = taken is not None  # else looking again and again would take quadratic time
            arguments[key], at = taken or _take_value(text, at, form.value_end, types)
        end = form.call_end.match(text, at)
        if end is None or (cut and not end[0].strip()):
            return []
        at = end.end()
        members = (f"{json.dumps(key, ensure_ascii=False)}: {value}" for key, value in arguments.items())
        found.append((name, f"{{{', '.join(members)}}}"))
    return [] if text[at:].strip() else found


def _take_json(text: str, at: int, end: re.Pattern[str]) -> tuple[str, int] | None:
    """Return the object or list at `at`, in which no mark counts, and where the text after it begins."""
    start = skip_space(text, at)
    if not text.startswith(("{", "["), start):
        return None
    stop, depth, _ = follow(text, start)
    ended = end.match(text, skip_space(text, stop))
    if depth or ended is None or json_type(text[start:stop]) is None:
        return None
    return text[start:stop], ended.end()


def _take_value(text: str, at: int, end: re.Pattern[str], types: set[str]) -> tuple[str, int]:
    """Return the value at `at` in JSON, and where the text after it begins.

    It stays as it stands if that is JSON of one of its types, or if these don't have texts; else it is a text.
    """
    ended = end.search(text, at)
    assert ended is not None
    value = text[at : ended.start()].removeprefix("\n").removesuffix("\n")
    found = json_type(value)
    stands = None
    if types and "string" not in types:
        stands = value.strip() if found is not None else _PYTHON_NAMES.get(value.strip().lower())
    elif found != "string" and (found in types or (found == "integer" and "number" in types)):
        stands = value.strip()
    return json.dumps(value, ensure_ascii=False) if stands is None else stands, ended.end()
