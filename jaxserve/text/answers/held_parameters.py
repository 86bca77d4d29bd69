"""Grammars of arguments that are written a parameter at a time, as text or as JSON, by the schema of each.

A text is written without quotes, up to a mark. A schema may ask of it whatever it may ask of JSON's texts, but how many
parameters there are can't be held.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from jaxserve.text.answers.call_texts import ParameterText
from jaxserve.text.answers.json_text import json_type
from jaxserve.text.answers.parameters import parameter_schema, types_of
from jaxserve.text.grammars import patterns
from jaxserve.text.grammars.json_grammar import JsonGrammar
from jaxserve.text.grammars.json_schema import SchemaReader
from jaxserve.text.grammars.json_shapes import ANY, ANY_OBJECT, ANY_SHAPES, Number, Object, Schema, Shape, Text
from jaxserve.text.grammars.lark import MARK, lark_text, without
from jaxserve.text.tokenizers.tokenizer import Tokenizer

_NAME = re.compile(r"[\w.\-]{1,256}")
_PYTHON_NAME = re.compile(r"[A-Za-z_]\w{0,255}")
_PYTHON_FUNCTION = re.compile(r"[A-Za-z_][\w.]{0,255}")
# How JSON of each type begins.
_BEGINNINGS = {
    "object": r"\{",
    "array": r"\[",
    "number": "-?[0-9]",
    "integer": "-?[0-9]",
    "boolean": "true|false",
    "null": "null",
}


def parameter_rules(
    form: ParameterText,
    function: str,
    schema: dict[str, Any],
    rule: str,
    tokenizer: Tokenizer,
    grammar: JsonGrammar,
    *,
    strict: bool = False,
) -> list[str]:
    """Return Lark's rules of the arguments of a function, of which the first is called `rule`; JSON is in `grammar`.

    The required parameters come first, then the others, each in the order of the schema. Raises `ValueError` that names
    what can't be held; with `strict`, also what `grammar` would only note.
    """
    if not form.stops and not _PYTHON_FUNCTION.fullmatch(function):
        raise ValueError(f"{function}: calls in the model's format can't have a function of this name")
    reader = SchemaReader(schema)
    try:
        arguments = _arguments(reader, schema)
        values = dict(reader.algebra.named(arguments))
        required = [name for name in arguments.required if name in values]
        names = [*required, *(name for name in values if name not in required)]
        rules = []
        for number, name in enumerate(names):
            if not (_NAME if form.stops else _PYTHON_NAME).fullmatch(name):
                raise ValueError(f"{name}: calls in the model's format can't have a parameter of this name")
            begin, terminal = lark_text(form.begin + name + form.middle, tokenizer), f"{rule}_{number}".upper()
            types = types_of(parameter_schema(schema, name), schema)
            writer = _Values(form, reader, grammar, types, tokenizer)
            options, terminals = writer.options(values[name], name, terminal)
            rules += [f"{rule}_{number}: {begin} ({' | '.join(options)})", *terminals]
        grammar.note(reader, function, strict=strict)
    except ValueError as error:
        raise ValueError(f"{function}: {error}") from error
    numbered = [f"{rule}_{number}" for number in range(len(names))]
    between = lark_text(form.between, tokenizer)
    if required or not between:
        orders = [_in_order(numbered, len(required), between)]
    else:  # any may be the first
        orders = [_in_order(numbered[number:], 1, between) for number in range(len(names))]
    return [f"{rule}: {' | '.join([*orders, *([] if required else ['""'])])}", *rules]


def _arguments(reader: SchemaReader, schema: dict[str, Any]) -> Object:
    """Return the shape of the arguments. Raises `ValueError` if there are several, or if it counts parameters."""
    shapes = reader.algebra.shapes(reader.algebra.both(reader.read(schema), ANY_OBJECT))
    shapes = tuple(shape for shape in shapes if not reader.algebra.is_empty((shape,)))
    if len(shapes) != 1 or not isinstance(shapes[0], Object):
        raise ValueError("alternatives of all arguments can't be held in calls in the model's format")
    shape = shapes[0]
    if shape.least > len(shape.required):
        raise ValueError("minProperties can't be held in calls in the model's format")
    if shape.most is not None and shape.most < len(reader.algebra.named(shape)):
        raise ValueError("maxProperties can't be held in calls in the model's format")
    return shape


def _in_order(rules: Sequence[str], num_required: int, between: str) -> str:
    """Return a sequence of rules with a text between them, of which the first few are required."""
    texts = (f"{between} {rule}" if number else rule for number, rule in enumerate(rules))
    return " ".join(text if number < num_required else f"({text})?" for number, text in enumerate(texts))


class _Values:
    """Writes the values of one parameter, which is read as JSON of one of `types`, or as a text."""

    def __init__(
        self, form: ParameterText, reader: SchemaReader, grammar: JsonGrammar, types: set[str], tokenizer: Tokenizer
    ) -> None:
        self._form, self._reader, self._grammar = form, reader, grammar
        self._types, self._tokenizer = types, tokenizer
        self._quote, self._end = lark_text(form.quote, tokenizer), lark_text(form.end, tokenizer)

    def options(self, schema: Schema, name: str, terminal: str) -> tuple[list[str], list[str]]:
        """Return the alternatives for a value, with the text after it, and the terminals that they use.

        The terminals' names begin with `terminal`.
        """
        if not self._form.stops or (self._types and "string" not in self._types):
            return [f"{self._grammar.expression(self._reader, schema)} {self._end}"], []
        if schema == ANY and not self._form.quote:
            schema = (Text(),)
        shapes = self._reader.algebra.shapes(schema)
        others = tuple(one for one in shapes if not isinstance(one, Text) and self._is_read(one))
        options: list[str] = []
        terminals: list[str] = []
        has_any_text = Text() in shapes
        for text in (one for one in shapes if isinstance(one, Text)):
            if text.values is not None:
                options += [self._literal(value, name) for value in text.values]
                continue
            body, after = self._text(text, shapes)
            where = "" if text == Text() else f" // {name}"
            key = f"{terminal}_{len(terminals)}{'_CHECKED' if where else ''}"
            options.append(f"{self._quote} {key} {after}")
            terminals.append(f"{key}: {body}{where}")
        if has_any_text and not self._form.quote:  # any text may be a plain value
            others = tuple(one for one in others if one not in ANY_SHAPES)
        if others and not self._reader.algebra.is_empty(others):
            options.append(f"{self._grammar.expression(self._reader, others)} {self._end}")
        if not options:
            raise ValueError(f"{name}: calls in the model's format can't have its values")
        return options, terminals

    def _is_read(self, shape: Shape) -> bool:
        """Return whether JSON of a shape is read as a value of its type, not as a text."""
        if self._form.quote:
            return True
        kind = _kind(shape)
        return kind in self._types or (kind == "integer" and "number" in self._types)

    def _text(self, text: Text, shapes: Schema) -> tuple[str, str]:
        """Return the terminal of a text, and what follows it.

        It doesn't begin like JSON that would be read as a value the schema doesn't allow. The text and a mark after it
        that is no token of its own are one terminal: else the text would include the mark.
        """
        form = self._form
        terminal = without(form.stops)
        found = [f"/{patterns.regex(pattern)}/" for pattern in text.patterns]
        if text.least or text.most is not None:
            found.append(f"/(?s:.){{{text.least},{'' if text.most is None else text.most}}}/")
        if not form.quote:
            plain = {_kind(one) for one in shapes if one in (*ANY_SHAPES, Number(integer=True))}
            kinds = self._types - {"string"} - plain - ({"integer"} if "number" in plain else set())
            if beginnings := "|".join(sorted({_BEGINNINGS[kind] for kind in kinds if kind in _BEGINNINGS})):
                found.append(rf"~/\s*({beginnings})(?s:.*)/")
            if text != Text():  # line feeds at both ends are taken for part of the marks
                found.append(r"~/\n(?s:.*)|(?s:.*)\n/")
        if found:
            terminal = f"({' & '.join([terminal, *found])})"
        after = form.quote + form.end
        mark = MARK.search(after)
        assert mark is not None
        stop = mark.end() if self._tokenizer.special_id(mark[0]) is None else mark.start()
        return f"{terminal} {json.dumps(after[:stop]) if stop else ''}", lark_text(after[stop:], self._tokenizer)

    def _literal(self, value: str, name: str) -> str:
        """Return a text as a value; it must not be read as something else, of another of the parameter's types."""
        found = json_type(value)
        other = found != "string" and (found in self._types or (found == "integer" and "number" in self._types))
        unclear = not self._form.quote and (other or value != value.strip("\n"))
        if unclear or any(stop in value for stop in self._form.stops):
            raise ValueError(f"{name}: calls in the model's format can't have {value!r} as a text")
        return f"{self._quote} {json.dumps(value)} {self._quote} {self._end}"


def _kind(shape: Shape) -> str:
    """Return the type of a shape, as JSON schemas call it."""
    kind = {"List": "array", "Text": "string"}.get(type(shape).__name__, type(shape).__name__.lower())
    return "integer" if isinstance(shape, Number) and shape.integer else kind
