"""Formats whose calls are Python's. Llama 4 and others write nothing but a list of calls, `[f(a=1), g(b="x")]`; OLMo 3
writes lines between marks."""

from __future__ import annotations

import ast
import json
import math
import re
import warnings
from collections.abc import Collection, Iterable

from jaxserve.text.answers.reader import Format, Reader, Steps

_OPENING = re.compile(r"\[\s*([A-Za-z_][\w.]*)\(")
_BEGINNING = re.compile(r"\[?\s*([A-Za-z_][\w.]*)?\(?")
_BEGIN, _END = "<|python_start|>", "<|python_end|>"
_NAMES = ("true", "false", "null")
_MAX_CHARACTERS = 1 << 17


def pythonic(names: Collection[str]) -> Format:
    """Return the format with calls of the functions `names`."""

    def read(reader: Reader) -> Steps[None]:
        raw = yield from reader.take_space()
        raw += yield from reader.take(_BEGIN)
        raw += yield from reader.take_space()
        opening = yield from reader.starts(_OPENING, _BEGINNING)
        if opening is not None and opening[1] in names:
            text, mark = yield from reader.take_until(_END)
            calls = _calls(text, names)
            for name, arguments in calls:
                reader.add_call(name, arguments)
            raw = "" if calls else raw + text + mark
        reader.add("content", raw)
        yield from reader.copy("content")

    return read


def olmo3(reader: Reader) -> Steps[None]:
    """Read OLMo 3's calls: Python's, a line for each, between `<function_calls>` and its end."""
    while True:
        blanks, mark = yield from reader.copy("content", "<function_calls>")
        if not mark:
            return
        text, ended = yield from reader.take_until("</function_calls>")
        calls = _calls(text, None)
        for name, arguments in calls:
            reader.add_call(name, arguments)
        if not calls:
            reader.add("content", blanks + mark + text + ended)


def _calls(text: str, names: Collection[str] | None) -> list[tuple[str, str]]:
    """Return the calls, of `names` if given, in a text that holds nothing but a list of them, or lines; else none."""
    if len(text) > _MAX_CHARACTERS:
        return []
    try:
        with warnings.catch_warnings(action="ignore"):  # of escapes that mean nothing
            lines = [getattr(line, "value", None) for line in ast.parse(text.strip()).body]
        nodes = lines[0].elts if len(lines) == 1 and isinstance(lines[0], ast.List) else lines
        calls = [_call(node) for node in nodes]
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return []
    return calls if names is None or all(name in names for name, _ in calls) else []


def _call(node: ast.AST | None) -> tuple[str, str]:
    """Return the function and the arguments of a call. Raises `ValueError` or `TypeError` if it is none."""
    if not isinstance(node, ast.Call) or node.args:
        raise ValueError("not a call with named arguments")
    arguments = _object((keyword.arg, keyword.value) for keyword in node.keywords)
    arguments.encode()  # raises for half a surrogate pair
    return ast.unparse(node.func), arguments


def _json(node: ast.expr) -> str:
    """Return a literal as JSON; the names true, false and null of JSON count as literals too."""
    match node:
        case ast.Name(id=name) if name in _NAMES:
            return name
        case ast.List(elts=elements) | ast.Tuple(elts=elements):
            return f"[{', '.join(map(_json, elements))}]"
        case ast.Dict(keys=keys, values=values):
            return _object((getattr(key, "value", None), value) for key, value in zip(keys, values))
    value = ast.literal_eval(node)
    if isinstance(value, float) and math.isinf(value):  # JSON has numbers that Python's floats haven't
        return "1e999" if value > 0 else "-1e999"
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def _object(members: Iterable[tuple[object, ast.expr]]) -> str:
    """Return an object in JSON; of members with the same name, the last one counts."""
    named: dict[str, str] = {}
    for name, value in members:
        if not isinstance(name, str):
            raise ValueError("not the name of an argument")
        named[name] = _json(value)
    return f"{{{', '.join(f'{json.dumps(name, ensure_ascii=False)}: {value}' for name, value in named.items())}}}"
