"""Calls that a grammar holds: their form, the grammar, and how the calls are read while they are written.

In an answer that may have none, they are written as the model writes them. An answer that must have some is nothing but
calls: in the model's form where their arguments are JSON, else as a JSON list.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any

from jaxserve.text.answers.call_texts import CallText
from jaxserve.text.answers.held_parameters import parameter_rules
from jaxserve.text.answers.reader import Format, Reader, Steps
from jaxserve.text.grammars.json_grammar import JsonGrammar
from jaxserve.text.grammars.lark import ANY, MARK, lark_text, without
from jaxserve.text.tokenizers.tokenizer import Tokenizer


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


def calls_grammar(
    form: CallText, tools: Mapping[str, Any], tokenizer: Tokenizer, *, several: bool, strict: Collection[str] = ()
) -> str:
    """Return the grammar of one call or `several` of `tools`, JSON schemas of the arguments by function.

    Schemas of tools in `strict` are held whole, or not at all. Raises `ValueError` for what can't be held.
    """
    return _lark("start: calls", _call_rules(form, tools, tokenizer, several=several, strict=strict))


def free_calls_grammar(
    form: CallText, tools: Mapping[str, Any], tokenizer: Tokenizer, *, several: bool, strict: Collection[str] = ()
) -> str:
    """Return the grammar of any text whose calls, as they are read, are of `tools`. Raises as `calls_grammar` does."""
    if form.answer:  # calls are all of an answer
        other = rf"TEXT: {ANY} & ~/\s*{form.answer}(?s:.*)/"
        return _lark(
            "start: calls | TEXT", [other, *_call_rules(form, tools, tokenizer, several=several, strict=strict)]
        )
    text = f"TEXT: {without(form.marks)}"
    beginning = form.opening or form.begin
    mark = MARK.match(beginning)
    assert mark is not None
    if tokenizer.special_id(mark[0]) is not None:
        return _lark("start: TEXT calls?", [text, *_call_rules(form, tools, tokenizer, several=several, strict=strict)])
    # Text and a mark that is no token of its own must be one terminal: else the text would include the mark.
    rest = beginning[mark.end() :]
    form = form._replace(opening=rest) if form.opening else form._replace(begin=rest)
    rules = _call_rules(form, tools, tokenizer, several=several and bool(form.closing), strict=strict)
    head = f"HEAD: {without(form.marks)} {json.dumps(mark[0])}"
    return _lark(f"start: (HEAD calls){'*' if several else '?'} TEXT", [text, head, *rules])


def _call_rules(
    form: CallText, tools: Mapping[str, Any], tokenizer: Tokenizer, *, several: bool, strict: Collection[str]
) -> list[str]:
    """Return the rules of `calls` in Lark."""
    more = f" ({lark_text(form.between, tokenizer)} call)*" if several else ""
    numbers = range(len(tools))
    rules = [
        f"calls: {lark_text(form.opening, tokenizer)} call{more} {lark_text(form.closing, tokenizer)}",
        "call: " + " | ".join(f"call_{number}" for number in numbers),
    ]
    grammar = JsonGrammar(escaped=_escaped(form))
    for number, (name, schema) in zip(numbers, tools.items()):
        begin, end = lark_text(form.begin + name + form.middle, tokenizer), lark_text(form.end, tokenizer)
        if form.parameters is None:
            arguments = grammar.add(schema, name=name, strict=name in strict, objects_only=True)
        else:
            arguments = f"arguments_{number}"
            strictly = name in strict
            rules += parameter_rules(form.parameters, name, schema, arguments, tokenizer, grammar, strict=strictly)
        rules.append(f"call_{number}: {begin} {arguments} {end}")
    return [*rules, *grammar.lines]


def _escaped(form: CallText) -> str:
    """Return the characters without which texts contain no mark, if marks within JSON end a call."""
    if form.parameters is None:
        return "".join({"｜"} & {*form.end})
    if form.parameters.stops and not form.parameters.quote:
        return ""  # the reader of markup follows JSON texts to their end
    return "<" if "<" in form.closing else "|"


def _lark(start: str, rules: list[str]) -> str:
    return json.dumps({"grammars": [{"lark_grammar": "\n".join([start, *rules]) + "\n"}]})
