"""Which texts each form allows, with a vocabulary of single bytes; choices and regular expressions against `re`."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.api_types import StructuredOutputs
from jaxserve.text.grammars.formats import MAX_CHARACTERS, grammar_of
from tests.selection import examples
from tests.text.grammars import draw

PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name"],
}
# As pydantic writes a union of classes that a field tells apart.
UNION: dict[str, Any] = {
    "oneOf": [{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/B"}],
    "discriminator": {"propertyName": "kind"},
    "$defs": {
        "A": {
            "type": "object",
            "properties": {"kind": {"const": "a"}, "x": {"type": "integer"}},
            "required": ["kind", "x"],
        },
        "B": {"type": "object", "properties": {"kind": {"enum": ["b", "bb"]}}, "required": ["kind"]},
    },
}
LARK = 'start: greeting " " NAME\ngreeting: "hello" | "bye"\nNAME: /[A-Z][a-z]+/'
GBNF = 'root ::= greeting " " name\ngreeting ::= "hello" | "bye"\nname ::= [A-Z] [a-z]+'
TAG: dict[str, Any] = {
    "structures": [{"begin": "<call=f>", "schema": PERSON, "end": "</call>"}],
    "triggers": ["<call="],
}

HELLO = {"type": "const_string", "value": "hello"}
NUMBER = {"type": "json_schema", "json_schema": {"type": "integer"}}
THOUGHT = {"type": "tag", "begin": "<think>", "content": {"type": "any_text"}, "end": "</think>"}
TAGS = [
    {"begin": "<f=n>", "content": NUMBER, "end": "</f>"},
    {"begin": "<f=w>", "content": {"type": "regex", "pattern": "[a-z/]+"}, "end": ["/w", "</f>"]},
]
TRIGGERED = {"type": "triggered_tags", "triggers": ["<f="], "tags": TAGS}
SEPARATED = {"type": "tags_with_separator", "tags": TAGS, "separator": ", "}


def tagged(form: dict[str, Any]) -> dict[str, Any]:
    return {"structural_tag": {"type": "structural_tag", "format": form}}


def accepts(outputs: StructuredOutputs, text: str) -> bool:
    return draw.accepts(grammar_of(outputs), text)


@pytest.mark.parametrize(
    ("outputs", "good", "bad"),
    [
        ({"json": PERSON}, ['{"name": "Ann", "age": 3}', '{"name":"é"}', '{\n  "name" : "" }'], ['{"age": 3}', "[]"]),
        ({"json": json.dumps(PERSON)}, ['{"name":"Ann"}'], ['{"name": 3}', '{"name":"Ann"} ']),
        ({"json": True}, ["3", "null", '{"a":[]}'], ["nil"]),
        ({"json_object": True}, ["{}", '{"a": [1, {"b": null}]}'], ["[]", "1", '{"a": }', "{} "]),
        ({"json": PERSON, "disable_any_whitespace": True}, ['{"name":"Ann"}'], ['{"name": "Ann"}']),
        ({"json": PERSON, "whitespace_pattern": " {0,3}"}, ['{"name":   ""}'], ['{"name":    ""}', '{\t"name":""}']),
        ({"json": PERSON}, ['{"name":"Ann","more":1}'], []),
        ({"json": PERSON, "disable_additional_properties": True}, ['{"name":"Ann"}'], ['{"name":"Ann","more":1}']),
        ({"json": {"$ref": "#/$defs/a", "$defs": {"a": {"enum": [1, "x"]}}}}, ["1", '"x"'], ["2"]),
        ({"json": {"anyOf": [{"type": "null"}, {"const": {"a": 1}}]}}, ["null", '{"a": 1}'], ['{"a": 2}']),
        ({"json": UNION}, ['{"kind": "a", "x": 1}', '{"kind":"b"}'], ['{"kind":"c"}', "{}"]),
        ({"json": {"const": {"properties": {"a": 1}}}, "disable_additional_properties": True},
         ['{"properties": {"a": 1}}'], ['{"properties":{"a":1},"additionalProperties":false}']),
        ({"json": {"type": "string", "format": "date"}}, ['"2024-02-29"'], ['"2024-13-01"', '"today"']),
        ({"regex": r"\d[\w-]\w[^\w]"}, ["1-é.", "2éa ", "3aa\n"], ["٣aaa", "1\U000116d3a.", "1a\U000116d3.", "1aaé"]),
        ({"regex": r"[]\d][^]\d]\\d"}, ["]a\\d", "1a\\d"], ["٣a\\d", "]]\\d", "1٣\\d"]),
        ({"regex": "[ab]{2}|c"}, ["ab", "c"], ["abc", "", "cc"]),
        ({"regex": "^ab?$"}, ["a", "ab"], ["^a", "a$"]),
        ({"regex": r"a\$"}, ["a$"], ["a", r"a\$"]),
        ({"choice": ("red", "red wine", "1+1=2 (or not)")}, ["red", "red wine", "1+1=2 (or not)"], ["red ", "111=2"]),
        ({"grammar": LARK}, ["hello Ann", "bye Bob"], ["hello ann", "Ann"]),
        ({"grammar": GBNF}, ["hello Ann", "bye Bob"], ["hello ann", "Ann"]),
        (
            {"structural_tag": TAG},
            ["no call", '<call=f>{"name":"a"}</call> and <call=f>{"name":"b"}</call>'],
            ["<call=g>", "<call=f>{}</call>"],
        ),
        (tagged(HELLO), ["hello"], ["hello ", ""]),
        (tagged({"type": "sequence", "elements": [THOUGHT, HELLO]}), ["<think>a </b></think>hello"],
         ["hello", "<think>a</think>b</think>hello"]),
        (tagged({"type": "or", "elements": [HELLO, NUMBER, {"type": "grammar", "grammar": GBNF}]}),
         ["hello", "12", "bye Bob"], ["hello12"]),
        (tagged(TRIGGERED), ["", "text", "a <f=n>3</f> b<f=w>a/b/w c"], ["<f=x", "<f=n>x", "<f=w>a"]),
        (tagged(TRIGGERED | {"at_least_one": True}), ["<f=n>3</f>", "<f=n>3</f> b"], ["", "a<f=n>3</f>"]),
        (tagged(TRIGGERED | {"stop_after_first": True}), ["", "a <f=n>3</f>"], ["<f=n>3</f> b"]),
        (tagged(TRIGGERED | {"stop_after_first": True, "at_least_one": True}), ["<f=n>3</f>"], ["", "<f=n>3</f>."]),
        (tagged(TRIGGERED | {"excludes": ["no"]}), ["n <f=n>3</f>"], ["no", "<f=n>3</f> no"]),
        (tagged(SEPARATED), ["", "<f=n>1</f>, <f=w>x</f>"], ["<f=n>1</f>, ", "<f=n>1</f><f=n>2</f>"]),
        (tagged(SEPARATED | {"at_least_one": True, "stop_after_first": True}), ["<f=n>1</f>"],
         ["", "<f=n>1</f>, <f=n>1</f>"]),
        (tagged({"type": "tag", "begin": "<a>", "content": TRIGGERED, "end": "</a>"}),
         ["<a></a>", "<a>b<f=n>3</f>c</a>"], ["<a>b", "<a></a></a>"]),
    ],
)  # fmt: skip
def test_what_a_form_allows(outputs: dict[str, Any], good: list[str], bad: list[str]) -> None:
    form = StructuredOutputs(**outputs)
    assert [text for text in good if not accepts(form, text)] == []
    assert [text for text in bad if accepts(form, text)] == []


@pytest.mark.parametrize(
    ("outputs", "error"),
    [
        ({"json": "{"}, "Expecting property name"),
        ({"json": "3"}, "a JSON schema is an object"),
        ({"choice": ()}, "at least one text"),
        ({"grammar": "neither of them"}, "neither Lark nor GBNF"),
        ({"structural_tag": {"type": "structural_tag"}}, "has a `format`, or `structures` and `triggers`"),
        (
            tagged({"type": "qwen_xml_parameter"}),
            "'qwen_xml_parameter' is not supported; it can be one of const_string",
        ),
        (tagged({"type": "sequence", "elements": [{"type": "any_text"}, HELLO]}), "free text must come last"),
        (tagged({"type": "const_string", "value": 3}), "3 should be a text"),
        (tagged({"type": "any_text", "excludes": "no"}), "'no' should be a list of texts"),
        ({"structural_tag": TAG | {"triggers": ["<tool"]}}, "no trigger begins '<call=f>'"),
        ({"regex": "a" * (MAX_CHARACTERS + 1)}, "at most 262144 are supported"),
    ],
)
def test_what_is_no_form(outputs: dict[str, Any], error: str) -> None:
    with pytest.raises((ValueError, TypeError, KeyError), match=error):
        grammar_of(StructuredOutputs(**outputs))


def test_a_long_list_of_alternatives_is_not_compared() -> None:
    """Each with all others would be millions of comparisons."""
    alternatives = [{"type": "integer", "const": value} for value in range(4000)]
    with pytest.raises(ValueError, match="oneOf: more than 64 alternatives can't be held"):
        grammar_of(StructuredOutputs(json={"oneOf": alternatives}))
    grammar_of(StructuredOutputs(json={"oneOf": alternatives[:64]}))
    grammar_of(StructuredOutputs(json={"anyOf": alternatives}))


@settings(max_examples=examples(50))
@given(
    st.lists(
        st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=8), min_size=1, max_size=4
    ),
    st.data(),
)
def test_choices_are_taken_as_they_are(choices: list[str], data: st.DataObject) -> None:
    form = StructuredOutputs(choice=tuple(choices))
    other = data.draw(st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=8))
    for text in [*choices, other]:
        assert accepts(form, text) == (text in choices)


# Regular expressions that Python and Rust read alike.
ATOMS = st.sampled_from(["a", "b", "c", "[ab]", "[^a]", ".", r"\.", "é", "(?:ab|c)", "x"])
REPEATS = st.sampled_from(["", "", "?", "*", "+", "{2}", "{1,3}", "{0,2}"])
SEQUENCES = st.lists(st.builds(str.__add__, ATOMS, REPEATS), min_size=1, max_size=4).map("".join)
REGEXES = st.lists(SEQUENCES, min_size=1, max_size=3).map("|".join)


@settings(max_examples=examples(60))
@given(REGEXES, st.lists(st.text("abcxé.\n", max_size=6), min_size=1, max_size=10))
def test_regular_expressions_match_what_python_matches(pattern: str, texts: list[str]) -> None:
    form = StructuredOutputs(regex=pattern)
    for text in texts:
        assert accepts(form, text) == (re.fullmatch(pattern, text) is not None), (pattern, text)
