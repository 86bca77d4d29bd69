"""The grammar of each form that a client may ask for: JSON, a regular expression, choices, Lark, GBNF, tags.

Owns the translation only: `checking` finds out whether llguidance can compile the result.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Sequence
from typing import Any

from jaxserve.api_types import StructuredOutputs
from jaxserve.text.grammars.structural_tags import structural_tag

MAX_CHARACTERS = 1 << 18

# Without a bound, a model that likes blanks never leaves them.
_WHITESPACE = r"[ \t]{1,2}|\r?\n[ \t]{0,40}"
_JSON_OBJECT: dict[str, Any] = {"type": "object"}
# What maps names to schemas in a schema, and what holds values.
_BY_NAME = {"properties", "patternProperties", "$defs", "definitions"}
_VALUES = {"const", "enum", "default", "examples", "required"}
# A chain of references, and the schemas of a `oneOf` that are compared, each with all others.
_MAX_REFERENCES = 20
_MAX_COMPARED = 64
# A `]` directly after the beginning of a class is a part of it.
_PATTERN_PARTS = re.compile(r"\\.|\[\^?\]?|\]|[^\\\[\]]+|\\\Z", re.DOTALL)
# Unicode 15 is that of Python 3.12.
_PORTABLE = {r"\d": "0-9", r"\w": r"[\w&&\p{age=15.0}]"}
# Characters with a meaning in the regular expressions of Rust.
_SPECIAL = re.compile(r"[\\.+*?()|\[\]{}^$]")


def grammar_of(outputs: StructuredOutputs) -> str:
    """Return the grammar of llguidance. Raises `ValueError`, `TypeError`, `KeyError` or `RecursionError`."""
    name, value = outputs.form
    size = len(value) if isinstance(value, str) else len(json.dumps(value))
    if size > MAX_CHARACTERS:
        raise ValueError(f"it has {size} characters; at most {MAX_CHARACTERS} are supported")
    return _FORMS[name](value, outputs)


def schema_of(value: Any, outputs: StructuredOutputs | None = None) -> dict[str, Any]:
    """Return a JSON schema as llguidance is to read it, with the blanks that it allows. Raises as `grammar_of`."""
    schema: dict[str, Any] = json.loads(_json(value, outputs or StructuredOutputs(json={})))["grammars"][0][
        "json_schema"
    ]
    return schema


def _json(value: Any, outputs: StructuredOutputs) -> str:
    from llguidance import LLMatcher

    schema = json.loads(value) if isinstance(value, str) else value
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise ValueError("a JSON schema is an object")
    schema = _prepared(schema, schema, outputs)
    whitespace = outputs.whitespace_pattern or _WHITESPACE
    options: dict[str, Any] = {"whitespace_flexible": not outputs.disable_any_whitespace}
    if not outputs.disable_any_whitespace:
        options["whitespace_pattern"] = whitespace
    return LLMatcher.grammar_from_json_schema(schema, defaults=options)  # type: ignore[arg-type]


def _prepared(schema: Any, root: dict[str, Any], outputs: StructuredOutputs) -> Any:
    """Return a schema of the document `root` as llguidance is to read it.

    A `oneOf` becomes `anyOf` where its schemas exclude each other, which llguidance does not see through references.
    Objects may be closed to properties that their schema doesn't name.
    """
    if isinstance(schema, list):
        return [_prepared(part, root, outputs) for part in schema]
    if not isinstance(schema, dict):
        return schema
    found: dict[str, Any] = {}
    for key, part in schema.items():
        if key in _BY_NAME and isinstance(part, dict):
            found[key] = {name: _prepared(one, root, outputs) for name, one in part.items()}
        else:
            found[key] = part if key in _VALUES else _prepared(part, root, outputs)
    if outputs.disable_additional_properties and isinstance(found.get("properties"), dict):
        found.setdefault("additionalProperties", False)
    one_of = schema.get("oneOf")
    if isinstance(one_of, list) and len(one_of) <= _MAX_COMPARED and "anyOf" not in found:
        schemas = [resolved(one, root) for one in one_of]
        known = all(isinstance(one, dict) for one in schemas)
        if known and all(_exclude_each_other(one, other) for one, other in itertools.combinations(schemas, 2)):
            found["anyOf"] = found.pop("oneOf")
    return found


def resolved(schema: Any, root: Any) -> Any:
    """Follow the references of a schema within the document `root`; one that leads elsewhere stays as it is."""
    for _ in range(_MAX_REFERENCES):
        pointer = schema.get("$ref") if isinstance(schema, dict) else None
        if not isinstance(pointer, str) or not pointer.startswith("#/"):
            break
        found = root
        for part in pointer[2:].split("/"):
            name = part.replace("~1", "/").replace("~0", "~")
            found = found.get(name) if isinstance(found, dict) else None
        if found is None:
            break
        schema = found
    return schema


def _exclude_each_other(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Return whether no value can match both schemas, as far as types and the values they name show."""
    if _have_no_common(_types(one), _types(other)) or _have_no_common(_named_values(one), _named_values(other)):
        return True
    if one.get("type") != "object" or other.get("type") != "object":
        return False
    own, theirs = one.get("properties", {}), other.get("properties", {})
    shared = set(one.get("required", ())).intersection(other.get("required", ()), own, theirs)
    return any(_have_no_common(_named_values(own[name]), _named_values(theirs[name])) for name in shared)


