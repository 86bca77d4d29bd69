"""Writes JSON of given shapes as rules of Lark, as llguidance reads it.

Blanks belong to the punctuation around them. Each text is spelled in one way only, so that a key without a name can't
be one that has another schema, and so that Python reads it like JSON. Objects have the named keys first, in the order
of the schema.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from jaxserve.text.grammars import patterns
from jaxserve.text.grammars.character_sets import characters
from jaxserve.text.grammars.custom.lark_parser import parse_lark
from jaxserve.text.grammars.custom.spelled_lark import SpelledLark
from jaxserve.text.grammars.json_schema import SchemaReader
from jaxserve.text.grammars.json_shapes import (
    ANY,
    ANY_OBJECT,
    Boolean,
    LarkText,
    List,
    Null,
    Number,
    Object,
    Ref,
    Schema,
    Shape,
    Text,
)
from jaxserve.text.grammars.numbers import Bound

# Without a bound, a model that likes blanks never leaves them.
DEFAULT_BLANKS = r"[ \t]{1,2}|\r?\n[ \t]{0,40}"
# A terminal that must match some text, and the place in a schema that it comes from.
CHECKED_TERMINAL = re.compile(r"^(\w+_CHECKED): (.*) // (.*)$", re.MULTILINE)

# What a client must check itself.
_LEFT = "left to the client: "
LEFT_TO_CLIENT = re.compile(rf"^// {_LEFT}(.*)$", re.MULTILINE)

# Multiples are found by llguidance, which reads bounds as floats.
_MAX_EXACT = 2**53
_MAX_MULTIPLE = 2**32 - 1
# Numbers of keys are counted with 16 bits.
_MAX_COUNT = 2**16 - 2
_COUNT = "[0:16]"


class JsonGrammar:
    """The rules and terminals of some values, with names that begin with `prefix`.

    Between the parts of JSON may be a text that matches `blanks`, or nothing if that is "". In texts that a client's
    grammar describes, the characters `escaped` are escaped besides those that JSON escapes.
    """

    def __init__(self, prefix: str = "json", *, blanks: str = DEFAULT_BLANKS, escaped: str = "") -> None:
        self._prefix = prefix
        self._escaped = characters(escaped)
        self._num_grammars = 0
        self._rules: list[str] = []
        self._terminals: dict[str, tuple[str, str]] = {}
        self._references: dict[tuple[int, Ref], str] = {}
        self._left: dict[str, None] = {}
        self._readers: list[SchemaReader] = []  # kept alive, because the keys of references have their ids
        space = f"(?:{_escaped(blanks)})?" if blanks else ""
        self._open, self._open_list = (self._terminal(rf"/\{mark}{space}/") for mark in "{[")
        self._close, self._close_list = (self._terminal(rf"/{space}\{mark}/") for mark in "}]")
        self._comma, self._colon = (self._terminal(f"/{space}{mark}{space}/") for mark in ",:")

    @property
    def lines(self) -> list[str]:
        """The lines of Lark that all expressions need."""
        terminals = [f"{name}: {text}{note}" for text, (name, note) in self._terminals.items()]
        return [*self._rules, *terminals, *(f"// {_LEFT}{_one_line(place)}" for place in self._left)]

    def add(
        self,
        document: Any,
        *,
        name: str = "",
        strict: bool = False,
        objects_only: bool = False,
        closes_objects: bool = False,
    ) -> str:
        """Return the expression of the values of a JSON schema.

        With `objects_only`, these are its objects; with `closes_objects`, objects have only properties that the schema
        names. Raises `ValueError` with `name` and the place in the schema for what can't be held. What is only hard to
        hold (`uniqueItems`) is refused if `strict`, else noted.
        """
        reader = SchemaReader(document, closes_objects=closes_objects)
        try:
            schema = reader.read(document)
            found = self.expression(reader, reader.algebra.both(schema, ANY_OBJECT) if objects_only else schema)
            self.note(reader, name, strict=strict)
        except ValueError as error:
            raise ValueError(f"{name}: {error}" if name else str(error)) from error
        return found

    def note(self, reader: SchemaReader, name: str, *, strict: bool) -> None:
        """Note what a client must check itself in values that were written. Raises `ValueError` for it if `strict`."""
        if reader.unheld and strict:
            raise ValueError(f"{reader.unheld[0]} can't be held")
        self._left.update(dict.fromkeys(f"{name}: {place}" if name else place for place in reader.unheld))

    def expression(self, reader: SchemaReader, schema: Schema) -> str:
        """Return the expression of the values of a schema that `reader` has read.

        Raises `ValueError` that names the place if there are none, or if they can't be held.
        """
        if reader.algebra.is_empty(schema):
            raise ValueError(f"{_place(schema) or 'the schema'}: no value matches")
        if reader not in self._readers:
            self._readers.append(reader)
        return self._value(reader, schema)

    def _terminal(self, text: str, place: str = "") -> str:
        """Return the name of a terminal, which must match something if it has a place."""
        if text not in self._terminals:
            name = f"{self._prefix.upper()}_T{len(self._terminals)}"
            self._terminals[text] = (f"{name}_CHECKED", f" // {_one_line(place)}") if place else (name, "")
        return self._terminals[text][0]

    def _rule(self, body: str) -> str:
        name = f"{self._prefix}_{len(self._rules)}"
        self._rules.append(f"{name}: {body}")
        return name

    def _value(self, reader: SchemaReader, schema: Schema) -> str:
        options: list[str] = []
        scalars: list[str] = []
        may_be_empty = True
        for shape in dict.fromkeys(schema):
            if reader.algebra.is_empty((shape,)):
                continue
            match shape:
                case Ref():
                    options.append(self._reference(reader, shape))
                case List():
                    options.append(self._rule(self._list(reader, shape)))
                case Object():
                    options.append(self._rule(self._object(reader, shape)))
                case LarkText():
                    options.append(self._lark_text(shape))
                case Number() if shape.multiple is not None:
                    options.append(_multiples(shape, shape.multiple))
                case _:
                    scalars.append(_scalar(shape))
                    may_be_empty = may_be_empty and isinstance(shape, Text) and bool(shape.patterns)
        if scalars:
            options.append(self._terminal(" | ".join(scalars), (may_be_empty and _place(schema)) or ""))
        return _any(options)

    def _lark_text(self, shape: LarkText) -> str:
        self._num_grammars += 1
        prefix = f"{self._prefix}_lark{self._num_grammars}"
        try:
            spelled = SpelledLark(parse_lark(shape.definition), prefix, self._terminal, self._escaped)
            start = spelled.start()
        except ValueError as error:
            raise ValueError(f"{shape.where}: the grammar in Lark can't be held: {error}") from None
        self._rules += spelled.lines
        quote = self._terminal(r"/\x{22}/")
        return f"{quote} {start} {quote}"

    def _reference(self, reader: SchemaReader, ref: Ref) -> str:
        key = (0 if (ref,) == ANY else id(reader), ref)
        if key not in self._references:
            number = len(self._rules)
            self._rules.append("")
            self._references[key] = f"{self._prefix}_{number}"
            body = self._value(reader, reader.algebra.shapes((ref,)) if (ref,) == ANY else reader.look_up(ref))
            self._rules[number] = f"{self._prefix}_{number}: {body}"
        return self._references[key]

    def _list(self, reader: SchemaReader, shape: List) -> str:
        algebra = reader.algebra
        least, most = shape.least, algebra.most_items(shape)
        if most == 0:
            return f"{self._open_list} {self._close_list}"
        listed = algebra.listed(shape.items) if shape.unique and not shape.prefix and most != 1 else None
        if listed is not None:
            return self._distinct(listed, least, most or len(listed))
        if shape.unique and most != 1 and not self._are_distinct(reader, shape, most):
            reader.unheld.append(f"{shape.where}.uniqueItems".lstrip("."))
        fixed = min(len(shape.prefix), len(shape.prefix) if most is None else most)
        tail = ""
        if most is None or most > fixed:
            item = self._value(reader, shape.items)
            needed, further = max(0, least - fixed), None if most is None else most - fixed
            if fixed:
                tail = _times(f"{self._comma} {item}", needed, further)
            else:
                more = _times(f"{self._comma} {item}", max(0, needed - 1), None if further is None else further - 1)
                tail = f"{item} {more}" if needed else f"({item} {more})?"
        for index in reversed(range(fixed)):
            item = self._value(reader, shape.prefix[index])
            tail = f"{self._comma if index else ''} {item} {tail}"
            tail = tail if index < least else f"({tail})?"
        return f"{self._open_list} {tail} {self._close_list}"

    def _are_distinct(self, reader: SchemaReader, shape: List, most: int | None) -> bool:
        """Return whether the items of a list are sure to differ."""
        if most is None or most > len(shape.prefix):
            return False
        return all(
            reader.algebra.are_disjoint(one, other)
            for number, one in enumerate(shape.prefix[:most])
            for other in shape.prefix[:number]
        )

    def _distinct(self, values: Sequence[str], least: int, most: int) -> str:
        """Return the expression of a list of different values; a bit for each says whether it has been used."""
        items = [self._terminal(f"/{value}/") for value in values]
        name = f"{self._prefix}_{len(self._rules)}"
        further = [
            f"{self._comma} {item} {name}::set_bit({bit}) %if and(bit_clear({bit}), bit_count_lt(_, {most}))"
            for bit, item in enumerate(items)
        ]
        self._rules.append(f"{name}::_: {' | '.join([f'"" %if bit_count_ge(_, {least})', *further])}")
        first = " | ".join(f"{item} {name}::{1 << bit:#x}" for bit, item in enumerate(items))
        return f"{self._open_list} ({first}){'' if least else '?'} {self._close_list}"

    def _object(self, reader: SchemaReader, shape: Object) -> str:
        algebra = reader.algebra
        named = algebra.named(shape)
        needed = [name in shape.required for name, _ in named]
        members = [
            f"{self._terminal(f'/{patterns.json_text(patterns.literal(name))}/')} {self._colon} "
            f"{self._value(reader, schema)}"
            for name, schema in named
        ]
        taken = [*algebra.known_keys(shape)]
        further = _any([
            f"{self._key(shape, taken, *kind)} {self._colon} {self._value(reader, value)}"
            for *kind, value in algebra.open_keys(shape)
        ])  # fmt: skip
        bounds = _Counts(shape, needed, bool(further))
        return f"{self._open} {self._members(members, needed, further, bounds)} {self._close}"

    def _key(self, shape: Object, taken: Sequence[str], matched: list[Any], unmatched: list[Any]) -> str:
        """Return the terminal of a key that isn't taken, matches some patterns and none of some others."""
        if not (taken or matched or unmatched or shape.names):
            return self._terminal(_text(0, None))
        found = [f"/{patterns.json_text(pattern)}/" for pattern in matched]
        for name in shape.names:
            found += [f"/{patterns.json_text(pattern)}/" for pattern in name.patterns]
            found += [_text(name.least, name.most)] if name.least or name.most is not None else []
        if not matched:
            found.insert(0, _text(0, None))
        but = [patterns.json_text(pattern) for pattern in (*unmatched, *map(patterns.literal, taken))]
        return self._terminal(" & ".join(found + [f"~/(?:{'|'.join(but)})/"] * bool(but)))

    def _members(self, members: list[str], needed: list[bool], further: str, counts: _Counts) -> str:
        """Return the members of an object, of which some are needed, and the `further` ones, with commas between."""
        if not counts.matter:
            chain = f"({self._comma} {further})*" if further else ""
            after = [chain]
            for member, is_needed in reversed([*zip(members, needed)]):
                member = f"{self._comma} {member}"
                chain = (
                    self._rule(f"{member if is_needed else f'({member})?'} {chain}")
                    if chain or not is_needed
                    else member
                )
                after.append(chain)
            after.reverse()
            first = needed.index(True) if True in needed else len(members)
            starts = [f"{member} {after[at + 1]}" for at, member in enumerate(members[: first + 1])]
            if True not in needed:
                starts += [f"{further} {after[-1]}"] if further else []
                return f"({' | '.join(starts)})?" if starts else ""
            return f"({' | '.join(starts)})"
        return self._counted(members, needed, further, counts)

    def _counted(self, members: list[str], needed: list[bool], further: str, counts: _Counts) -> str:
        """Return the same with counts of the members so far, so that an allowed end can always be reached."""
        number = len(self._rules)
        names = [f"{self._prefix}_{number + index}" for index in range(len(members) + 1)]
        last = names[-1]
        self._rules += [""] * len(names)
        ends = [f'"" %if ge({_COUNT}, {counts.least})']
        if further:
            ends.append(f"{self._comma} {further} {last}::incr({_COUNT}) %if lt({_COUNT}, {counts.most})")
        self._rules[number + len(members)] = f"{last}::_: {' | '.join(ends)}"
        for at, member in enumerate(members):
            if needed[at]:
                options = [f"{self._comma} {member} {names[at + 1]}::incr({_COUNT})"]
            else:
                room, still = counts.most - sum(needed[at:]), counts.least - counts.after(at)
                options = [
                    f"{self._comma} {member} {names[at + 1]}::incr({_COUNT}) %if lt({_COUNT}, {max(0, room)})",
                    f"{names[at + 1]}::_ %if ge({_COUNT}, {max(0, still)})",
                ]
            self._rules[number + at] = f"{names[at]}::_: {' | '.join(options)}"
        starts = []
        for at, member in enumerate(members):
            if needed[at] or counts.most > sum(needed[at:]):
                starts.append(f"{member} {names[at + 1]}::0x1")
            if needed[at] or counts.least > counts.after(at):
                break
        else:
            starts += [f"{further} {last}::0x1"] if further and counts.most else []
            starts += ['""'] if not counts.least else []
        return f"({' | '.join(starts)})"


