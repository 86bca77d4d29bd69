"""Terminals of Lark as a JSON text has them: which texts they match, and what is left of these after a character."""

from __future__ import annotations

from collections.abc import Iterator

from jaxserve.text.grammars import character_sets as sets
from jaxserve.text.grammars import patterns
from jaxserve.text.grammars.character_sets import Ranges
from jaxserve.text.grammars.patterns import (
    ANY_TEXT,
    EMPTY,
    NOTHING,
    Anchor,
    Both,
    Chars,
    Choice,
    Node,
    Other,
    Repeat,
    Sequence,
)
from jaxserve.text.grammars.rust_classes import matches_nothing

_SOME_TEXT = Repeat(ANY_TEXT.node, 1, None)


def is_nullable(node: Node) -> bool:
    """Return whether a node without anchors matches the empty text."""
    match node:
        case Chars() | Anchor():
            return False
        case Sequence(parts) | Both(parts):
            return all(map(is_nullable, parts))
        case Choice(parts):
            return any(map(is_nullable, parts))
        case Repeat(inner, least, _):
            return not least or is_nullable(inner)
        case Other(inner):
            return not is_nullable(inner)


def not_empty(node: Node) -> Node:
    """Return what matches without the empty text."""
    return Both((node, _SOME_TEXT)) if is_nullable(node) else node


def rest(node: Node, character: str) -> Node:
    """Return what may follow a character in the texts of a node without anchors."""
    match node:
        case Chars(ranges):
            return EMPTY if sets.contains(ranges, character) else NOTHING
        case Sequence(parts):
            options = []
            for at, part in enumerate(parts):
                options.append(_then(rest(part, character), parts[at + 1 :]))
                if not is_nullable(part):
                    break
            return _any(options)
        case Choice(parts):
            return _any([rest(part, character) for part in parts])
        case Repeat(inner, least, most):
            if most == 0:
                return NOTHING
            again = Repeat(inner, max(0, least - 1), None if most is None else most - 1)
            return _then(rest(inner, character), (again,) if again.most != 0 else ())
        case Both(parts):
            found = tuple(rest(part, character) for part in parts)
            return NOTHING if NOTHING in found else Both(found)
        case Other(inner):
            return Other(rest(inner, character))
        case Anchor():
            raise AssertionError("anchors are taken out before")


def _then(first: Node, others: tuple[Node, ...]) -> Node:
    return NOTHING if first == NOTHING else patterns.joined([first, *others])


def _any(options: list[Node]) -> Node:
    found = tuple(one for one in options if one != NOTHING)
    return found[0] if len(found) == 1 else Choice(found)


def spelled(node: Node, also: Ranges) -> str:
    """Return the terminal of a node's texts as they stand in a JSON text, where the characters `also` are escaped."""
    if not _has_operator(node):
        return f"/{patterns.regex(node, lambda ranges: patterns.json_character(ranges, also))}/"
    match node:
        case Sequence(parts):
            return f"({' '.join(spelled(part, also) for part in parts)})"
        case Choice(parts):
            return f"({' | '.join(spelled(part, also) for part in parts)})"
        case Both(parts):
            return f"({' & '.join(spelled(part, also) for part in parts)})"
        case Other(inner):
            return f"({spelled(ANY_TEXT, also)} & ~{spelled(inner, also)})"
        case Repeat(inner, least, most):
            times = f"{{{least},{'' if most is None else most}}}"
            return f"({spelled(inner, also)}){times}" if most != 0 else spelled(EMPTY, also)
    raise AssertionError(f"{node} has an operator")


def _has_operator(node: Node) -> bool:
    match node:
        case Both() | Other():
            return True
        case Sequence(parts) | Choice(parts):
            return any(map(_has_operator, parts))
        case Repeat(inner, _, _):
            return _has_operator(inner)
    return False


def character_classes(node: Node) -> Iterator[Ranges]:
    """Yield the sets of characters in a node."""
    match node:
        case Chars(ranges):
            yield ranges
        case Sequence(parts) | Choice(parts) | Both(parts):
            for part in parts:
                yield from character_classes(part)
        case Repeat(inner, _, _) | Other(inner):
            yield from character_classes(inner)


class Escapes:
    """The characters that a JSON text escapes, and the places within escapes where one of them may be told from
    another: `carries`, of which the first is no place.

    `also` are escaped besides those that JSON escapes. Characters in the same of the sets `classes` count as one.
    """

    def __init__(self, classes: set[Ranges], also: Ranges) -> None:
        self.also = also
        escaped = [*sets.members(sets.union(patterns.ESCAPED, also))]
        grouped: dict[tuple[bool, ...], list[str]] = {}
        ordered = sorted(classes)
        for one in escaped:
            grouped.setdefault(tuple(sets.contains(ranges, one) for ranges in ordered), []).append(one)
        spellings = [[patterns.json_escape(one) for one in group] for group in grouped.values()]
        prefixes = {one[:length]: None for group in spellings for one in group for length in range(1, len(one))}
        self.carries = ["", *(prefix for prefix in prefixes if self._divides(prefix, spellings))]
        self._heads = {
            carry: [(group[0], head) for group in grouped.values() if (head := self._head(group, carry))]
            for carry in self.carries[1:]
        }

    @staticmethod
    def _divides(prefix: str, spellings: list[list[str]]) -> bool:
        """Return whether the next letter of an escape tells characters of different groups."""
        length = len(prefix)
        next_letters = [{one[length] for one in group if one.startswith(prefix)} for group in spellings]
        next_letters = [letters for letters in next_letters if letters]
        return len(next_letters) > 1 and len(set().union(*next_letters)) > 1

    def terminal(self, node: Node, carry: str, carried: str) -> str:
        """Return the terminal of a node's texts, of which the beginning `carry` was read before, with the beginning
        `carried` of what follows; "" if there are none."""
        if carry:
            options = [*self._continued(node, carry)]
            body = f"({' | '.join(options)})" if options else ""
        else:
            body = spelled(node, self.also)
        return f"{body} /{patterns.regex(patterns.literal(carried))}/" if body and carried else body

    def _continued(self, node: Node, carry: str) -> Iterator[str]:
        for character, head in self._heads[carry]:
            left = rest(node, character)
            if left == NOTHING:
                continue
            tail = spelled(left, self.also)
            if not (_has_operator(left) and matches_nothing(tail)):
                yield f"({head} {tail})"

    def _head(self, group: list[str], carry: str) -> str:
        """Return the terminal of the ends of escapes that begin with `carry`, "" if there are none."""
        ends = [one[len(carry) :] for one in map(patterns.json_escape, group) if one.startswith(carry)]
        return f"/{patterns.regex(Choice(tuple(map(patterns.literal, ends))))}/" if ends else ""
