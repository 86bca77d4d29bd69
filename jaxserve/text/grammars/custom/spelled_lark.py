"""Writes grammars in Lark for texts as JSON has them, as rules of llguidance's Lark.

llguidance reads a terminal as far as it goes, and never goes back. In JSON a line feed and a quote begin alike, with
`\\`: after it, a terminal that may go on with a quote can't be told from one that ends before a line feed. So each rule
and terminal is written once for each two places in an escape where it may begin and end. The first is what the terminal
before it has read of its first character, the second what it reads of the next terminal's. Then the texts are those
that llguidance allows for the grammar as it stands.

What a grammar ignores stands between terminals, not before the first nor after the last.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import NamedTuple

from jaxserve.text.grammars.character_sets import Ranges
from jaxserve.text.grammars.custom.lark_parser import AnyOf, Expression, LarkGrammar, Row, RuleName, Terminal
from jaxserve.text.grammars.custom.spelled_terminals import Escapes, character_classes, is_nullable, not_empty
from jaxserve.text.grammars.patterns import Choice, Node

# The place before the first terminal, where nothing is ignored; all others are those of `Escapes`.
_BEGIN = "begin"
_MAX_PARTS = 5000
# Parts of others that are looked at to find out where these may end.
_MAX_WORK = 20 * _MAX_PARTS
# The places where a part may begin, each with one where it may end.
type _Pairs = frozenset[tuple[str, str]]


class _GrammarPart(NamedTuple):
    """A part of a grammar: a terminal, or others by their numbers: one of them, all of them, or one several times."""

    node: Node | None = None
    inner: tuple[int, ...] = ()
    is_row: bool = False
    times: tuple[int, int | None] | None = None


class SpelledLark:
    """Writes one grammar. The names of its rules begin with `prefix`; `add_terminal` returns the name of a terminal.

    The characters `also` are escaped besides those that JSON escapes.
    """

    def __init__(self, grammar: LarkGrammar, prefix: str, add_terminal: Callable[[str], str], also: Ranges) -> None:
        self.lines: list[str] = []
        self._prefix, self._add_terminal = prefix, add_terminal
        self._parts: list[_GrammarPart] = []
        self._numbers: dict[int, int] = {}
        self._rules = {name: self._add(_GrammarPart()) for name in grammar.rules}
        for name, body in grammar.rules.items():
            self._parts[self._rules[name]] = _GrammarPart(inner=(self._number(body),))
        self._blank = self._add(_GrammarPart(not_empty(Choice(tuple(grammar.ignored))))) if grammar.ignored else None
        nodes = [part.node for part in self._parts if part.node is not None]
        self._escapes = Escapes({one for node in nodes for one in character_classes(node)}, also)
        self._places = [*self._escapes.carries, *([_BEGIN] if grammar.ignored else [])]
        self._same: _Pairs = frozenset((place, place) for place in self._places)
        self._solid = [None if part.node is None else not_empty(part.node) for part in self._parts]
        self._terminal_pairs = [self._ends(node) for node in self._solid]
        self._powers: dict[tuple[int, int, bool], _Pairs] = {}
        self._pairs = self._find_pairs()
        self._terminals: dict[tuple[int, str, str], str] = {}
        self._names: dict[tuple[object, ...], str] = {}
        self._pending: list[tuple[str, Callable[[], list[str]]]] = []

    def start(self) -> str:
        """Return the expression of all texts, after which `lines` has its rules.

        Raises `ValueError` if there are none.
        """
        start, begin = self._rules["start"], self._places[-1] if self._blank is not None else ""
        found = [
            self._named(start, begin, end) for end in dict.fromkeys(("", begin)) if (begin, end) in self._pairs[start]
        ]
        while self._pending:
            name, options = self._pending.pop()
            self.lines.append(f"{name}: {_any(options())}")
        if not found:
            raise ValueError("no text matches")
        return _any(found)

    def _add(self, part: _GrammarPart) -> int:
        if len(self._parts) == _MAX_PARTS:
            raise ValueError(f"it has more than {_MAX_PARTS} terminals, rows, alternatives and repetitions")
        self._parts.append(part)
        return len(self._parts) - 1

    def _number(self, expression: Expression) -> int:
        """Return the number of an expression's part, after adding it."""
        match expression:
            case RuleName(name):
                return self._rules[name]
            case Terminal(node):  # one with a name is the same object wherever it stands
                if id(node) not in self._numbers:
                    self._numbers[id(node)] = self._add(_GrammarPart(node))
                return self._numbers[id(node)]
            case Row(parts):
                return self._add(_GrammarPart(inner=tuple(map(self._number, parts)), is_row=True))
            case AnyOf(options):
                return self._add(_GrammarPart(inner=tuple(map(self._number, options))))
        return self._add(
            _GrammarPart(inner=(self._number(expression.inner),), times=(expression.least, expression.most))
        )

    def _ends(self, node: Node | None) -> _Pairs:
        """Return the places where a terminal that isn't empty may begin and end."""
        carries = self._escapes.carries
        begins = [place for place in carries if node is not None and self._escapes.terminal(node, place, "")]
        return frozenset((begin, end) for begin in begins for end in carries)

    def _find_pairs(self) -> list[_Pairs]:
        """Return the places where each part may begin and end."""
        found: list[_Pairs] = [frozenset()] * len(self._parts)
        users: list[list[int]] = [[] for _ in self._parts]
        for number, part in enumerate(self._parts):
            for inner in part.inner:
                users[inner].append(number)
        self._pairs = found
        pending = dict.fromkeys(range(len(self._parts)))
        work = 0
        while pending:
            number = next(iter(pending))
            del pending[number]
            work += len(self._parts[number].inner)
            if work > _MAX_WORK:
                raise ValueError("its rules are too complex")
            pairs = self._pairs_of(number)
            if pairs != found[number]:
                found[number] = pairs
                pending.update(dict.fromkeys(users[number]))
        return found

    def _pairs_of(self, number: int) -> _Pairs:
        part = self._parts[number]
        if part.node is not None:
            pairs = self._terminal_pairs[number]
            if self._blank is not None and number != self._blank:
                blanks = _closure(self._terminal_pairs[self._blank] | self._same)
                pairs = _then(blanks, pairs) | {(_BEGIN, end) for begin, end in pairs if not begin}
            return pairs | self._same if is_nullable(part.node) else pairs
        inner = [self._pairs[one] for one in part.inner]
        if part.times is not None:
            least, most = part.times
            up_to = inner[0] | self._same
            more = _closure(up_to) if most is None else self._power_of(up_to, most - least)
            return _then(self._power_of(inner[0], least), more)
        if not part.is_row:
            return frozenset().union(*inner)
        pairs = self._same
        for one in inner:
            pairs = _then(pairs, one)
        return pairs

    def _rule(self, key: tuple[object, ...], options: Callable[[], list[str]]) -> str:
        """Return the name of the rule of some options, which are asked for later."""
        if key not in self._names:
            self._names[key] = f"{self._prefix}_{len(self._names)}"
            self._pending.append((self._names[key], options))
        return self._names[key]

    def _named(self, number: int, begin: str, end: str) -> str:
        """Return the expression of a part from one place to another, to which it leads."""
        part = self._parts[number]
        if part.node is not None:
            if self._blank is None or number == self._blank:
                return _any(self._terminal(number, begin, end))
            return self._rule((number, begin, end), lambda: self._after_blanks(number, begin, end))
        if part.times is not None:
            return self._times(number, begin, end)
        if part.is_row:
            return self._row(number, begin, end)
        return self._rule(
            (number, begin, end),
            lambda: [self._named(one, begin, end) for one in part.inner if (begin, end) in self._pairs[one]],
        )

    def _terminal(self, number: int, begin: str, end: str) -> list[str]:
        """Return the options of a terminal without blanks before it."""
        key = (number, begin.removeprefix(_BEGIN), end)
        node, solid = self._parts[number].node, self._solid[number]
        assert node is not None
        assert solid is not None
        found = ['""'] if begin == end and is_nullable(node) else []
        if key[1:] in self._terminal_pairs[number]:
            if key not in self._terminals:
                self._terminals[key] = self._add_terminal(self._escapes.terminal(solid, *key[1:]))
            found.insert(0, self._terminals[key])
        return found

    def _after_blanks(self, number: int, begin: str, end: str) -> list[str]:
        assert self._blank is not None
        found = self._terminal(number, begin, end)
        for place in self._escapes.carries:
            blanks = self._repeated(self._blank, begin, place)
            if blanks and (place, end) in self._terminal_pairs[number]:
                found += [f"{blanks} {one}" for one in self._terminal(number, place, end) if one != '""']
        return found

    def _repeated(self, number: int, begin: str, end: str) -> str:
        """Return the expression of a part at least once, "" if it doesn't lead there."""
        pairs = self._pairs[number]
        if (begin, end) not in _closure(pairs):
            return ""
        if all(last == begin for first, last in pairs if first == begin):
            return f"({self._named(number, begin, end)})+"

        def options() -> list[str]:
            found = [self._named(number, begin, end)] if (begin, end) in pairs else []
            for place in (first for first, last in pairs if last == end):
                before = self._repeated(number, begin, place)
                found += [f"{before} {self._named(number, place, end)}"] if before else []
            return found

        return self._rule((number, begin, end, "+"), options)

    def _times(self, number: int, begin: str, end: str) -> str:
        part = self._parts[number]
        assert part.times is not None
        least, most = part.times
        [inner] = part.inner
        if begin == end and all(last == begin for first, last in self._pairs[inner] if first == begin):
            if (begin, begin) not in self._pairs[inner] or most == 0:
                return '""'
            return f"({self._named(inner, begin, end)}){{{least},{'' if most is None else most}}}"

        def options() -> list[str]:
            found = []
            for place in self._places:
                first = self._power(inner, least, False, begin, place)
                if most is None:
                    after = self._repeated(inner, place, end)
                    after = f"({after})?" if after and place == end else after
                    after = after or ('""' if place == end else "")
                else:
                    after = self._power(inner, most - least, True, place, end)
                found += [f"{first} {after}"] if first and after else []
            return found

        return self._rule((number, begin, end), options)

    def _power(self, number: int, count: int, optional: bool, begin: str, end: str) -> str:
        """Return the expression of a part `count` times, or up to that; "" if it doesn't lead there."""
        if (begin, end) not in self._power_pairs(number, count, optional):
            return ""
        if not count:
            return '""'
        if count == 1:
            is_led = (begin, end) in self._pairs[number]
            inner = self._named(number, begin, end) if is_led else '""'
            return f"({inner})?" if optional and begin == end and is_led else inner

        def options() -> list[str]:
            halves = count // 2, count - count // 2
            found = []
            for place in self._places:
                one, other = (
                    self._power(number, halves[0], optional, begin, place),
                    self._power(number, halves[1], optional, place, end),
                )
                found += [f"{one} {other}"] if one and other else []
            return found

        return self._rule((number, count, optional, begin, end), options)

    def _power_pairs(self, number: int, count: int, optional: bool) -> _Pairs:
        key = (number, count, optional)
        if key not in self._powers:
            pairs = self._pairs[number] | self._same if optional else self._pairs[number]
            self._powers[key] = self._power_of(pairs, count)
        return self._powers[key]

    def _power_of(self, pairs: _Pairs, count: int) -> _Pairs:
        """Return where a part begins and ends that stands `count` times."""
        found = self._same
        for bit in f"{count:b}":
            found = _then(found, found)
            found = _then(found, pairs) if bit == "1" else found
        return found

    def _row(self, number: int, begin: str, end: str) -> str:
        """Return the expression of a row; one that may lead through several places is divided into rules."""
        inner = self._parts[number].inner
        layers = [{begin}]
        for one in inner:
            layers.append({last for first, last in self._pairs[one] if first in layers[-1]})
        layers[-1] &= {end}
        for at in reversed(range(len(inner))):
            layers[at] &= {first for first, last in self._pairs[inner[at]] if last in layers[at + 1]}

        def options(at: int, place: str) -> list[str]:
            ends = [last for last in self._places if last in layers[at + 1] and (place, last) in self._pairs[inner[at]]]
            return [f"{self._named(inner[at], place, last)} {rest(at + 1, last)}" for last in ends]

        def rest(at: int, place: str) -> str:
            found = []
            while at < len(inner):
                if len(layers[at + 1]) > 1:
                    found.append(self._rule((number, at, place, end, "row"), functools.partial(options, at, place)))
                    break
                [last] = layers[at + 1]
                found.append(self._named(inner[at], place, last))
                at, place = at + 1, last
            return " ".join(found)

        return rest(0, begin) or '""'


def _any(options: list[str]) -> str:
    found = [*dict.fromkeys(options)]
    return found[0] if len(found) == 1 else f"({' | '.join(found)})"


def _then(one: _Pairs, other: Iterable[tuple[str, str]]) -> _Pairs:
    """Return where two parts, one after another, begin and end."""
    return frozenset((first, last) for first, middle in one for begin, last in other if middle == begin)


def _closure(pairs: _Pairs) -> _Pairs:
    """Return where a part begins and ends that stands once or more."""
    found = pairs
    while (more := found | _then(found, pairs)) != found:
        found = more
    return found
