"""Calls that a grammar holds: their form, the grammar, and how the calls are read while they are written.

In an answer that may have none, they are written as the model does it. An answer that must have some is nothing but
calls: in the model's form where their arguments are JSON, else as a JSON list.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from jaxserve.text.answers import gemma4
from jaxserve.text.answers.formats import HERMES, AnswerFormats
from jaxserve.text.answers.held_parameters import ParameterText, parameter_rules
from jaxserve.text.answers.markup_calls import GLM45, MINIMAX_M2, QWEN3_CODER, SEED_OSS
from jaxserve.text.answers.reader import Format, Reader, Steps
from jaxserve.text.grammars.json_grammar import JsonGrammar
from jaxserve.text.grammars.lark import ANY, MARK, lark_text, without
from jaxserve.text.tokenizers.tokenizer import Tokenizer


class CallText(NamedTuple):
    """The texts around calls and in them: `opening`, then for each call `begin`, its name, `middle`, its arguments and
    `end`, with `between` from one call to the next; then `closing`.

    Arguments are JSON, or written as `parameters`. A call is read wherever one of `marks` is, or where the answer
    begins as the regular expression `answer` says.
    """

    opening: str
    begin: str
    middle: str
    end: str
    between: str
    closing: str
    marks: tuple[str, ...] = ()
    answer: str = ""
    parameters: ParameterText | None = None


_LIST = CallText("[", '{"name": "', '", "arguments": ', "}", ", ", "]")
_FUNCTION_STOPS = ("</parameter>", "<parameter=", "</function>")
_PYTHON = ParameterText("", "=", "", ", ")
_FORMS = {
    HERMES: CallText("", '<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>", "\n", "", ("<tool_call>",)),
    "granite": _LIST._replace(opening="<|tool_call|>[", marks=("<|tool_call|>", "<tool_call>")),
    "phi4_mini_json": _LIST._replace(
        opening="<|tool_call|>[", closing="]<|/tool_call|>", marks=("<|tool_call|>", "functools")
    ),
    "mistral": _LIST._replace(opening="[TOOL_CALLS][", marks=("[TOOL_CALLS]",)),
    "deepseek_v3": CallText(
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
        "\n```json\n",
        "\n```<｜tool▁call▁end｜>",
        "\n",
        "<｜tool▁calls▁end｜>",
        ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>"),
    ),
    "llama3_json": _LIST._replace(
        opening="", middle='", "parameters": ', between="; ", closing="", answer=r"(<\|python_tag\|>)?\s*[\[{]"
    ),
    "pythonic": CallText(
        *("[", "", "(", ")", ", ", "]"),
        answer=r"(<\|python_start\|>)?\s*\[",
        parameters=_PYTHON,
    ),
    "olmo3": CallText(
        *("<function_calls>", "", "(", ")", "\n", "</function_calls>"),
        marks=("<function_calls>",),
        parameters=_PYTHON,
    ),
    "gemma4": CallText(
        *("", f"{gemma4.BEGIN}call:", "{", f"}}{gemma4.END}", "", ""),
        marks=(gemma4.BEGIN,),
        parameters=ParameterText("", ":", "", ",", stops=(gemma4.QUOTE, gemma4.END), quote=gemma4.QUOTE),
    ),
    "qwen3_coder": CallText(
        *("", "<tool_call>\n<function=", ">\n", "</function>\n</tool_call>", "\n", ""),
        marks=QWEN3_CODER.begins,
        parameters=ParameterText("<parameter=", ">\n", "\n</parameter>\n", stops=(*_FUNCTION_STOPS, "</tool_call>")),
    ),
    "seed_oss": CallText(
        *("", "<seed:tool_call>\n<function=", ">\n", "</function>\n</seed:tool_call>", "\n", ""),
        marks=SEED_OSS.begins,
        parameters=ParameterText("<parameter=", ">", "</parameter>\n", stops=(*_FUNCTION_STOPS, "</seed:tool_call>")),
    ),
    "minimax_m2": CallText(
        *("<minimax:tool_call>\n", '<invoke name="', '">\n', "</invoke>\n", "", "</minimax:tool_call>"),
        marks=MINIMAX_M2.begins,
        parameters=ParameterText(
            '<parameter name="',
            '">',
            "</parameter>\n",
            stops=("</parameter>", "<parameter name=", "</invoke>", "</minimax:tool_call>"),
        ),
    ),
    "glm45": CallText(
        *("", "<tool_call>", "\n", "</tool_call>", "\n", ""),
        marks=GLM45.begins,
        parameters=ParameterText(
            "<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n", stops=("</arg_value>", "</tool_call>")
        ),
    ),
}


def held_form(formats: AnswerFormats) -> CallText:
    """Return the form of a model's calls in an answer that has nothing else: its own, or JSON."""
    form = _FORMS.get(formats.calls, _LIST)
    return form if form.parameters is None else _LIST


def free_form(formats: AnswerFormats) -> CallText:
    """Return the form of a model's calls in an answer that may have none: its own."""
    return _FORMS[formats.calls]


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

    Those in `strict` are held whole, or not at all. Raises `ValueError` for what can't be held.
    """
    return _lark("start: calls", _call_rules(form, tools, tokenizer, several=several, strict=strict))


def free_calls_grammar(
    form: CallText, tools: Mapping[str, Any], tokenizer: Tokenizer, *, several: bool, strict: Collection[str] = ()
) -> str:
    """Return the grammar of any text, in which what is read as a call is one of `tools`. Raises as `calls_grammar`."""
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
    # Text and a mark that is no token of its own must be one terminal: else the text would take the mark for text.
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
    grammar = JsonGrammar()
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


def _lark(start: str, rules: list[str]) -> str:
    return json.dumps({"grammars": [{"lark_grammar": "\n".join([start, *rules]) + "\n"}]})
