"""The format of Llama 4 and others: the answer is nothing but a Python list of calls, `[f(a=1), g(b="x")]`."""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Collection
from typing import Any

from jaxserve.text.answers.reader import Format, Reader, Steps

_OPENING = re.compile(r"\[\s*([A-Za-z_][\w.]*)\(")
_BEGINNING = re.compile(r"\[?\s*([A-Za-z_][\w.]*)?\(?")
_BEGIN, _END = "<|python_start|>", "<|python_end|>"
_NAMES = {"true": True, "false": False, "null": None}
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


def _calls(text: str, names: Collection[str]) -> list[tuple[str, str]]:
    """Return the calls in a text that holds nothing else; else none."""
    if len(text) > _MAX_CHARACTERS:
        return []
    try:
        with warnings.catch_warnings(action="ignore"):  # of escapes that mean nothing
            body = ast.parse(text.strip(), mode="eval").body
        calls = [_call(node) for node in body.elts] if isinstance(body, ast.List) else []
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return []
    return calls if all(name in names for name, _ in calls) else []


def _call(node: ast.expr) -> tuple[str, str]:
    """Return the function and the arguments of a call. Raises `ValueError` or `TypeError` if it is none."""
    if not isinstance(node, ast.Call) or node.args:
        raise ValueError("not a call with named arguments")
    arguments = {_name(keyword.arg): _value(keyword.value) for keyword in node.keywords}
    text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    text.encode()  # raises for half a surrogate pair
    return ast.unparse(node.func), text


def _value(node: ast.expr) -> Any:
    """Return the value of a literal, in which JSON's names count too."""
    match node:
        case ast.Name(id=name) if name in _NAMES:
            return _NAMES[name]
        case ast.List(elts=elements) | ast.Tuple(elts=elements):
            return [_value(element) for element in elements]
        case ast.Dict(keys=keys, values=values):
            return {_name(getattr(key, "value", None)): _value(value) for key, value in zip(keys, values)}
    return ast.literal_eval(node)


def _name(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError("not the name of an argument")
    return value
