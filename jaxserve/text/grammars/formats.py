"""The grammar of each form that a client may ask for: JSON, a regular expression, choices, Lark, GBNF, tags.

Owns the translation only: `checking` finds out whether llguidance can compile the result.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

from jaxserve.api_types import StructuredOutputs

MAX_CHARACTERS = 1 << 18

# Without a bound, a model that likes blanks never leaves them.
_WHITESPACE = r"[ \t]{1,2}|\r?\n[ \t]{0,40}"
_JSON_OBJECT: dict[str, Any] = {"type": "object"}
# Characters with a meaning in the regular expressions of Rust.
_SPECIAL = re.compile(r"[\\.+*?()|\[\]{}^$]")


def grammar_of(outputs: StructuredOutputs) -> str:
    """Return the grammar of llguidance. Raises `ValueError`, `TypeError`, `KeyError` or `RecursionError`."""
    name, value = outputs.form
    size = len(value) if isinstance(value, str) else len(json.dumps(value))
    if size > MAX_CHARACTERS:
        raise ValueError(f"it has {size} characters; at most {MAX_CHARACTERS} are supported")
    return _FORMS[name](value, outputs)


def _json(value: Any, outputs: StructuredOutputs) -> str:
    from llguidance import LLMatcher

    schema = json.loads(value) if isinstance(value, str) else value
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise ValueError("a JSON schema is an object")
    if outputs.disable_additional_properties:
        schema = _closed(schema)
    whitespace = outputs.whitespace_pattern or _WHITESPACE
    options: dict[str, Any] = {"whitespace_flexible": not outputs.disable_any_whitespace}
    if not outputs.disable_any_whitespace:
        options["whitespace_pattern"] = whitespace
    return LLMatcher.grammar_from_json_schema(schema, defaults=options)  # type: ignore[arg-type]


def _closed(schema: Any) -> Any:
    """Return the schema with objects that have no other properties than those it names."""
    if isinstance(schema, list):
        return [_closed(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    found = {key: _closed(part) for key, part in schema.items()}
    if isinstance(found.get("properties"), dict):
        found.setdefault("additionalProperties", False)
    return found


def _json_object(_: Any, outputs: StructuredOutputs) -> str:
    return _json(_JSON_OBJECT, outputs)


def _regex(value: str, _: StructuredOutputs) -> str:
    from llguidance import LLMatcher

    return LLMatcher.grammar_from_regex(_without_anchors(value))


def _without_anchors(pattern: str) -> str:
    """Return the pattern without `^` at its start and `$` at its end: the whole output matches anyway."""
    pattern = pattern.removeprefix("^")
    if pattern.endswith("$"):
        backslashes = len(pattern[:-1]) - len(pattern[:-1].rstrip("\\"))
        if backslashes % 2 == 0:
            pattern = pattern[:-1]
    return pattern


def _choice(value: Sequence[str], _: StructuredOutputs) -> str:
    from llguidance import LLMatcher

    if not value or not all(isinstance(one, str) for one in value):
        raise ValueError("it must be a list of at least one text")
    return LLMatcher.grammar_from_regex("|".join(f"(?:{_SPECIAL.sub(_escaped, one)})" for one in value))


def _escaped(found: re.Match[str]) -> str:
    return "\\" + found[0]


def _grammar(value: str, _: StructuredOutputs) -> str:
    from llguidance import LLMatcher
    from llguidance.gbnf_to_lark import any_to_lark

    try:
        return LLMatcher.grammar_from_lark(any_to_lark(value))
    except Exception as error:  # the converter raises what it happens to
        raise ValueError(f"it is neither Lark nor GBNF: {error}") from error


def _structural_tag(value: Any, outputs: StructuredOutputs) -> str:
    """Tags of SGLang and vLLM: text up to a trigger, then one of the tags that begin with it."""
    from llguidance import StructTag

    tag = json.loads(value) if isinstance(value, str) else value
    if not isinstance(tag, dict) or "structures" not in tag or "triggers" not in tag:
        raise ValueError("only tags with `structures` and `triggers` are supported")
    tags = []
    for structure in tag["structures"]:
        begin = structure["begin"]
        trigger = next((one for one in tag["triggers"] if begin.startswith(one)), None)
        if trigger is None:
            raise ValueError(f"no trigger begins {begin!r}")
        schema = json.loads(_json(structure.get("schema", {}), outputs))["grammars"][0]["json_schema"]
        tags.append(StructTag(trigger=trigger, begin=begin, grammar=schema, end=structure["end"]))
    return StructTag.to_grammar(tags, assume_special=False)


_FORMS: dict[str, Callable[[Any, StructuredOutputs], str]] = {
    "json": _json,
    "json_object": _json_object,
    "regex": _regex,
    "choice": _choice,
    "grammar": _grammar,
    "structural_tag": _structural_tag,
}
