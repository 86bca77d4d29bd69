"""JSON that grammars hold, drawn at random from generated schemas, is judged by jsonschema."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.api_types import StructuredOutputs
from jaxserve.text.grammars.formats import grammar_of
from jaxserve.text.grammars.json_grammar import LEFT_TO_CLIENT
from jaxserve.text.grammars.trials import GrammarTester
from jaxserve.text.grammars.vocabulary import tokens_of
from tests.selection import examples
from tests.server.tiny import tiny_tokenizer
from tests.text.grammars.draw import accepts, drawn


def grammar(schema: Any, **options: Any) -> str:
    return grammar_of(StructuredOutputs(json=schema, **options))


def pairs(found: list[tuple[str, Any]]) -> dict[str, Any]:
    return dict(found)


def check(schema: Any, text: str) -> None:
    jsonschema.Draft202012Validator(schema, format_checker=jsonschema.FormatChecker()).validate(json.loads(text))


NAMES = st.sampled_from(["a", "b", "x-1", "x-ray", "<filename>", 'q"', "é"])
PATTERNS = st.sampled_from(["^x-", "^n$", "^[a-c]$", "a", "^(a|x-1)$", "[0-9]$", "^.{1,3}$", "^$", "[^a-z]"])
COUNTS = st.integers(0, 3)
BOUNDS = st.one_of(
    st.integers(-30, 30),
    st.floats(-3, 3, allow_nan=False).map(lambda value: round(value, 2)),
    st.sampled_from([2**53 + 1, 2**63 - 1, -(2**63), 10**20, 10**21, 3.4028234663852886e38, -1.7976931348623157e308]),
)
VALUES = st.one_of(NAMES, BOUNDS, st.booleans(), st.none(), st.just([1, "a"]), st.just({"a": 1}))


def optional(**fields: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({}, optional=fields)


def of_type(kind: str, fields: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    return fields.map(lambda found: {"type": kind, **found})


TEXTS = of_type("string", optional(minLength=COUNTS, maxLength=COUNTS, pattern=st.one_of(PATTERNS, st.just(r"\w"))))
NUMBERS = optional(minimum=BOUNDS, maximum=BOUNDS, exclusiveMinimum=BOUNDS, exclusiveMaximum=BOUNDS)
SCALARS = st.one_of(
    TEXTS,
    of_type("integer", NUMBERS),
    of_type("number", NUMBERS),
    of_type("string", optional(format=st.sampled_from(["date", "date-time", "ipv4", "ipv6", "email", "uuid", "own"]))),
    st.just({"type": "boolean"}),
    st.just({"type": "null"}),
    st.builds(lambda value: {"const": value}, VALUES),
    st.builds(lambda values: {"enum": values}, st.lists(VALUES, min_size=1, max_size=4)),
    st.just(True),
    st.just(False),
)


def larger(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    objects = optional(
        properties=st.dictionaries(NAMES, inner, max_size=3),
        patternProperties=st.dictionaries(PATTERNS, inner, max_size=2),
        additionalProperties=inner,
        required=st.lists(NAMES, max_size=2, unique=True),
        minProperties=COUNTS,
        maxProperties=COUNTS,
        propertyNames=st.one_of(TEXTS, st.just({"enum": ["a", "x-1", "n"]})),
    )
    lists = optional(
        items=inner,
        prefixItems=st.lists(inner, max_size=2),
        minItems=COUNTS,
        maxItems=COUNTS,
        uniqueItems=st.booleans(),
    )
    return st.one_of(
        of_type("object", objects),
        of_type("array", lists),
        st.builds(lambda options: {"anyOf": options}, st.lists(inner, min_size=1, max_size=3)),
        st.builds(lambda options: {"oneOf": options}, st.lists(inner, min_size=1, max_size=2)),
        st.builds(lambda one, other: {"allOf": [one, other]}, inner, inner),
        st.builds(lambda one, other: {**one, "anyOf": [other, {"type": "null"}]}, of_type("object", objects), inner),
    )


SCHEMAS = st.recursive(SCALARS, larger, max_leaves=6)
TRIAL = GrammarTester(tokens_of(tiny_tokenizer()))


@settings(max_examples=examples(400, 100))
@given(SCHEMAS, st.integers(0, 2**32))
def test_what_a_schema_allows_matches_it(schema: Any, seed: int) -> None:
    """A schema is refused, or whatever is drawn from its grammar matches it."""
    try:
        made = grammar(schema)
    except ValueError:
        return
    if problem := TRIAL.problem(made):
        assert re.search("no text matches|begins a match|no token", problem)
        return
    left = LEFT_TO_CLIENT.findall(made)
    rng = random.Random(seed)
    for _ in range(4):
        text = drawn(made, rng)
        if text is not None and not left:
            check(schema, text)


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"type": "object", "properties": {"n": {"type": "boolean"}}, "required": ["n"], "additionalProperties": False,
          "patternProperties": {"^n$": {}}}, ['{"n":true}'], ['{"n":1}', "{}", '{"n":true,"n":1}']),
        ({"type": "object", "properties": {"a": {"type": "number"}}, "additionalProperties": False,
          "patternProperties": {"^[a-c]": {"type": "integer"}}},
         ['{"a":1,"b":2,"cc":3}', '{"b":2}'], ['{"a":1.5}', '{"b":1.5}', '{"d":1}']),
        ({"type": "object", "patternProperties": {"^x": {"type": "integer"}, "y$": {"minimum": 3}}},
         ['{"xa":1}', '{"xy":4}', '{"ay":"a"}', '{"z":null}'], ['{"xy":1}', '{"xy":"a"}', '{"ay":1}']),
        ({"type": "object", "minProperties": 1}, ['{"x-ray":-1}'], ["{}"]),
        ({"properties": {"a": {}, "b": {}, "c": {}}, "minProperties": 2, "type": "object",
          "additionalProperties": False},
         ['{"a":1,"c":2}', '{"b":1,"c":2}', '{"a":1,"b":1,"c":1}'], ['{"a":1}', '{"a":1,"a":2}']),
        ({"type": "integer", "minimum": 9007199254740993, "maximum": 9007199254740993}, ["9007199254740993"],
         ["9007199254740992"]),
        ({"type": "integer", "minimum": 10**20, "maximum": 10**21}, [str(10**20), str(10**21), str(3 * 10**20)],
         ["9223372036854775807", str(10**21 + 1), str(10**20 - 1)]),
        ({"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1},
         [str(-(2**63)), str(2**63 - 1), "0", "1234567890123456789"], [str(2**63), str(-(2**63) - 1)]),
        ({"type": "number", "exclusiveMinimum": 0, "maximum": 1e-300}, ["1e-300", "5e-302"], ["0", "0.0", "1e-299"]),
        ({"type": "number", "minimum": -3.4028234663852886e38, "maximum": 3.4028234663852886e38},
         ["3.4e38", "-1", "0.5", "0", "340282346638528859811704183484516925440"], ["3.5e38", "1e39"]),
        ({"type": "number", "minimum": 0, "maximum": 1, "multipleOf": 0.25}, ["0.25", "1", "0"], ["0.3", "1.25"]),
        ({"type": "integer", "exclusiveMinimum": 0, "exclusiveMaximum": 7, "multipleOf": 3}, ["3", "6"], ["0", "9"]),
        ({"type": "integer", "default": 2**70, "maximum": 3}, ["3"], ["4"]),
        ({"const": 2**70}, [str(2**70)], [str(2**70 + 1)]),
        ({"type": "array", "items": {"enum": ["a", "b", "c"]}, "uniqueItems": True, "minItems": 2},
         ['["c","a"]', '["a","b","c"]'], ['["a"]', '["a","a"]', '["a","b","a"]']),
        ({"type": "array", "items": {"type": "boolean"}, "uniqueItems": True}, ["[]", "[true,false]"], ["[true,true]"]),
        ({"type": "array", "items": {"type": "integer", "minimum": 1, "maximum": 3}, "uniqueItems": True,
          "maxItems": 2},
         ["[3,1]"], ["[1,1]", "[1,2,3]"]),
        ({"type": "array", "items": {"type": "string"}, "uniqueItems": True, "maxItems": 1}, ['["a"]'], ['["a","a"]']),
        ({"type": "string", "pattern": "^[a-z&&[^b]]$"}, ['"b]"', '"&]"'], ['"b"', '"a"']),
        ({"type": "string", "pattern": "^.$"}, ['"a"', '"\\u0001"'], ['"\\n"', '"\u2029"', '"\u2028"']),
        ({"type": "string", "pattern": "^\\ud83d\\ude00[\\b]\\cA$"}, ['"😀\\b\\u0001"'], ['"😀"']),
        ({"anyOf": [{"type": "string", "pattern": "^(?:a|b)$"}, {"type": "string", "pattern": "^ab$"}]},
         ['"a"', '"ab"'], ['"aa"']),
        ({"type": "string", "pattern": "^a|b$"}, ['"ax"', '"xb"'], ['"xa"', '"bx"']),
        ({"type": "string", "format": "date"}, ['"2024-02-29"', '"2000-02-29"'], ['"2023-02-29"', '"1900-02-29"']),
        ({"type": "string", "format": "password", "minLength": 1.0}, ['"x"'], ['""']),
        ({"type": "object", "properties": None, "required": None, "enum": None, "propertyNames": {}},
         ['{"a":1}'], ["1"]),
        ({"type": "array", "items": {"type": "string"}, "uniqueItems": False, "contains": {}, "minContains": 0},
         ['["a","a"]'], ["[1]"]),
        ({"type": "object", "dependentRequired": {"a": ["b"]}, "properties": {"a": {}, "b": {}}},
         ['{"b":1}', '{"a":1,"b":2}', "{}"], ['{"a":1}']),
        ({"type": "object", "propertyNames": {"enum": ["p", "q"]}, "additionalProperties": {"type": "integer"}},
         ['{"p":1,"q":2}', "{}"], ['{"r":1}', '{"p":1,"p":2}', '{"p":"x"}']),
        ({"$defs": {"t": {"type": "object", "properties": {"kids": {"type": "array", "items": {"$ref": "#/$defs/t"}}},
                          "additionalProperties": False}}, "$ref": "#/$defs/t"},
         ["{}", '{"kids":[{"kids":[]},{}]}'], ['{"kids":[1]}']),
        ({"$ref": "#t", "$defs": {"x": {"$anchor": "t", "type": "null"}}}, ["null"], ["1"]),
        ({"type": "object", "properties": {"a": {}}, "unevaluatedProperties": False}, ['{"a":1}'], ['{"b":1}']),
        ({"oneOf": [{"type": "array", "maxItems": 1}, {"type": "array", "minItems": 2}]}, ["[]", "[1,2]"], ["1"]),
    ],
)  # fmt: skip
def test_what_keywords_mean(schema: Any, good: list[str], bad: list[str]) -> None:
    made = grammar(schema)
    assert TRIAL.problem(made) == ""
    assert [text for text in good if not accepts(made, text)] == []
    assert [text for text in bad if accepts(made, text)] == []


@pytest.mark.parametrize(
    ("schema", "error"),
    [
        ({"properties": {"s": {"type": "string", "pattern": "(?=a)"}}}, "properties.s.pattern: looking ahead"),
        ({"type": "object", "minProperties": 3}, "minProperties above 1 can't be held"),
        ({"properties": {"a": {"not": {"const": 1}}}}, "properties.a.not can't be held"),
        ({"allOf": [{"contains": {"const": 1}}]}, "allOf.0.contains can't be held"),
        ({"anyOf": [{"type": "text"}]}, "anyOf.0.type: 'text' should be among null"),
        ({"type": "string", "minLength": 2.5}, "minLength: 2.5 should be a whole number"),
        ({"$defs": {"x": {"items": 3}}, "$ref": "#/$defs/x"}, "$defs.x.items: a JSON schema is an object"),
        ({"$ref": "#/$defs/y"}, "$ref: '#/$defs/y' is not in this document"),
        ({"type": "integer", "minimum": 3, "maximum": 2}, "no value matches"),
        ({"type": "object", "properties": {"a": False}, "required": ["a"]}, "no value matches"),
        ({"type": "number", "minimum": "3"}, "minimum: '3' should be a number"),
        ({"type": "number", "multipleOf": 0}, "multipleOf must be more than 0"),
        ({"oneOf": [{"type": "integer"}, {"minimum": 3}]}, "oneOf: a value might match two of these"),
        ({"properties": {"a": {"required": True}}}, "properties.a.required must be a list of names"),
        ({"patternProperties": {"(?!a)": {}}}, "patternProperties.(?!a): looking ahead"),
        ({"$ref": "#"}, "no value matches"),
    ],
)
def test_what_cannot_be_held_is_refused_with_its_place(schema: Any, error: str) -> None:
    with pytest.raises(ValueError, match=re.escape(error)):
        grammar(schema)


def test_different_texts_are_left_to_the_client_unless_strict() -> None:
    schema = {"properties": {"a": {"type": "array", "items": {"type": "string"}, "uniqueItems": True}}}
    assert LEFT_TO_CLIENT.findall(grammar(schema)) == ["properties.a.uniqueItems"]
    with pytest.raises(ValueError, match=re.escape("properties.a.uniqueItems can't be held")):
        grammar(schema, strict=True)
