"""Reads grammars in Lark as llguidance does: rules of terminals, each a tree of characters.

What is read is plain: names of terminals and imports are looked up. What can't be held in a text is refused by name:
tokens, grammars within the grammar, and what changes how tokens are drawn.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from jaxserve.text.grammars import character_sets as sets
from jaxserve.text.grammars.custom.lark_tokens import COMMON, Token, text_of, tokens_of
from jaxserve.text.grammars.pattern_parser import as_rust
from jaxserve.text.grammars.patterns import (
    EMPTY,
    Both,
    Chars,
    Choice,
    Node,
    Other,
    Repeat,
    count_nodes,
    joined,
    literal,
)


class Terminal(NamedTuple):
    """A text that matches `node`, as long as it can be."""

    node: Node


class RuleName(NamedTuple):
    """What a rule describes."""

    name: str


class Row(NamedTuple):
    """Parts one after another."""

    parts: tuple[Expression, ...]


class AnyOf(NamedTuple):
    """One of some options."""

    options: tuple[Expression, ...]


class Times(NamedTuple):
    """An expression `least` to `most` times; None is no limit."""

    inner: Expression
    least: int
    most: int | None


type Expression = Terminal | RuleName | Row | AnyOf | Times


@dataclass
class LarkGrammar:
    """The rules by name, of which `start` is the first, and the terminals that are ignored between others."""

    rules: dict[str, Expression] = field(default_factory=dict)
    ignored: list[Node] = field(default_factory=list)


def parse_lark(definition: str) -> LarkGrammar:
    """Return a grammar. Raises `ValueError` that names the line and what can't be read or held."""
    return _LarkParser(definition).parse()


_NO_SUCH = {
    "json": "a JSON schema within a grammar",
    "lark": "a grammar within a grammar",
    "regex": "a list of parts of a text",
}
_MAX_DEPTH = 100
_MAX_TIMES = 10_000
# Sets of characters and other nodes of all terminals, in which others are written out.
_MAX_NODES = 200_000