class _Counts:
    """How many members an object must have, and may have."""

    def __init__(self, shape: Object, needed: list[bool], has_further: bool) -> None:
        self._needed, self._has_further = needed, has_further
        num_needed, bound = sum(needed), len(needed) if not has_further else _MAX_COUNT
        if has_further and shape.least > num_needed + 1:
            raise ValueError(
                f"{_at(shape)}minProperties above {num_needed + 1} can't be held: keys without a name may come twice"
            )
        self.least = shape.least if shape.least > num_needed else 0
        self.most = bound if shape.most is None else min(shape.most, bound)
        self.matter = bool(self.least) or self.most < bound

    def after(self, at: int) -> int:
        """Return how many members may follow one."""
        return _MAX_COUNT if self._has_further else len(self._needed) - at - 1


def _at(shape: Object) -> str:
    return f"{shape.where}." if shape.where else ""


def _scalar(shape: Shape) -> str:
    """Return the terminal of a value that is no list and no object."""
    match shape:
        case Null():
            return "/null/"
        case Boolean(values):
            return f"/{'|'.join(json.dumps(value) for value in sorted(values, reverse=True))}/"
        case Number():
            return f"/{shape.regex}/"
        case Text(values=None):
            found = [f"/{patterns.json_text(pattern)}/" for pattern in shape.patterns]
            if not found or shape.least or shape.most is not None:
                found.append(_text(shape.least, shape.most))
            return f"({' & '.join(found)})" if len(found) > 1 else found[0]
        case Text():
            texts = (patterns.json_text(patterns.literal(value)) for value in shape.values or ())
            return f"/{'|'.join(texts)}/"
    raise AssertionError(f"{shape} is no scalar")


