"""Calls that a grammar holds: their form, the grammar, and how the calls are read while they are written.

They are written as the model does it, where that is JSON between marks; else as a JSON list.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from jaxserve.text.answers.formats import HERMES, AnswerFormats
from jaxserve.text.answers.reader import Format, Reader, Steps
from jaxserve.text.grammars.formats import schema_of
from jaxserve.text.tokenizers.tokenizer import Tokenizer

_MARK = re.compile(r"(<[^<>\s]+>|\[TOOL_CALLS\])")


class CallText(NamedTuple):
    """The texts around calls and in them: `opening`, then for each call `begin`, its name, `middle`, its arguments and
    `end`, with `between` from one call to the next; then `closing`."""

    opening: str
    begin: str
    middle: str
    end: str
    between: str
    closing: str


_LIST = CallText("[", '{"name": "', '", "arguments": ', "}", ", ", "]")
_FORMS = {
    HERMES: CallText("", '<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>", "\n", ""),
    "granite": _LIST._replace(opening="<|tool_call|>["),
    "phi4_mini_json": _LIST._replace(opening="<|tool_call|>[", closing="]<|/tool_call|>"),
    "mistral": _LIST._replace(opening="[TOOL_CALLS]["),
    "deepseek_v3": CallText(
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
        "\n```json\n",
        "\n```<｜tool▁call▁end｜>",
        "\n",
        "<｜tool▁calls▁end｜>",
    ),
}


def held_form(formats: AnswerFormats) -> CallText:
    """Return the form of a model's calls."""
    return _FORMS.get(formats.calls, _LIST)


def can_hold_free_calls(formats: AnswerFormats) -> bool:
    """Return whether `free_calls_grammar` knows how this model writes calls."""
    return formats.calls in _FORMS


def held_calls(form: CallText) -> Format:
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


def calls_grammar(form: CallText, tools: Mapping[str, Any], tokenizer: Tokenizer, *, several: bool) -> str:
    """Return the grammar of one call or `several` of `tools`, JSON schemas of the arguments by function."""
    return _lark("start: calls", _call_rules(form, tools, tokenizer, several=several))


def free_calls_grammar(form: CallText, tools: Mapping[str, Any], tokenizer: Tokenizer, *, several: bool) -> str:
    """Return the grammar of any text, in which what begins like a call is one of `tools`."""
    from llguidance import StructTag

    mark = _MARK.findall(form.opening + form.begin)[0]
    if tokenizer.special_id(mark) is not None:  # then no text can begin a call
        rules = _call_rules(form, tools, tokenizer, several=several)
        return _lark("start: text? calls?", ["text: /(.|\\n)+/", *rules])
    tags = [
        StructTag(
            trigger=mark,
            begin=form.opening + form.begin + name + form.middle,
            grammar=schema_of(schema),
            end=form.end + form.closing,
        )
        for name, schema in tools.items()
    ]
    return StructTag.to_grammar(tags, assume_special=False)


def _call_rules(form: CallText, tools: Mapping[str, Any], tokenizer: Tokenizer, *, several: bool) -> list[str]:
    """Return the rules of `calls` in Lark."""
    more = f" ({lark_text(form.between, tokenizer)} call)*" if several else ""
    numbers = range(len(tools))
    rules = [
        f"calls: {lark_text(form.opening, tokenizer)} call{more} {lark_text(form.closing, tokenizer)}",
        "call: " + " | ".join(f"call_{number}" for number in numbers),
    ]
    for number, (name, schema) in zip(numbers, tools.items()):
        begin, end = lark_text(form.begin + name + form.middle, tokenizer), lark_text(form.end, tokenizer)
        rules.append(f"call_{number}: {begin} %json {json.dumps(schema_of(schema))} {end}")
    return rules


def lark_text(text: str, tokenizer: Tokenizer) -> str:
    """Return a text with marks as Lark has it: the marks that are special tokens are tokens."""
    found = []
    for piece in filter(None, _MARK.split(text)):
        special = tokenizer.special_id(piece)
        found.append(json.dumps(piece) if special is None else f"<[{special}]>")
    return " ".join(found)


def _lark(start: str, rules: list[str]) -> str:
    return json.dumps({"grammars": [{"lark_grammar": "\n".join([start, *rules]) + "\n"}]})
