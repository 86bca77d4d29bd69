"""Grammars of arguments that are written a parameter at a time, as text or as JSON, by the schema of each.

A text is written without quotes, up to a mark. So of texts, schemas may ask for one of some values, or for any text.
What else they ask of texts, or of the arguments together, is refused by name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from jaxserve.text.answers.json_text import json_type, type_of
from jaxserve.text.answers.parameters import parameter_schema, types_of
from jaxserve.text.grammars.formats import resolved, schema_of
from jaxserve.text.grammars.lark import MARK, lark_text, without
from jaxserve.text.tokenizers.tokenizer import Tokenizer

_NAME = re.compile(r"[\w.\-]{1,256}")
_PYTHON_NAME = re.compile(r"[A-Za-z_]\w{0,255}")
_PYTHON_FUNCTION = re.compile(r"[A-Za-z_][\w.]{0,255}")
_COMBINED = ("$dynamicRef", "$ref", "allOf", "anyOf", "if", "not", "oneOf")
_REFUSED_OF_TEXTS = frozenset((*_COMBINED, "format", "maxLength", "minLength", "pattern"))
_REFUSED_OF_ARGUMENTS = frozenset((
    *(*_COMBINED, "const", "dependencies", "dependentRequired", "dependentSchemas", "enum", "maxProperties"),
    *("minProperties", "patternProperties", "propertyNames"),
))  # fmt: skip
_ANNOTATIONS = frozenset(("title", "description", "default", "examples", "$comment"))
_DEFINITIONS = ("$defs", "definitions")
# How JSON of each type begins.
_BEGINNINGS = {
    "object": r"\{",
    "array": r"\[",
    "number": "-?[0-9]",
    "integer": "-?[0-9]",
    "boolean": "true|false",
    "null": "null",
}
_MAX_DEPTH = 20


class ParameterText(NamedTuple):
    """The texts around a parameter: `begin`, its name, `middle`, its value, `end`; and `between` two of them.

    A text as a value is between two `quote`, and ends where one of `stops` begins. Without `stops`, texts are JSON and
    names are Python's.
    """

    begin: str
    middle: str
    end: str
    between: str = ""
    stops: tuple[str, ...] = ()
    quote: str = ""


def parameter_rules(
    form: ParameterText, function: str, schema: dict[str, Any], rule: str, tokenizer: Tokenizer
) -> list[str]:
    """Return Lark's rules of the arguments of a function, of which the first is called `rule`.

    The required parameters come first, then the others, each in the order of the schema. Raises `ValueError` that names
    what can't be held.
    """
    arguments = resolved(schema, schema)
    _refuse(arguments, _REFUSED_OF_ARGUMENTS, function)
    if not form.stops and not _PYTHON_FUNCTION.fullmatch(function):
        raise ValueError(f"{function}: calls in the model's format can't have a function of this name")
    required = list(dict.fromkeys(arguments.get("required") or ()))
    names = [*required, *(name for name in arguments.get("properties") or () if name not in required)]
    rules = []
    for number, name in enumerate(names):
        where = f"{function}.{name}"
        if not (_NAME if form.stops else _PYTHON_NAME).fullmatch(name):
            raise ValueError(f"{where}: calls in the model's format can't have a parameter of this name")
        begin, text = lark_text(form.begin + name + form.middle, tokenizer), f"{rule}_{number}".upper()
        values, terminals = _values(form, parameter_schema(schema, name), schema, where, text, tokenizer)
        rules += [f"{rule}_{number}: {begin} ({' | '.join(values)})", *terminals]
    numbered = [f"{rule}_{number}" for number in range(len(names))]
    between = lark_text(form.between, tokenizer)
    if required or not between:
        orders = [_in_order(numbered, len(required), between)]
    else:  # any may be the first
        orders = [_in_order(numbered[number:], 1, between) for number in range(len(names))]
    return [f"{rule}: {' | '.join([*orders, *([] if required else ['""'])])}", *rules]


def _in_order(rules: Sequence[str], num_required: int, between: str) -> str:
    """Return a sequence of rules with a text between them, of which the first few are required."""
    texts = (f"{between} {rule}" if number else rule for number, rule in enumerate(rules))
    return " ".join(text if number < num_required else f"({text})?" for number, text in enumerate(texts))


def _values(
    form: ParameterText, schema: Any, root: dict[str, Any], where: str, text: str, tokenizer: Tokenizer
) -> tuple[list[str], list[str]]:
    """Return the alternatives for a value, with the text after it, and the terminals that they use.

    `text` is the name of the terminal of any text.
    """
    quote, end = lark_text(form.quote, tokenizer), lark_text(form.end, tokenizer)
    types = types_of(schema, root)
    if not form.stops or (types and "string" not in types):
        return [f"{_json([schema], root, where)} {end}"], []
    alternatives: list[str] = []
    special: list[Any] = []  # values in JSON of which not all of their type are allowed
    plain: list[Any] = []
    has_text = False
    for one in _options(schema, root, where):
        is_text = "string" in (types_of(one, root) or {"string"})
        if is_text:
            _refuse(one, _REFUSED_OF_TEXTS, where)
        if "enum" in one or "const" in one:
            for value in _named_values(one):
                if isinstance(value, str):
                    alternatives.append(f"{quote} {_literal(value, types, form, where)} {quote} {end}")
                else:
                    special.append({**one, "enum": [value]})
        elif is_text:
            has_text = True
        else:
            (special if one.keys() - _ANNOTATIONS - {"type"} else plain).append(one)
    if has_text and not form.quote:  # any text may be a plain value
        plain = []
    if in_json := special + plain:
        alternatives.append(f"{_json(in_json, root, where)} {end}")
    if not has_text:
        return alternatives, []
    kinds = set().union(*(types_of(one, root) for one in special)) if not form.quote else set()
    terminal, after = _any_text(form, kinds, tokenizer)
    return [*alternatives, f"{quote} {text} {after}"], [f"{text}: {terminal}"]


def _json(schemas: list[Any], root: dict[str, Any], where: str) -> str:
    """Return JSON of one of these schemas in Lark, with the definitions that they may refer to."""
    definitions = {key: root[key] for key in _DEFINITIONS if key in root}
    text = json.dumps(schema_of({**definitions, "anyOf": schemas}))
    if '"$ref": "#"' in text:  # it would mean the document made here
        raise ValueError(f"{where}: a reference to the whole schema can't be held in calls in the model's format")
    return f"%json {text}"


def _any_text(form: ParameterText, kinds: set[str], tokenizer: Tokenizer) -> tuple[str, str]:
    """Return the terminal of any text that doesn't begin like JSON of one of these types, and what follows it.

    The text and a mark after it that is no token of its own are one terminal: else the text would take it for text.
    """
    terminal = without(form.stops)
    if beginnings := "|".join(sorted({_BEGINNINGS[kind] for kind in kinds})):
        terminal = rf"({terminal} & ~/\s*({beginnings})(?s:.*)/)"
    after = form.quote + form.end
    mark = MARK.search(after)
    assert mark is not None
    stop = mark.end() if tokenizer.special_id(mark[0]) is None else mark.start()
    return f"{terminal} {json.dumps(after[:stop]) if stop else ''}", lark_text(after[stop:], tokenizer)


def _options(schema: Any, root: dict[str, Any], where: str, depth: int = 0) -> Iterator[dict[str, Any]]:
    """Yield the schemas of which a value must match one, each of one type, or of any."""
    schema = {} if schema is True else resolved(schema, root)
    if not isinstance(schema, dict) or depth > _MAX_DEPTH:
        raise ValueError(f"{where}: its schema must be an object that matches some value")
    asked = schema.keys() - _ANNOTATIONS
    if asked == {"anyOf"} or (asked == {"allOf"} and len(schema["allOf"]) == 1):
        for one in schema.get("anyOf") or schema["allOf"]:
            yield from _options(one, root, where, depth + 1)
    elif isinstance(schema.get("type"), list) and not asked & {"enum", "const"}:
        for kind in schema["type"]:
            yield {**schema, "type": kind}
    else:
        yield schema


def _named_values(schema: dict[str, Any]) -> list[Any]:
    """Return the values of an `enum` or a `const` that have the type of their schema."""
    values = schema["enum"] if "enum" in schema else [schema["const"]]
    types = types_of({"type": schema.get("type", [])}, {})
    types |= {"integer"} if "number" in types else set()
    return [value for value in values if not types or type_of(value) in types]


def _literal(value: str, types: set[str], form: ParameterText, where: str) -> str:
    """Return a text as a value; it must not be read as something else, of another of the parameter's `types`."""
    found = json_type(value)
    other = found != "string" and (found in types or (found == "integer" and "number" in types))
    unclear = not form.quote and (other or value != value.strip("\n"))
    if unclear or any(stop in value for stop in form.stops):
        raise ValueError(f"{where}: calls in the model's format can't have {value!r} as a text")
    return json.dumps(value)


def _refuse(schema: dict[str, Any], keywords: frozenset[str], where: str) -> None:
    found = sorted(schema.keys() & keywords)
    if found:
        raise ValueError(f"{where}: {', '.join(found)} can't be held in calls in the model's format")
