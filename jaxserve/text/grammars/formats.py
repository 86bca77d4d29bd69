"""The grammar of each form that a client may ask for: JSON, a regular expression, choices, Lark, GBNF, tags.

Owns the translation only: `checking` finds out whether llguidance can compile the result.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from jaxserve.api_types import StructuredOutputs
from jaxserve.text.grammars import patterns
from jaxserve.text.grammars.custom.custom_text import MAX_CHARACTERS
from jaxserve.text.grammars.json_grammar import DEFAULT_BLANKS, JsonGrammar
from jaxserve.text.grammars.pattern_parser import whole
from jaxserve.text.grammars.structural_tags import structural_tag


def grammar_of(outputs: StructuredOutputs) -> str:
    """Return the grammar of llguidance. Raises `ValueError`, `TypeError`, `KeyError` or `RecursionError`."""
    name, value = outputs.form
    size = len(value) if isinstance(value, str) else len(json.dumps(value))
    if size > MAX_CHARACTERS:
        raise ValueError(f"it has {size} characters; at most {MAX_CHARACTERS} are supported")
    return _FORMS[name](value, outputs)


def _json(value: Any, outputs: StructuredOutputs) -> str:
    from llguidance import LLMatcher

    grammar = _json_grammar(outputs)
    schema = json.loads(value) if isinstance(value, str) else value
    start = grammar.add(schema, strict=outputs.strict, closes_objects=outputs.disable_additional_properties)
    return LLMatcher.grammar_from_lark("\n".join([f"start: {start}", *grammar.lines, ""]))


def _json_grammar(outputs: StructuredOutputs) -> JsonGrammar:
    blanks = "" if outputs.disable_any_whitespace else outputs.whitespace_pattern or DEFAULT_BLANKS
    return JsonGrammar(blanks=blanks)


def _json_object(_: Any, outputs: StructuredOutputs) -> str:
    return _json({"type": "object"}, outputs)


def _regex(value: str, _: StructuredOutputs) -> str:
    from llguidance import LLMatcher

    return LLMatcher.grammar_from_regex(patterns.regex(whole(value)))


def _choice(value: Sequence[str], _: StructuredOutputs) -> str:
    from llguidance import LLMatcher

    if not value or not all(isinstance(one, str) for one in value):
        raise ValueError("it must be a list of at least one text")
    return LLMatcher.grammar_from_regex(patterns.regex(patterns.Choice(tuple(map(patterns.literal, value)))))


def _grammar(value: str, _: StructuredOutputs) -> str:
    from llguidance import LLMatcher
    from llguidance.gbnf_to_lark import any_to_lark

    try:
        return LLMatcher.grammar_from_lark(any_to_lark(value))
    except Exception as error:  # the converter may raise any error
        raise ValueError(f"it is neither Lark nor GBNF: {error}") from error


def _structural_tag(value: Any, outputs: StructuredOutputs) -> str:
    tag = json.loads(value) if isinstance(value, str) else value
    return structural_tag(tag, _json_grammar(outputs), lambda text: _grammar(text, outputs))


_FORMS: dict[str, Callable[[Any, StructuredOutputs], str]] = {
    "json": _json,
    "json_object": _json_object,
    "regex": _regex,
    "choice": _choice,
    "grammar": _grammar,
    "structural_tag": _structural_tag,
}
