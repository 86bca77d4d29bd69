"""Calls that a grammar holds: their form, the grammar, and how the calls are read while they are written.

They are written as the model does it, where that is JSON between marks of ordinary text; else as a JSON list.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from jaxserve.text.answers.formats import HERMES, AnswerFormats
from jaxserve.text.answers.reader import Format, Reader, Steps
from jaxserve.text.grammars.formats import schema_of


class Form(NamedTuple):
    """The texts around calls: before all, before each name, before the arguments, after them, between calls, after
    all."""

    opening: str
    begin: str
    middle: str
    end: str
    between: str
    closing: str


_LIST = Form("[", '{"name": "', '", "arguments": ', "}", ", ", "]")
_TAGS = Form("", '<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>", "\n", "")


def held_form(formats: AnswerFormats) -> Form:
    """Return the form of a model's calls."""
    return _TAGS if formats.calls == HERMES else _LIST


def held_calls(form: Form) -> Format:
    """Return the format of an answer that is nothing but calls in this form, perhaps cut off."""

    def read(reader: Reader) -> Steps[None]:
        yield from reader.take(form.opening)
        while (yield from reader.take(form.begin)):
            name, found = yield from reader.take_until(form.middle)
            if not found:
                return
            reader.add("call", name)
            yield from reader.copy_json("arguments")
            yield from reader.take(form.end)
            yield from reader.take(form.between)
        yield from reader.take_until()

    return read


def calls_grammar(form: Form, tools: Mapping[str, Any], *, several: bool) -> str:
    """Return the grammar of one call or `several` of `tools`, JSON schemas of the arguments by function."""
    rules = [f"call_{number}" for number in range(len(tools))]
    lines = [
        f"start: {_quoted(form.opening)} call" + (f" ({_quoted(form.between)} call)*" if several else ""),
        "call: " + " | ".join(rules),
    ]
    if form.closing:
        lines[0] += f" {_quoted(form.closing)}"
    for rule, (name, schema) in zip(rules, tools.items()):
        begin = _quoted(form.begin + name + form.middle)
        lines.append(f"{rule}: {begin} %json {json.dumps(schema_of(schema))} {_quoted(form.end)}")
    return json.dumps({"grammars": [{"lark_grammar": "\n".join(lines).replace('"" ', "") + "\n"}]})


def tagged_calls_grammar(tools: Mapping[str, Any]) -> str:
    """Return the grammar of any text, in which a call as Hermes writes it is one of `tools`."""
    from llguidance import StructTag

    tags = [
        StructTag(
            trigger="<tool_call>",
            begin=_TAGS.begin + name + _TAGS.middle,
            grammar=schema_of(schema),
            end=_TAGS.end,
        )
        for name, schema in tools.items()
    ]
    return StructTag.to_grammar(tags, assume_special=False)


def _quoted(text: str) -> str:
    return json.dumps(text)
