"""The words of Lark: names, texts, regular expressions and marks; and the terminals that Lark knows by name."""

from __future__ import annotations

import json
import re
from typing import NamedTuple

_EXPONENT = r"[eE][+\-]?[0-9]+"
_FLOAT = rf"(?:(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:{_EXPONENT})?|[0-9]+{_EXPONENT})"
COMMON = {
    "DIGIT": "[0-9]",
    "HEXDIGIT": "[0-9A-Fa-f]",
    "INT": "[0-9]+",
    "SIGNED_INT": r"[+\-]?[0-9]+",
    "DECIMAL": r"[0-9]+\.[0-9]*|\.[0-9]+",
    "_EXP": _EXPONENT,
    "FLOAT": _FLOAT,
    "SIGNED_FLOAT": rf"[+\-]?{_FLOAT}",
    "NUMBER": rf"[0-9]+|{_FLOAT}",
    "SIGNED_NUMBER": rf"[+\-]?(?:[0-9]+|{_FLOAT})",
    "ESCAPED_STRING": r'"(?:\\.|[^"\\])*"',
    "LCASE_LETTER": "[a-z]",
    "UCASE_LETTER": "[A-Z]",
    "LETTER": "[a-zA-Z]",
    "WORD": "[a-zA-Z]+",
    "CNAME": "[a-zA-Z_][a-zA-Z0-9_]*",
    "WS_INLINE": r"[\t ]+",
    "WS": r"[\t\n\f\r ]+",
    "CR": r"\r",
    "LF": r"\n",
    "NEWLINE": r"(?:\r?\n)+",
    "SH_COMMENT": r"#[^\n]*",
    "CPP_COMMENT": r"//[^\n]*",
    "C_COMMENT": r"/\*[^*]*\*+(?:[^/*][^*]*\*+)*/",
    "SQL_COMMENT": r"--[^\n]*",
}
"""The terminals that a grammar may import from `common`, as regular expressions."""
_TOKENS = re.compile(
    r"""(?P<skip>[ \t]+|(?:\#|//)[^\n]*)|(?P<newline>\r?\n)
    |(?P<text>"(?:\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}|x[0-9a-fA-F]{2})|[^"\\\x00-\x1f\x7f])*"i?)
    |(?P<regex>/(?:\\.|[^/\\])+/[a-z]*)|(?P<special><[^<>\s]+>|@[\w\-]+)
    |(?P<rule>!?[_?]?[a-z][_a-z0-9\-]*)|(?P<terminal>_?[A-Z][_A-Z0-9\-]*)
    |(?P<directive>%[a-z]+)|(?P<number>[0-9]+)|(?P<mark>\.\.|->|::|[:=,.(){}\[\]~&|+*?!])""",
    re.VERBOSE | re.DOTALL,
)


class Token(NamedTuple):
    """A word of a grammar, its kind and the line it begins in."""

    kind: str
    text: str
    line: int


def tokens_of(definition: str) -> list[Token]:
    """Return the words of a grammar, without comments; the last is of the kind `end`.

    Raises `ValueError` that names the line of what is no word.
    """
    found: list[Token] = []
    at, line = 0, 1
    while at < len(definition):
        token = _TOKENS.match(definition, at)
        if token is None:
            raise ValueError(f"line {line}: {definition[at : at + 20]!r} is no part of Lark")
        if token.lastgroup != "skip":
            found.append(Token(token.lastgroup or "", token[0], line))
        line += token[0].count("\n")
        at = token.end()
    return [*found, Token("end", "the end", line)]


def text_of(token: Token) -> tuple[str, bool]:
    """Return what a text between quotes says, and whether its case is ignored."""
    ignores_case = token.text.endswith("i")
    text = re.sub(r"\\(x|.)", lambda found: r"\u00" if found[1] == "x" else found[0], token.text.removesuffix("i"))
    return json.loads(text), ignores_case
