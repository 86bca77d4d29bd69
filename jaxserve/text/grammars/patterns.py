"""Regular expressions as trees: what they match, and how llguidance writes them, in a text or in JSON.

llguidance has the syntax of Rust, in which classes mean something else (`[[:alpha:]]`, `&&`, a `[` inside). So a tree
becomes a text with nothing but ranges of characters. `pattern_parser` makes trees of what clients write.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import NamedTuple

from jaxserve.text.grammars import character_sets as sets
from jaxserve.text.grammars.character_sets import Ranges

# Alternatives of a pattern that differ in their anchors, and texts of a pattern that are listed.
_MAX_BRANCHES = 64


class Chars(NamedTuple):
    """One of some characters."""

    ranges: Ranges


class Sequence(NamedTuple):
    """Parts one after another; without parts, the empty text."""

    parts: tuple[Node, ...]


class Choice(NamedTuple):
    """Any of some options; nothing matches if there are none."""

    options: tuple[Node, ...]
    kind: str = "choice"  # as tuples, nodes of two kinds would be equal


class Repeat(NamedTuple):
    """A node `least` to `most` times; None is no limit."""

    node: Node
    least: int
    most: int | None


class Anchor(NamedTuple):
    """The end of the text, or its start."""

    at_end: bool


class Both(NamedTuple):
    """What matches all of some parts."""

    parts: tuple[Node, ...]
    kind: str = "both"


class Other(NamedTuple):
    """Every text that doesn't match a node."""

    node: Node
    kind: str = "other"


type Node = Chars | Sequence | Choice | Repeat | Anchor | Both | Other

EMPTY = Sequence(())
NOTHING = Choice(())
ANY_TEXT = Repeat(Chars(sets.EVERY), 0, None)


def literal(text: str) -> Node:
    """Return the node of one text."""
    return Sequence(tuple(Chars(sets.characters(one)) for one in text))


def count_nodes(node: Node) -> int:
    """Return how many nodes a tree has."""
    match node:
        case Sequence(parts) | Choice(parts) | Both(parts):
            return 1 + sum(map(count_nodes, parts))
        case Repeat(inner, _, _) | Other(inner):
            return 1 + count_nodes(inner)
    return 1


def matches(node: Node, text: str) -> bool:
    """Return whether the whole text matches, in polynomial time."""
    return len(text) in _ends(node, text, {0})


def _ends(node: Node, text: str, starts: set[int]) -> set[int]:
    """Return where matches that begin at one of `starts` may end."""
    match node:
        case Chars(ranges):
            return {at + 1 for at in starts if at < len(text) and sets.contains(ranges, text[at])}
        case Sequence(parts):
            for part in parts:
                starts = _ends(part, text, starts)
            return starts
        case Choice(options):
            return set().union(*(_ends(option, text, starts) for option in options))
        case Repeat(inner, least, most):
            reached, count = starts, 0
            seen = set() if least else set(starts)
            while reached and count != most:
                reached, count = _ends(inner, text, reached), count + 1
                if count >= least:
                    reached = reached - seen
                    seen |= reached
            return seen
        case Anchor(at_end):
            return starts & {len(text) if at_end else 0}
        case Both(parts):
            return {end for at in starts for end in set.intersection(*(_ends(part, text, {at}) for part in parts))}
        case Other(inner):
            return {end for at in starts for end in {*range(at, len(text) + 1)} - _ends(inner, text, {at})}


def texts(node: Node, most: int) -> set[str] | None:
    """Return all texts that match, or None if there are more than `most`."""
    match node:
        case Chars(ranges):
            count = sum(high - low + 1 for low, high in ranges)
            return set(sets.members(ranges)) if count <= most else None
        case Sequence(parts):
            return _joined([texts(part, most) for part in parts], most)
        case Choice(options):
            listed = [texts(option, most) for option in options]
            found = {one for some in listed if some is not None for one in some}
            return found if None not in listed and len(found) <= most else None
        case Repeat(inner, least, highest):
            listed_inner = texts(inner, most)
            if listed_inner is not None and listed_inner <= {""}:
                return listed_inner if listed_inner or least else {""}
            if highest is None or highest > most or listed_inner is None:
                return {""} if highest == 0 else None
            found_all: set[str] = set()
            for count in range(least, highest + 1):
                some = _joined([listed_inner] * count, most)
                if some is None or len(found_all | some) > most:
                    return None
                found_all |= some
            return found_all
        case Anchor():
            return {""}
        case Both() | Other():
            return None


def _joined(parts: list[set[str] | None], most: int) -> set[str] | None:
    if set() in parts:
        return set()
    found = {""}
    for part in parts:
        if part is None or len(found) * len(part) > most:
            return None
        found = {one + other for one in found for other in part}
    return found