class _LarkParser:
    """Reads one grammar. Terminals may be used before they are defined."""

    def __init__(self, definition: str) -> None:
        self._tokens = tokens_of(definition)
        self._at = 0
        self._rules: dict[str, int] = {}
        self._bodies: dict[str, int] = {}
        self._read: dict[str, Node] = {}
        self._open: list[str] = []
        self._num_nodes = 0

    def parse(self) -> LarkGrammar:
        found = LarkGrammar()
        ignored: list[int] = []
        while self._skip_lines():
            token = self._next()
            if token.kind == "directive":
                self._directive(token, ignored)
            elif token.kind in ("rule", "terminal"):
                name = token.text.lstrip("!?")
                self._header(token)
                known = self._rules if token.kind == "rule" else self._bodies
                if name in known or name in self._read:
                    raise self._error(f"{name} is defined twice", token)
                known[name] = self._at
                self._skip_body()
            else:
                raise self._error(f"{token.text!r} begins no rule and no terminal", token)
        if "start" not in self._rules:
            raise ValueError("it has no rule `start`")
        for name, at in self._rules.items():
            self._at = at
            found.rules[name] = self._options(0)
            self._end()
        for at in ignored:
            self._at = at
            found.ignored.append(self._node(0))
            self._end()
        for name in self._bodies:  # what is never used is read too, for its errors
            self._named(name)
        return found

    def _error(self, problem: str, token: Token) -> ValueError:
        return ValueError(f"line {token.line}: {problem}")

    def _peek(self, *texts: str) -> bool:
        token = self._tokens[self._at]
        return token.text in texts and token.kind in ("mark", "newline", "end")

    def _take(self, *texts: str) -> bool:
        found = self._peek(*texts)
        self._at += found
        return found

    def _next(self) -> Token:
        token = self._tokens[self._at]
        self._at += token.kind != "end"
        return token

    def _expect(self, text: str) -> None:
        token = self._tokens[self._at]
        if not self._take(text):
            raise self._error(f"{text!r} should stand where {token.text!r} is", token)

    def _skip_lines(self) -> bool:
        """Return whether anything follows after ends of lines."""
        while self._tokens[self._at].kind == "newline":
            self._at += 1
        return self._tokens[self._at].kind != "end"

    def _end(self) -> None:
        token = self._tokens[self._at]
        if token.kind not in ("newline", "end"):
            raise self._error(f"{token.text!r} can't stand here", token)

    def _skip_body(self) -> None:
        """Skip an expression, up to the end of its line; it goes on in the next one within brackets and before `|`."""
        depth = 0
        while self._tokens[self._at].kind != "end":
            if self._tokens[self._at].kind == "newline" and not depth:
                before = self._at
                if not self._skip_lines() or not self._peek("|"):
                    self._at = before
                    return
            depth += self._peek("(", "[") - self._peek(")", "]")
            self._at += 1

    def _header(self, token: Token) -> None:
        """Read what stands between the name of a rule or terminal and its body."""
        if self._peek("."):
            raise self._error("priorities are not supported", token)
        if self._peek("{", "::"):
            raise self._error("rules with parameters are not supported", token)
        if self._take("["):
            while not self._take("]"):
                attribute = self._next()
                if attribute.text != "capture":
                    raise self._error(f"the attribute `{attribute.text}` is not supported", token)
                if self._take("="):
                    self._next()
                self._take(",")
        self._expect(":")

    def _directive(self, token: Token, ignored: list[int]) -> None:
        if token.text == "%ignore":
            ignored.append(self._at)
            self._skip_body()
        elif token.text == "%import":
            self._import(token)
        else:
            problem = _NO_SUCH.get(token.text[1:], "this directive")
            raise self._error(f"`{token.text}`: {problem} is not supported", token)

    def _import(self, token: Token) -> None:
        library = self._next()
        if library.text != "common" or not (self._peek(".") or self._peek("(")):
            raise self._error("only terminals of `common` can be imported", token)
        if self._take("("):
            names = [(self._next().text,) * 2]
            while self._take(","):
                names.append((self._next().text,) * 2)
            self._expect(")")
        else:
            self._expect(".")
            name = self._next().text
            names = [(name, self._next().text if self._take("->") else name)]
        self._end()
        for name, local in names:
            if name not in COMMON:
                raise self._error(f"`common` has no terminal {name}; it has {', '.join(COMMON)}", token)
            if local in self._read or local in self._bodies:
                raise self._error(f"{local} is defined twice", token)
            self._read[local] = as_rust(COMMON[name])

    def _named(self, name: str) -> Node:
        """Return the tree of a terminal."""
        if name not in self._read:
            at = self._at
            self._at = self._bodies[name]
            self._open.append(name)
            node = self._node(0)
            self._num_nodes += count_nodes(node)
            if self._num_nodes > _MAX_NODES:
                raise ValueError(f"the terminals that {name} contains are too large")
            self._read[name] = node
            self._open.pop()
            self._end()
            self._at = at
        return self._read[name]

    def _node(self, depth: int) -> Node:
        """Read an expression in which all are terminals."""
        return _as_node(self._options(depth, in_terminal=True))

    def _options(self, depth: int, *, in_terminal: bool = False) -> Expression:
        if depth > _MAX_DEPTH:
            raise self._error("it is nested too deep", self._tokens[self._at])
        found = [self._row(depth, in_terminal)]
        while True:
            before = self._at
            self._skip_lines()
            if not self._take("|"):
                self._at = before
                break
            found.append(self._row(depth, in_terminal))
        return found[0] if len(found) == 1 else AnyOf(tuple(found))

    def _row(self, depth: int, in_terminal: bool) -> Expression:
        found: list[Expression] = []
        parts: list[Expression] = []
        while True:
            if depth:
                self._skip_lines()
            token = self._tokens[self._at]
            if token.kind in ("newline", "end") or self._peek("|", ")", "]", "->"):
                break
            if self._take("&"):
                if not in_terminal:
                    raise self._error("`&` can stand in terminals only, whose names have capital letters", token)
                found.append(Row(tuple(parts)))
                parts = []
            else:
                parts.append(self._repeated(depth, in_terminal))
        if self._take("->"):
            self._next()
        row: Expression = parts[0] if len(parts) == 1 else Row(tuple(parts))
        if found:
            return Terminal(Both(tuple(map(_as_node, (*found, row)))))
        return row

    def _repeated(self, depth: int, in_terminal: bool) -> Expression:
        token = self._tokens[self._at]
        if self._take("~"):
            inner = self._atom(depth, in_terminal)
            if not isinstance(inner, Terminal) and not in_terminal:
                raise self._error("`~` can stand before terminals only", token)
            found: Expression = Terminal(Other(_as_node(inner)))
        else:
            found = self._atom(depth, in_terminal)
        for mark, least, most in (("*", 0, None), ("+", 1, None), ("?", 0, 1)):
            if self._take(mark):
                return Times(found, least, most)
        start = self._at
        if self._take("~"):
            if self._tokens[self._at].kind != "number":
                self._at = start
                return found
            least = self._count()
            return self._times(found, least, self._count() if self._take("..") else least, token)
        if self._take("{"):
            least = 0 if self._peek(",") else self._count()
            highest: int | None = least
            if self._take(","):
                highest = None if self._peek("}") else self._count()
            self._expect("}")
            return self._times(found, least, highest, token)
        return found

    def _times(self, inner: Expression, least: int, most: int | None, token: Token) -> Expression:
        if least > (least if most is None else most) or max(least, most or 0) > _MAX_TIMES:
            raise self._error(f"it can't be repeated {least} to {most} times; at most {_MAX_TIMES} in order", token)
        return Times(inner, least, most)

    def _count(self) -> int:
        token = self._next()
        if token.kind != "number":
            raise self._error(f"{token.text!r} should be a number", token)
        return int(token.text)

    def _atom(self, depth: int, in_terminal: bool) -> Expression:
        token = self._next()
        if token.text in ("(", "[") and token.kind == "mark":
            found = self._options(depth + 1, in_terminal=in_terminal)
            self._expect(")" if token.text == "(" else "]")
            return found if token.text == "(" else Times(found, 0, 1)
        match token.kind:
            case "text":
                return self._text(token)
            case "regex":
                pattern, _, flags = token.text[1:].rpartition("/")
                try:
                    return Terminal(as_rust(pattern, flags))
                except ValueError as error:
                    raise self._error(f"/{pattern}/: {error}", token) from None
            case "rule" if not in_terminal and token.text in self._rules:
                return RuleName(token.text)
            case "terminal" if token.text in self._read or token.text in self._bodies:
                if token.text in self._open or len(self._open) > _MAX_DEPTH:
                    raise self._error(f"the terminal {token.text} contains itself", token)
                return Terminal(self._named(token.text))
            case "rule" | "terminal":
                problem = "a rule can't be part of a terminal" if token.text in self._rules else "it isn't defined"
                raise self._error(f"{token.text}: {problem}", token)
            case "special":
                raise self._error(f"{token.text}: an input is a text, without tokens and other grammars", token)
            case "directive":
                problem = _NO_SUCH.get(token.text[1:], "this directive")
                raise self._error(f"`{token.text}`: {problem} is not supported", token)
        raise self._error(f"{token.text!r} can't stand here", token)

    def _text(self, token: Token) -> Terminal:
        value, ignores_case = text_of(token)
        if self._take(".."):
            other = self._next()
            end, _ = text_of(other) if other.kind == "text" else ("", False)
            if len(value) != 1 or len(end) != 1 or end < value:
                raise self._error(f"{token.text}..{other.text} is no range of characters", token)
            return Terminal(Chars(sets.intersection(((ord(value), ord(end)),), sets.EVERY)))
        if any(0xD800 <= ord(one) <= 0xDFFF for one in value):
            raise self._error("half a surrogate pair matches nothing", token)
        if not ignores_case:
            return Terminal(literal(value))
        return Terminal(joined([Chars(sets.ignore_any_case(sets.characters(one))) for one in value]))


def _as_node(expression: Expression) -> Node:
    """Return the tree of an expression in which all are terminals."""
    match expression:
        case Terminal(node):
            return node
        case Row(parts):
            return joined([_as_node(part) for part in parts])
        case AnyOf(options):
            return Choice(tuple(map(_as_node, options)))
        case Times(inner, least, most):
            return EMPTY if most == 0 else Repeat(_as_node(inner), least, most)
        case RuleName(name):
            raise ValueError(f"{name}: a rule can't be part of a terminal")