def _text(least: int, most: int | None) -> str:
    """Return the terminal of a text of `least` to `most` characters; None is no limit."""
    return f"/{patterns.json_text(patterns.Repeat(patterns.ANY_TEXT.node, least, most))}/"


def _multiples(shape: Number, multiple: Fraction) -> str:
    """Return the expression of the multiples of a number within bounds."""
    place = f"{shape.where}.multipleOf" if shape.where else "multipleOf"
    schema: dict[str, Any] = {"type": "integer" if shape.integer else "number"}
    digits = 0
    while (multiple * 10**digits).denominator != 1 and digits < 10:
        digits += 1
    if (multiple * 10**digits).denominator != 1 or multiple * 10**digits > _MAX_MULTIPLE:
        raise ValueError(f"{place}: multiples of {multiple} can't be held")
    schema["multipleOf"] = int(multiple) if not digits else float(multiple)
    for name, end in (("minimum", shape.low), ("maximum", shape.high)):
        if end is not None:
            schema[name] = _nearest_multiple(end, multiple, 1 if name == "minimum" else -1)
            if abs(schema[name]) > _MAX_EXACT:
                raise ValueError(f"{place}: multiples can't be held beyond {_MAX_EXACT}")
    if "minimum" in schema and "maximum" in schema and schema["minimum"] > schema["maximum"]:
        raise ValueError(f"{place}: no value matches")
    return f"%json {json.dumps({**schema, 'x-guidance': {'whitespace_flexible': False}})}"


def _nearest_multiple(end: Bound, multiple: Fraction, direction: int) -> int | float:
    """Return the multiple nearest to an end of a range, and within it."""
    count = direction * -(-direction * Fraction(end.value) // multiple)
    if end.open and count * multiple == Fraction(end.value):
        count += direction
    value = count * multiple
    return int(value) if value.denominator == 1 else float(value)


def _times(item: str, least: int, most: int | None) -> str:
    """Return an expression of `least` to `most` items; None is no limit."""
    if most == 0:
        return ""
    return f"({item})*" if not least and most is None else f"({item}){{{least},{'' if most is None else most}}}"


def _any(options: Sequence[str]) -> str:
    return options[0] if len(options) == 1 else f"({' | '.join(options)})" if options else ""


def _escaped(pattern: str) -> str:
    """Return a regular expression with no slash that would end it in Lark."""
    return re.sub(r"\\.|/", lambda found: r"\/" if found[0] == "/" else found[0], pattern, flags=re.DOTALL)


def _one_line(text: str) -> str:
    return " ".join(text.split()) or "the schema"


def _place(schema: Schema) -> str:
    return next((place for shape in schema if (place := getattr(shape, "where", ""))), "")