def regex(node: Node, character: Callable[[Ranges], str] | None = None) -> str:
    """Return a tree without anchors in llguidance's syntax. `character` writes a set, by default as a class."""
    write = character or char_class
    match node:
        case Chars(ranges):
            return write(ranges)
        case Sequence(parts):
            return "".join(regex(part, write) for part in parts) or "(?:)"
        case Choice(options):
            return f"(?:{'|'.join(regex(option, write) for option in options)})" if options else _NOTHING
        case Repeat(inner, least, most):
            times = {(0, None): "*", (1, None): "+", (0, 1): "?"}.get((least, most))
            times = times or f"{{{least},{'' if most is None else most}}}"
            return f"(?:{regex(inner, write)}){times}"
        case Anchor():
            raise AssertionError("anchors are taken out before")
        case Both() | Other():
            raise AssertionError("a regular expression of llguidance has neither")


_NOTHING = r"[a&&b]"


@functools.lru_cache(4096)
def char_class(ranges: Ranges) -> str:
    """Return a set of characters as a class, a single one as itself."""
    if not ranges:
        return _NOTHING
    if ranges == sets.EVERY:
        return "(?s:.)"
    if len(ranges) == 1 and ranges[0][0] == ranges[0][1]:
        return _code(ranges[0][0])
    return f"[{''.join(_code(low) if low == high else f'{_code(low)}-{_code(high)}' for low, high in ranges)}]"


def _code(code: int) -> str:
    return chr(code) if code < 128 and (chr(code).isalnum() or code in b" _") else f"\\x{{{code:x}}}"


# What JSON writes in a text as `\\` and a letter; other control characters have a number.
_ESCAPES = {'"': '"', "\\": "\\", "\b": "b", "\f": "f", "\n": "n", "\r": "r", "\t": "t"}
ESCAPED = sets.union(((0, 0x1F), (0x7F, 0x7F)), sets.characters('"\\'))
"""The characters that are escaped in JSON texts."""


def json_escape(character: str) -> str:
    """Return an escaped character, of 16 bits, as a JSON text has it."""
    return f"\\{_ESCAPES[character]}" if character in _ESCAPES else f"\\u{ord(character):04x}"


@functools.lru_cache(4096)
def json_character(ranges: Ranges, also: Ranges = ()) -> str:
    """Return a set of characters as a JSON text has them, where those in `also` are escaped too.

    Each has exactly one spelling.
    """
    escaped = sets.union(ESCAPED, also)
    raw = sets.intersection(ranges, sets.complement(escaped))
    special = [*map(json_escape, sets.members(sets.intersection(ranges, escaped)))]
    named = "".join(one[1] for one in special if len(one) == 2)
    numbered = [one[2:] for one in special if len(one) > 2]
    options = [char_class(raw)] if raw or not special else []
    options += [rf"\x{{5c}}{char_class(sets.characters(named))}"] if named else []
    options += [rf"\x{{5c}}u(?:{'|'.join(numbered)})"] if numbered else []
    return options[0] if len(options) == 1 else f"(?:{'|'.join(options)})"


def json_text(node: Node) -> str:
    """Return the expression of the JSON texts of what matches."""
    return f"\\x{{22}}{regex(node, json_character)}\\x{{22}}"


def without_anchors(node: Node) -> list[tuple[bool, Node, bool]]:
    """Return the alternatives of a tree without anchors, and whether each begins and ends where the text does."""
    found = [*_anchored(node)]
    if len(found) > _MAX_BRANCHES:
        raise ValueError(f"more than {_MAX_BRANCHES} alternatives differ in their anchors")
    return found


def _anchored(node: Node) -> Iterator[tuple[bool, Node, bool]]:
    if not _has_anchor(node):
        yield False, node, False
        return
    match node:
        case Anchor(at_end):
            yield not at_end, EMPTY, at_end
        case Choice(options):
            for option in options:
                yield from without_anchors(option)
        case Repeat(inner, least, 1):
            yield from without_anchors(inner)
            if not least:
                yield False, EMPTY, False
        case Sequence(parts):
            found: list[tuple[bool, Node, bool]] = [(False, EMPTY, False)]
            for part in parts:
                found = [_then(one, other) for one in found for other in without_anchors(part)]
                if len(found) > _MAX_BRANCHES:
                    break
            yield from found
        case _:
            raise ValueError("`^` and `$` are supported at the start and the end only")


def _then(one: tuple[bool, Node, bool], other: tuple[bool, Node, bool]) -> tuple[bool, Node, bool]:
    if (one[2] and other[1] != EMPTY) or (other[0] and one[1] != EMPTY):
        raise ValueError("`^` and `$` are supported at the start and the end only")
    return one[0] or other[0], joined([one[1], other[1]]), one[2] or other[2]


def joined(nodes: list[Node]) -> Node:
    parts = [part for node in nodes for part in (node.parts if isinstance(node, Sequence) else (node,))]
    return parts[0] if len(parts) == 1 else Sequence(tuple(parts))


def _has_anchor(node: Node) -> bool:
    match node:
        case Anchor():
            return True
        case Chars():
            return False
        case Repeat(inner, _, _) | Other(inner):
            return _has_anchor(inner)
        case Sequence(parts) | Choice(parts) | Both(parts):
            return any(map(_has_anchor, parts))
