"""The grammar of a structural tag: text in which tags begin, of which each has content in a form of its own.

It has the shape of XGrammar's documents, which vLLM and SGLang take: `{"type": "structural_tag", "format": {…}}`, or
the older one with `structures` and `triggers`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from jaxserve.text.grammars import patterns
from jaxserve.text.grammars.json_grammar import JsonGrammar
from jaxserve.text.grammars.lark import ANY, with_parts, without
from jaxserve.text.grammars.pattern_parser import whole

_MAX_DEPTH = 32


def structural_tag(value: Any, json_grammar: JsonGrammar, grammar_of: Callable[[str], str]) -> str:
    """Return the grammar of a structural tag, whose JSON is written by `json_grammar`.

    `grammar_of` makes llguidance's grammars of those that clients write. Raises `ValueError`, `TypeError` or `KeyError`
    for what can't be expressed.
    """
    return _StructuralTag(json_grammar, grammar_of).lark(_format(value))


def _format(value: Any) -> Any:
    if isinstance(value, dict) and "format" in value:
        return value["format"]
    if not isinstance(value, dict) or "structures" not in value or "triggers" not in value:
        raise ValueError("a structural tag has a `format`, or `structures` and `triggers`")
    tags = [
        {
            "begin": one["begin"],
            "content": {"type": "json_schema", "json_schema": one.get("schema", {})},
            "end": one["end"],
        }
        for one in value["structures"]
    ]
    return {"type": "triggered_tags", "triggers": value["triggers"], "tags": tags}


class _StructuralTag:
    """Collects the rules of one grammar. Each method returns an expression in Lark for a format and what follows it.

    One of the texts `ends` follows, or the end of the output if there are none. If `ends` is None, anything else may
    follow, so that free text would not know where it ends.
    """

    def __init__(self, json_grammar: JsonGrammar, grammar_of: Callable[[str], str]) -> None:
        self._json = json_grammar
        self._grammar_of = grammar_of
        self._terminals: list[str] = []
        self._parts: dict[str, str] = {}
        self._depth = 0

    def lark(self, form: Any) -> str:
        """Return the whole grammar."""
        start = self._expression(form, ())
        lines = [f"start: {start}", *self._terminals, *self._json.lines, ""]
        return with_parts("\n".join(lines), **self._parts)

    def _expression(self, form: Any, ends: Sequence[str] | None) -> str:
        if not isinstance(form, dict):
            raise TypeError("a format is an object")
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise ValueError(f"formats within formats, more than {_MAX_DEPTH} deep, are not supported")
        make = _FORMATS.get(form["type"])
        if make is None:
            raise ValueError(f"the format {form['type']!r} is not supported; it can be one of {', '.join(_FORMATS)}")
        found = make(self, form, ends)
        self._depth -= 1
        return found

    def _const_string(self, form: dict[str, Any], ends: Sequence[str] | None) -> str:
        return f"{_text(form['value'])}{_follow(ends)}"

    def _json_schema(self, form: dict[str, Any], ends: Sequence[str] | None) -> str:
        if form.get("style", "json") != "json":
            raise ValueError(f"json_schema: the style {form['style']!r} is not supported")
        return f"{self._json.add(form['json_schema'])}{_follow(ends)}"

    def _regex(self, form: dict[str, Any], ends: Sequence[str] | None) -> str:
        pattern = patterns.regex(whole(form["pattern"]))
        # With what follows in the same terminal, it need not be the longest text that matches.
        return self._terminal(f"/{pattern}/{_follow(ends)}")

    def _grammar(self, form: dict[str, Any], ends: Sequence[str] | None) -> str:
        name = f"part_{len(self._parts)}"
        self._parts[name] = self._grammar_of(form["grammar"])
        return f"@{name}{_follow(ends)}"

    def _any_text(self, form: dict[str, Any], ends: Sequence[str] | None) -> str:
        return self._free(_texts(form.get("excludes", [])), ends)

    def _sequence(self, form: dict[str, Any], ends: Sequence[str] | None) -> str:
        *others, last = form["elements"]
        return " ".join([*(self._expression(one, None) for one in others), self._expression(last, ends)])

    def _or(self, form: dict[str, Any], ends: Sequence[str] | None) -> str:
        return f"({' | '.join([self._expression(one, ends) for one in form['elements']])})"

    def _tag(self, form: dict[str, Any], ends: Sequence[str] | None) -> str:
        return f"{_text(form['begin'])} {self._inside(form)}{_follow(ends)}"

    def _inside(self, tag: dict[str, Any]) -> str:
        """Return what follows the beginning of a tag, up to its end."""
        ends = [tag["end"]] if isinstance(tag["end"], str) else _texts(tag["end"])
        return self._expression(tag["content"], [end for end in ends if end])

    def _triggered_tags(self, form: dict[str, Any], ends: Sequence[str] | None) -> str:
        triggers, tags = _texts(form["triggers"]), form["tags"]
        excluded = [*_texts(form.get("excludes", [])), *triggers]
        by_trigger: dict[str, list[str]] = {}
        for tag in tags:
            trigger = next((one for one in triggers if one and tag["begin"].startswith(one)), None)
            if trigger is None:
                raise ValueError(f"no trigger begins {tag['begin']!r}")
            rest = tag["begin"][len(trigger) :]
            by_trigger.setdefault(trigger, []).append(f"{_text(rest)} {self._inside(tag)}")
        after_text = " | ".join(
            f"{self._free(excluded, [trigger], but=ends)} ({' | '.join(found)})"
            for trigger, found in by_trigger.items()
        )
        at_once = " | ".join(f"{_text(trigger)} ({' | '.join(found)})" for trigger, found in by_trigger.items())
        if form.get("stop_after_first"):
            first = at_once if form.get("at_least_one") else after_text
            without_any = "" if form.get("at_least_one") else f" | {self._free(excluded, ends)}"
            return f"(({first}){_follow(ends)}{without_any})"
        first = f"({at_once}) " if form.get("at_least_one") else ""
        return f"{first}({after_text})* {self._free(excluded, ends)}"

    def _tags_with_separator(self, form: dict[str, Any], ends: Sequence[str] | None) -> str:
        tag = f"({' | '.join(self._expression({'type': 'tag', **one}, None) for one in form['tags'])})"
        several = "" if form.get("stop_after_first") else f" ({_text(form['separator'])} {tag})*"
        return f"({tag}{several}){'' if form.get('at_least_one') else '?'}{_follow(ends)}"

    def _free(self, excluded: Sequence[str], ends: Sequence[str] | None, but: Sequence[str] | None = ()) -> str:
        """Return text that has none of `excluded`, `ends` and `but` in it, and then one of `ends`."""
        if ends is None or but is None:
            raise ValueError("free text must come last, or last in a tag")
        found = [*excluded, *ends, *but]
        return self._terminal(f"{without(found) if found else ANY}{_follow(ends)}")

    def _terminal(self, expression: str) -> str:
        name = f"TEXT_{len(self._terminals)}"
        self._terminals.append(f"{name}: {expression}")
        return name


def _text(value: str) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} should be a text")
    return json.dumps(value)


def _texts(value: Any) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
        raise TypeError(f"{value!r} should be a list of texts")
    return value


def _follow(ends: Sequence[str] | None) -> str:
    return f" ({' | '.join(map(_text, ends))})" if ends else ""


_FORMATS: dict[str, Callable[[_StructuralTag, dict[str, Any], Sequence[str] | None], str]] = {
    "const_string": _StructuralTag._const_string,
    "json_schema": _StructuralTag._json_schema,
    "regex": _StructuralTag._regex,
    "grammar": _StructuralTag._grammar,
    "any_text": _StructuralTag._any_text,
    "sequence": _StructuralTag._sequence,
    "or": _StructuralTag._or,
    "tag": _StructuralTag._tag,
    "triggered_tags": _StructuralTag._triggered_tags,
    "tags_with_separator": _StructuralTag._tags_with_separator,
}
