"""Grammars in Lark, as llguidance reads it: texts with marks, texts without some, and grammars within another."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable

from jaxserve.text.tokenizers.tokenizer import Tokenizer

MARK = re.compile(r"(<[^<>\s]+>|\[TOOL_CALLS\])")
ANY = r"/(?s:.*)/"
_SPECIAL = re.compile(r"[\\.+*?()|\[\]{}^$/]")


def lark_text(text: str, tokenizer: Tokenizer) -> str:
    """Return a text with marks as Lark has it: the marks that are special tokens are tokens."""
    found = []
    for piece in filter(None, MARK.split(text)):
        special = tokenizer.special_id(piece)
        found.append(json.dumps(piece) if special is None else f"<[{special}]>")
    return " ".join(found)


def any_of(texts: Iterable[str]) -> str:
    """Return the regular expression of one of some texts."""
    return "|".join(_SPECIAL.sub(r"\\\g<0>", text) for text in texts)


def without(texts: Iterable[str]) -> str:
    """Return the terminal of any text, perhaps empty, in which none of `texts` occurs."""
    # Without the first part, it would allow bytes that are no text, and go on after one of the texts.
    return rf"({ANY} & ~/(?s:.*)({any_of(texts)})(?s:.*)/)"


def with_parts(lark: str, **grammars: str) -> str:
    """Return the grammar `lark`, in which others, in JSON or in Lark, have names."""
    parts: list[dict[str, object]] = [{"lark_grammar": lark}]
    for name, grammar in grammars.items():
        is_lark = not grammar.startswith("{")
        first, *others = [{"lark_grammar": grammar}] if is_lark else json.loads(grammar)["grammars"]
        parts += [{**first, "name": name}, *others]
    return json.dumps({"grammars": parts})


def parts_of(grammar: str) -> list[str]:
    """Return the grammars in Lark that a grammar consists of."""
    if not grammar.startswith("{"):
        return [grammar]
    return [part.get("lark_grammar") or "" for part in json.loads(grammar)["grammars"]]
