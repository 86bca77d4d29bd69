"""Reads regular expressions as JavaScript and Python read them, or as Rust does.

Where the first two differ in what a name like `\\s` matches, only what both match is allowed.
"""

from __future__ import annotations

import re

from jaxserve.text.grammars import character_sets as sets
from jaxserve.text.grammars.character_sets import Ranges
from jaxserve.text.grammars.patterns import (
    ANY_TEXT,
    EMPTY,
    Anchor,
    Chars,
    Choice,
    Node,
    Repeat,
    Sequence,
    joined,
    without_anchors,
)
from jaxserve.text.grammars.rust_classes import named_class

_CONTROLS = {"t": "\t", "n": "\n", "v": "\v", "f": "\f", "r": "\r"}
_CATEGORIES = {
    "Letter": "L",
    "Uppercase_Letter": "Lu",
    "Lowercase_Letter": "Ll",
    "Mark": "M",
    "Number": "N",
    "Decimal_Number": "Nd",
    "Punctuation": "P",
    "Symbol": "S",
    "Separator": "Z",
    "Other": "C",
}
_REPEAT = re.compile(r"\{(\d+)(?:(,)(\d*))?\}")
_GROUP_NAME = re.compile(r"P?<[^\W\d]\w*>")
_FLAGS = re.compile(r"([is]*)(?:-([is]+))?([:)])")


def whole(pattern: str) -> Node:
    """Return the texts that match the whole of a pattern, whose `\\w` takes letters of all scripts.

    Raises `ValueError` that says what isn't supported.
    """
    return Choice(tuple(node for _, node, _ in without_anchors(_PatternParser(pattern, python=True).parse())))


def as_rust(pattern: str, flags: str = "") -> Node:
    """Return the texts that match the whole of a pattern with some flags, as Rust's crate `regex` reads it.

    Raises `ValueError` that says what isn't supported.
    """
    if unknown := set(flags) - set("isu"):
        raise ValueError(f"the flag `{min(unknown)}` is not supported")
    node = _PatternParser(pattern, python=True, rust=True, flags=flags).parse()
    return Choice(tuple(node for _, node, _ in without_anchors(node)))


def found_in(pattern: str) -> Node:
    """Return the texts in which a pattern of a JSON schema is found: as JavaScript reads it with the flag `u`.

    Raises `ValueError` that says what isn't supported.
    """
    options: list[Node] = []
    for at_start, node, at_end in without_anchors(_PatternParser(pattern, python=False).parse()):
        before: tuple[Node, ...] = () if at_start else (ANY_TEXT,)
        options.append(Sequence((*before, node, *(() if at_end else (ANY_TEXT,)))))
    return options[0] if len(options) == 1 else Choice(tuple(options))