def _have_no_common(one: set[Any] | None, other: set[Any] | None) -> bool:
    return one is not None and other is not None and one.isdisjoint(other)


def _types(schema: dict[str, Any]) -> set[Any] | None:
    """Return the types that a schema allows, or None for all."""
    types = schema.get("type")
    if not isinstance(types, (str, list)):
        return None
    return {"number" if name == "integer" else name for name in ([types] if isinstance(types, str) else types)}


def _named_values(schema: Any) -> set[Any] | None:
    """Return the values that a schema allows, each with its type, or None if it doesn't name them all."""
    if not isinstance(schema, dict) or not ("const" in schema or isinstance(schema.get("enum"), list)):
        return None
    values = [schema["const"]] if "const" in schema else schema["enum"]
    known = all(isinstance(value, (str, int, type(None))) for value in values)
    return {(type(value), value) for value in values} if known else None


def _json_object(_: Any, outputs: StructuredOutputs) -> str:
    return _json(_JSON_OBJECT, outputs)


def _regex(value: str, _: StructuredOutputs) -> str:
    from llguidance import LLMatcher

    return LLMatcher.grammar_from_regex(portable(_without_anchors(value)))


def portable(pattern: str) -> str:
    """Return a pattern whose `\\d` and `\\w` take no characters but those which Python's do, whose Unicode is older.

    Digits are ASCII's, as in most other languages. Within `[^…]` both stay as they are: to leave out more is safe.
    """
    found = []
    in_class = negated = False
    for part in _PATTERN_PARTS.findall(pattern):
        if part.startswith("[") and not in_class:
            in_class, negated = True, part.startswith("[^")
        elif part == "]":
            in_class = negated = False
        elif part in _PORTABLE and not negated:
            part = _PORTABLE[part]
            part = part if in_class or part.startswith("[") else f"[{part}]"
        found.append(part)
    return "".join(found)


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
    tag = json.loads(value) if isinstance(value, str) else value
    return structural_tag(
        tag, lambda schema: schema_of(schema, outputs), lambda text: _grammar(text, outputs), portable
    )


_FORMS: dict[str, Callable[[Any, StructuredOutputs], str]] = {
    "json": _json,
    "json_object": _json_object,
    "regex": _regex,
    "choice": _choice,
    "grammar": _grammar,
    "structural_tag": _structural_tag,
}
