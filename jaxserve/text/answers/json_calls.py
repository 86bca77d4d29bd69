"""Formats whose calls are JSON: hermes, granite, mistral, llama3_json, deepseek_v3, and what grammars hold."""

from __future__ import annotations

import json
import re
from collections.abc import Collection

from jaxserve.text.answers.json_text import elements, is_object, members
from jaxserve.text.answers.reader import Format, Reader, Steps

_NAME = re.compile(r"[\w.\-/]{1,256}")
_NAME_BEGINNING = re.compile(r"[\w.\-/]{0,256}")
_CALL_ID = re.compile(r"\[CALL_ID\]\w{1,64}")
_CALL_ID_BEGINNING = re.compile(r"(\[[A-Z_]*\]?)?\w{0,64}")
_ARGUMENTS = ("arguments", "parameters")


def marked_json(begins: tuple[str, ...], end: str) -> Format:
    """Return the format of calls as JSON objects, or lists of them, after a mark; a mark `end` may follow them."""

    def read(reader: Reader) -> Steps[None]:
        while True:
            blanks, mark = yield from reader.copy("content", *begins)
            if not mark:
                return
            mark += yield from reader.take_space()
            value = yield from reader.take_json()
            if value is None or not add_calls(reader, value):
                reader.add("content", blanks + mark + (value or ""))
                continue
            blanks = yield from reader.take_space()
            if not (yield from reader.take(end)):
                reader.add("content", blanks)

    return read


def mistral(reader: Reader) -> Steps[None]:
    """Read Mistral's calls: `[TOOL_CALLS]` and a JSON list, or in newer models `[TOOL_CALLS]name[ARGS]{…}` for each."""
    begin = "[TOOL_CALLS]"
    while True:
        blanks, mark = yield from reader.copy("content", begin)
        if not mark:
            return
        raw = blanks + mark + (yield from reader.take_space())
        name = yield from reader.starts(_NAME, _NAME_BEGINNING)
        if name is not None:
            raw += yield from reader.take(name[0])
            call_id = yield from reader.starts(_CALL_ID, _CALL_ID_BEGINNING)
            raw += (yield from reader.take(call_id[0])) if call_id is not None else ""
            raw += yield from reader.take("[ARGS]")
        value = yield from reader.take_json()
        if value is None:
            reader.add("content", raw)
        elif name is not None and value.startswith("{"):
            reader.add_call(name[0], value)
        elif name is not None or not add_calls(reader, value):
            reader.add("content", raw + value)


def deepseek_v3(reader: Reader) -> Steps[None]:
    """Read DeepSeek's calls, one after another: in V3 and R1 with a type and JSON in a code block, in V3.1 plain."""
    section, begin, middle, end = (f"<｜tool▁{name}｜>" for name in ("calls▁begin", "call▁begin", "sep", "call▁end"))
    section_end = "<｜tool▁calls▁end｜>"
    while True:
        blanks, mark = yield from reader.copy("content", section, begin, section_end)
        if not mark:
            return
        raw = blanks + mark
        if mark == section_end and reader.has_calls:
            continue
        if mark == section:
            raw += yield from reader.take_space()
            mark = yield from reader.take(begin)
            raw += mark
        if mark != begin:
            reader.add("content", raw)
            continue
        body, ended = yield from reader.take_until(end)
        head, _, text = body.partition(middle)
        name, text = head.strip(), text.strip()
        if name == "function":
            name, _, text = text.partition("\n")
            name, text = name.strip(), text.strip().removeprefix("```json").removesuffix("```").strip()
        if is_object(text) and _NAME.fullmatch(name):
            reader.add_call(name, text)
        else:
            reader.add("content", raw + body + ended)


def bare_json(names: Collection[str]) -> Format:
    """Return Llama 3's format: the answer is nothing but JSON objects, each a call of one of the functions `names`."""

    def read(reader: Reader) -> Steps[None]:
        raw = yield from reader.take_space()
        raw += yield from reader.take("<|python_tag|>")
        raw += yield from reader.take_space()
        while True:
            value = yield from reader.take_json()
            if value is None or not add_calls(reader, value, names):
                reader.add("content", raw + (value or ""))
                break
            raw = yield from reader.take_space()
            raw += yield from reader.take(";", ",")
            raw += yield from reader.take_space()
        yield from reader.copy("content")

    return read


def add_calls(reader: Reader, text: str, names: Collection[str] | None = None) -> bool:
    """Add the calls that a JSON text holds, a call or a list of calls, of the functions `names`; or return False."""
    try:
        calls = [_call(element) for element in elements(text)]
    except (ValueError, RecursionError):
        return False
    if not calls or (names is not None and any(name not in names for name, _ in calls)):
        return False
    for name, arguments in calls:
        reader.add_call(name, arguments)
    return True


def _call(text: str) -> tuple[str, str]:
    """Return the function and the arguments of a call in JSON. Raises `ValueError` if it is none."""
    call = members(text)
    if "function" in call and "name" not in call:
        call = members(call["function"])
    name = json.loads(call.get("name", "null"))
    arguments = next((call[key] for key in _ARGUMENTS if key in call), "{}")
    if arguments.startswith('"'):  # some models write them as a text
        arguments = json.loads(arguments).strip()
    if not isinstance(name, str) or not name or not is_object(arguments):
        raise ValueError("not a call")
    return name, arguments