class _PatternParser:
    """Reads one pattern. In `python`, `\\w` and `\\d` are Python's, and flags are allowed; with `rust` besides, all
    that has a name is Rust's."""

    def __init__(self, pattern: str, *, python: bool, rust: bool = False, flags: str = "") -> None:
        self._pattern = pattern
        self._python, self._rust = python, rust
        self._at = 0
        self._ignores_case, self._dot_is_any = "i" in flags, "s" in flags

    def parse(self) -> Node:
        """Return the tree."""
        node = self._choice()
        if self._at < len(self._pattern):
            raise ValueError(f"unmatched `)` at {self._at}")
        return node

    def _peek(self, text: str) -> bool:
        return self._pattern.startswith(text, self._at)

    def _take(self, text: str) -> bool:
        found = self._peek(text)
        self._at += len(text) * found
        return found

    def _next(self) -> str:
        if self._at >= len(self._pattern):
            raise ValueError("it ends too early")
        self._at += 1
        return self._pattern[self._at - 1]

    def _choice(self) -> Node:
        flags = self._ignores_case, self._dot_is_any
        options = [self._sequence()]
        while self._take("|"):
            options.append(self._sequence())
        self._ignores_case, self._dot_is_any = flags
        return options[0] if len(options) == 1 else Choice(tuple(options))

    def _sequence(self) -> Node:
        parts: list[Node] = []
        while self._at < len(self._pattern) and not self._peek("|") and not self._peek(")"):
            node = self._atom()
            parts.append(self._repeated(node))
        return joined(parts)

    def _repeated(self, node: Node) -> Node:
        start = self._at
        times = self._times()
        if times is None:
            return node
        if isinstance(node, Anchor):
            raise ValueError(f"nothing to repeat at {start}")
        self._take("?")  # lazy or not, the same texts match
        if self._peek("+") or self._peek("*") or self._peek("?") or _REPEAT.match(self._pattern, self._at):
            raise ValueError(f"two quantifiers at {start}")
        return Repeat(node, *times)

    def _times(self) -> tuple[int, int | None] | None:
        for mark, times in (("*", (0, None)), ("+", (1, None)), ("?", (0, 1))):
            if self._take(mark):
                return times
        found = _REPEAT.match(self._pattern, self._at)
        if found is None:
            if re.compile(r"\{,\d+\}").match(self._pattern, self._at):
                raise ValueError(f"`{{,n}}` at {self._at} differs between languages: write `{{0,n}}`")
            return None
        self._at = found.end()
        least = int(found[1])
        most = least if found[2] is None else int(found[3]) if found[3] else None
        if most is not None and most < least:
            raise ValueError(f"`{found[0]}` is out of order")
        return least, most

    def _atom(self) -> Node:
        start = self._at
        character = self._next()
        match character:
            case "(":
                return self._group(start)
            case "[":
                return Chars(self._class(start))
            case ".":
                ends = sets.characters("\n") if self._rust else sets.LINE_ENDS
                return Chars(sets.EVERY if self._dot_is_any else sets.complement(ends))
            case "^" | "$":
                return Anchor(character == "$")
            case "*" | "+" | "?":
                raise ValueError(f"nothing to repeat at {start}")
            case "\\":
                return self._escape(start)
        return self._cased(sets.characters(self._plain(character)))

    def _cased(self, ranges: Ranges) -> Chars:
        if not self._ignores_case:
            return Chars(ranges)
        return Chars(sets.ignore_any_case(ranges) if self._rust else sets.ignore_case(ranges))

    def _plain(self, character: str) -> str:
        if 0xD800 <= ord(character) <= 0xDFFF:
            raise ValueError("half a surrogate pair matches nothing")
        return character

    def _group(self, start: int) -> Node:
        if self._take("?"):
            name = _GROUP_NAME.match(self._pattern, self._at)
            flags = _FLAGS.match(self._pattern, self._at)
            if name is not None:
                self._at = name.end()
            elif flags is not None and (flags[0] == ":" or self._python):
                self._at = flags.end()
                return self._flagged(flags, start)
            elif self._peek("=") or self._peek("!") or self._peek("<=") or self._peek("<!"):
                raise ValueError(f"looking ahead or behind, at {start}, is not supported")
            else:
                raise ValueError(f"the group at {start} is not supported")
        return self._end_of_group(start)

    def _flagged(self, flags: re.Match[str], start: int) -> Node:
        before = self._ignores_case, self._dot_is_any
        self._ignores_case = ("i" in flags[1] or self._ignores_case) and "i" not in (flags[2] or "")
        self._dot_is_any = ("s" in flags[1] or self._dot_is_any) and "s" not in (flags[2] or "")
        if flags[3] == ")":  # up to the end of the group around it
            return EMPTY
        node = self._end_of_group(start)
        self._ignores_case, self._dot_is_any = before
        return node

    def _end_of_group(self, start: int) -> Node:
        node = self._choice()
        if not self._take(")"):
            raise ValueError(f"the group at {start} doesn't end")
        return node

    def _escape(self, start: int) -> Node:
        if self._peek("b") or self._peek("B"):
            raise ValueError(f"the edge of a word, at {start}, is not supported")
        if self._python and self._take("A"):
            return Anchor(False)
        if self._python and (self._take("Z") or self._take("z")):
            return Anchor(True)
        if self._at < len(self._pattern) and self._pattern[self._at] in "123456789k":
            raise ValueError(f"the reference to a group, at {start}, is not supported")
        found = self._escaped(start)
        return self._cased(sets.characters(found)) if isinstance(found, str) else Chars(found)

    def _escaped(self, start: int, *, wide: bool = False) -> str | Ranges:
        """Return what follows a backslash: a character, or the set of a named class.

        JavaScript and Python differ in some classes: the set has what both match, or with `wide` what either matches.
        """
        letter = self._next()
        if self._rust:
            if letter in "dDwWsSpP":
                return self._named(letter, start)
            if letter in "c0" or (letter == "b" and start):
                raise ValueError(f"`\\{letter}` at {start} is not supported")
        wide = wide != letter.isupper()
        match letter:
            case "d" | "D":
                named = sets.category("Nd") if wide else sets.DIGITS
            case "w" | "W":
                named = sets.unicode_words() if wide or self._python else sets.WORDS
            case "s" | "S":
                named = sets.WIDE_BLANKS if wide else sets.BLANKS
            case "p" | "P":
                named = self._property(start)
            case "c" if re.compile("[A-Za-z]").match(self._pattern, self._at):
                return chr(ord(self._next()) % 32)
            case "0" if not re.compile("[0-9]").match(self._pattern, self._at):
                return "\0"
            case "x" | "u" | "U":
                return self._number(letter, start)
            case _ if letter in _CONTROLS:
                return _CONTROLS[letter]
            case _ if letter.isascii() and letter.isalnum():
                raise ValueError(f"`\\{letter}` at {start} is not supported")
            case _:
                return self._plain(letter)
        return sets.complement(named) if letter.isupper() else named

    def _named(self, letter: str, start: int) -> Ranges:
        """Return the set of a class that Rust names."""
        name = ""
        if letter in "pP":
            found = re.compile(r"\{\^?[\w=: -]{1,64}\}|[A-Z]").match(self._pattern, self._at)
            if found is None:
                raise ValueError(f"`\\{letter}` at {start} needs a name in braces")
            name, self._at = found[0], found.end()
        ranges = named_class(f"\\{letter.lower()}{name}")
        return sets.complement(ranges) if letter.isupper() else ranges

    def _number(self, letter: str, start: int) -> str:
        digits = {"x": 2, "u": 4, "U": 8}[letter]
        found = re.compile(rf"[0-9a-fA-F]{{{digits}}}|\{{[0-9a-fA-F]{{1,6}}\}}").match(self._pattern, self._at)
        if found is None:
            raise ValueError(f"`\\{letter}` at {start} needs {digits} hexadecimal digits")
        self._at = found.end()
        code = int(found[0].strip("{}"), 16)
        if 0xD800 <= code <= 0xDBFF:
            low = re.compile(r"\\u([dD][c-fC-F][0-9a-fA-F]{2})").match(self._pattern, self._at)
            if low is not None:
                self._at = low.end()
                code = 0x10000 + (code - 0xD800) * 0x400 + int(low[1], 16) - 0xDC00
        if code > 0x10FFFF:
            raise ValueError(f"there is no character {found[0]}, at {start}")
        return self._plain(chr(code))

    def _property(self, start: int) -> Ranges:
        found = re.compile(r"\{(?:General_Category=|gc=)?(\w+)\}|([A-Z])").match(self._pattern, self._at)
        name = "" if found is None else found[1] or found[2]
        ranges = sets.category(_CATEGORIES.get(name, name)) if len(_CATEGORIES.get(name, name)) in (1, 2) else ()
        if found is None or not ranges:
            raise ValueError(f"`\\p` at {start}: only general categories like `\\p{{L}}` are supported")
        self._at = found.end()
        return ranges

    def _class(self, start: int) -> Ranges:
        negated = self._take("^")
        found: list[Ranges] = []
        while not self._peek("]") or (not found and self._python):
            if self._at >= len(self._pattern):
                raise ValueError(f"the class at {start} doesn't end")
            if self._rust:
                posix = re.compile(r"\[:\^?[a-z]{1,10}:\]").match(self._pattern, self._at)
                if posix is not None:
                    self._at = posix.end()
                    found.append(named_class(f"[{posix[0]}]"))
                    continue
                if any(map(self._peek, ("[", "&&", "--", "~~"))):
                    raise ValueError(f"a class within the class at {start} is not supported; write `\\[`, `\\&`, `\\-`")
            low = self._member(wide=negated)
            if isinstance(low, str) and self._peek("-") and not self._peek("-]"):
                dash, self._at = self._at, self._at + 1
                high = self._member(wide=negated)
                if isinstance(high, str):
                    if high < low:
                        raise ValueError(f"the range at {dash - 1} is out of order")
                    found.append(self._cased(sets.intersection(((ord(low), ord(high)),), sets.EVERY)).ranges)
                    continue
                self._at = dash
            found.append(self._cased(sets.characters(low)).ranges if isinstance(low, str) else low)
        self._at += 1
        return sets.complement(sets.union(*found)) if negated else sets.union(*found)

    def _member(self, *, wide: bool) -> str | Ranges:
        start = self._at
        character = self._next()
        if character != "\\":
            return self._plain(character)
        return "\b" if not self._rust and self._take("b") else self._escaped(start, wide=wide)
