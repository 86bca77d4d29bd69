"""Finds the values that shapes of JSON have in common, and whether there are any."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from fractions import Fraction

from jaxserve.text.grammars import patterns
from jaxserve.text.grammars.json_shapes import (
    ANY,
    ANY_KEYS,
    ANY_SHAPES,
    NEVER,
    Boolean,
    List,
    Null,
    Number,
    Object,
    Ref,
    Schema,
    Shape,
    Text,
)
from jaxserve.text.grammars.numbers import Bound, integer_ends
from jaxserve.text.grammars.patterns import Node

# The most values that are listed one by one, shapes of one schema, and patterns of keys in an object.
MAX_LISTED = 64
_MAX_SHAPES = 4096
_MAX_PATTERNS = 5
_MAX_DEPTH = 60


class Algebra:
    """Intersects schemas and finds out whether anything matches them. `look_up` returns the shapes of a `Ref`."""

    def __init__(self, look_up: Callable[[Ref], Schema]) -> None:
        self._look_up = look_up
        self._depth = 0
        self._matched: set[Ref] = set(ANY)  # type: ignore[arg-type]
        self._open_refs: list[Ref] = []
        self._not_empty: dict[int, Shape] = {}

    def shapes(self, schema: Schema) -> Schema:
        """Return the shapes of a schema without references."""
        found: list[Shape] = []
        for shape in schema:
            if isinstance(shape, Ref):
                self._enter()
                found += ANY_SHAPES if (shape,) == ANY else self.shapes(self._look_up(shape))
                self._depth -= 1
            else:
                found.append(shape)
        return tuple(found)

    def _enter(self) -> None:
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise ValueError("schemas that refer to each other without end, beside other keywords, are not supported")

    def both(self, one: Schema, other: Schema) -> Schema:
        """Return the schema of the values that match both. Raises `ValueError` if that takes too many shapes."""
        if one == other or other == ANY:
            return one
        if one == ANY:
            return other
        self._enter()
        found: list[Shape] = []
        for left, right in itertools.product(self.shapes(one), self.shapes(other)):
            if type(left) is type(right):
                found += self._both(left, right)
            if len(found) > _MAX_SHAPES:
                raise ValueError(f"its combinations have more than {_MAX_SHAPES} alternatives")
        self._depth -= 1
        return tuple(found)

    def _both(self, one: Shape, other: Shape) -> Schema:
        """Return the shape of the values that match two shapes of one type, or nothing."""
        match one, other:
            case Boolean(), Boolean():
                values = one.values & other.values
                return (Boolean(values),) if values else NEVER
            case Number(), Number():
                low = max(filter(None, (one.low, other.low)), default=None)
                high = min(
                    filter(None, (one.high, other.high)), key=lambda end: (end.value, not end.open), default=None
                )
                multiple = _common_multiple(one.multiple, other.multiple)
                return (Number(one.integer or other.integer, low, high, multiple, one.where or other.where),)
            case Text(), Text():
                return _both_texts(one, other)
            case List(), List():
                size = max(len(one.prefix), len(other.prefix))
                return (
                    List(
                        tuple(self.both(one.item(index), other.item(index)) for index in range(size)),
                        self.both(one.items, other.items),
                        max(one.least, other.least),
                        _least_of(one.most, other.most),
                        one.unique or other.unique,
                        one.where or other.where,
                    ),
                )
            case Object(), Object():
                return (self._both_objects(one, other),)
        return (one,)

    def _both_objects(self, one: Object, other: Object) -> Object:
        left, right = dict(one.properties), dict(other.properties)
        properties = {
            name: self.both(
                left[name] if name in left else self.value_of(one, name),
                right[name] if name in right else self.value_of(other, name),
            )
            for name in left | right
        }
        return Object(
            tuple(properties.items()),
            tuple(dict.fromkeys(keys for keys in (*one.open, *other.open) if keys != ANY_KEYS)) or (ANY_KEYS,),
            tuple(dict.fromkeys((*one.required, *other.required))),
            max(one.least, other.least),
            _least_of(one.most, other.most),
            (*one.names, *other.names),
            one.where or other.where,
        )

    def value_of(self, shape: Object, name: str) -> Schema:
        """Return the schema of the value of a key that is none of the object's properties."""
        found = ANY
        for keys in shape.open:
            matching = [schema for pattern, schema in keys.patterns if patterns.matches(pattern, name)]
            for schema in matching or [keys.others]:
                found = self.both(found, schema)
        return found

    def is_empty(self, schema: Schema) -> bool:
        """Return whether no value matches, as far as that is known without the patterns of texts."""
        return all(self._is_empty(shape) for shape in schema)

    def _is_empty(self, shape: Shape) -> bool:
        if id(shape) in self._not_empty:
            return False
        empty = self._find_empty(shape)
        if not empty:
            self._not_empty[id(shape)] = shape
        return empty

    def _find_empty(self, shape: Shape) -> bool:
        match shape:
            case Number():
                return not shape.regex
            case Text():
                return shape.values == () or (shape.most is not None and shape.least > shape.most)
            case List():
                return self.most_items(shape) is not None and shape.least > (self.most_items(shape) or 0)
            case Object():
                named = self.named(shape)
                missing = set(shape.required) - {name for name, _ in named}
                closed = not self.has_open_keys(shape)
                least = max(shape.least, len(shape.required))
                return (
                    bool(missing) or (closed and least > len(named)) or (shape.most is not None and least > shape.most)
                )
            case Ref():
                return self._is_empty_ref(shape)
        return False

    def _is_empty_ref(self, ref: Ref) -> bool:
        if ref in self._matched:
            return False
        if ref in self._open_refs:  # a value within itself, without end
            return True
        self._open_refs.append(ref)
        empty = self.is_empty(self._look_up(ref))
        self._open_refs.pop()
        if not empty:
            self._matched.add(ref)
        return empty

    def most_items(self, shape: List) -> int | None:
        """Return how many items a list can have, None without a bound."""
        most = shape.most
        for index in range(len(shape.prefix) + 1):
            if (most is None or index < most) and self.is_empty(shape.item(index)):
                most = index
        values = self.listed(shape.items) if shape.unique and not shape.prefix else None
        return most if values is None else _least_of(most, len(values))

    def known_keys(self, shape: Object) -> dict[str, Schema]:
        """Return the keys that are named, or that patterns with few texts match, with the schemas of their values."""
        found = dict(shape.properties)
        for name in self._few_names(shape):
            if name not in found:
                found[name] = self.value_of(shape, name)
        return found

    def named(self, shape: Object) -> list[tuple[str, Schema]]:
        """Return the known keys that an object may have."""
        return [
            (name, schema)
            for name, schema in self.known_keys(shape).items()
            if all(one.allows(name) for one in shape.names) and not self.is_empty(schema)
        ]

    def _few_names(self, shape: Object) -> Iterator[str]:
        for text in shape.names:
            yield from text.values or ()
        for keys in shape.open:
            for pattern, _ in keys.patterns:
                yield from sorted(patterns.texts(pattern, MAX_LISTED) or ())

    def has_open_keys(self, shape: Object) -> bool:
        """Return whether an object may have keys that `named` doesn't list."""
        return any(True for _ in self.open_keys(shape))

    def open_keys(self, shape: Object) -> Iterator[tuple[list[Node], list[Node], Schema]]:
        """Yield each kind of other keys: the patterns it matches, those it doesn't, and the schema of its values."""
        if any(one.values is not None or self._is_empty(one) for one in shape.names):
            return
        infinite = [
            pattern
            for keys in shape.open
            for pattern, _ in keys.patterns
            if patterns.texts(pattern, MAX_LISTED) is None
        ]
        infinite = list(dict.fromkeys(infinite))
        if len(infinite) > _MAX_PATTERNS:
            raise ValueError(f"{shape.where}.patternProperties: more than {_MAX_PATTERNS} patterns are not supported")
        for chosen in itertools.product((True, False), repeat=len(infinite)):
            matched = [pattern for pattern, is_matched in zip(infinite, chosen) if is_matched]
            value = ANY
            for keys in shape.open:
                schemas = [schema for pattern, schema in keys.patterns if pattern in matched]
                for schema in schemas or [keys.others]:
                    value = self.both(value, schema)
            if not self.is_empty(value):
                yield matched, [pattern for pattern in infinite if pattern not in matched], value

    def listed(self, schema: Schema) -> list[str] | None:
        """Return a regular expression of each value that matches, or None if there are many or not only scalars."""
        found: dict[str, None] = {}
        for shape in self.shapes(schema):
            match shape:
                case Null():
                    some = ["null"]
                case Boolean():
                    some = ["true"] * (True in shape.values) + ["false"] * (False in shape.values)
                case Text(values=tuple()):
                    some = [patterns.json_text(patterns.literal(value)) for value in shape.values or ()]
                case Number(multiple=None, low=Bound() as low, high=Bound() as high):
                    least, most = integer_ends(low, high)
                    if low == high:
                        some = [shape.regex] if shape.regex else []
                    elif not shape.integer or least is None or most is None or most - least > MAX_LISTED:
                        return None
                    else:
                        some = [str(one) for one in range(least, most + 1)]
                case _:
                    return None
            found.update(dict.fromkeys(some))
        return [*found] if len(found) <= MAX_LISTED else None

    def are_disjoint(self, one: Schema, other: Schema, depth: int = 0) -> bool:
        """Return whether it is sure that no value matches both."""
        if depth > _MAX_DEPTH // 10 or ANY in (one, other):
            return False
        return all(
            type(left) is not type(right) or self._are_disjoint(left, right, depth + 1)
            for left, right in itertools.product(self.shapes(one), self.shapes(other))
        )

    def _are_disjoint(self, one: Shape, other: Shape, depth: int) -> bool:
        match one, other:
            case List(), List():
                least = min(one.least, other.least)
                return any(self.are_disjoint(one.item(index), other.item(index), depth) for index in range(least)) or (
                    one.least > (math.inf if other.most is None else other.most)
                    or other.least > (math.inf if one.most is None else one.most)
                )
            case Object(), Object():
                left, right = dict(one.properties), dict(other.properties)
                return any(
                    self.are_disjoint(
                        left[name] if name in left else self.value_of(one, name),
                        right[name] if name in right else self.value_of(other, name),
                        depth,
                    )
                    for name in dict.fromkeys((*one.required, *other.required))
                )
        return self.is_empty(self._both(one, other))


def _both_texts(one: Text, other: Text) -> Schema:
    if one.values is None:
        one, other = other, one
    if one.values is not None:
        values = tuple(value for value in one.values if other.allows(value))
        return (replace(one, values=values),) if values else NEVER
    return (
        Text(
            max(one.least, other.least),
            _least_of(one.most, other.most),
            tuple(dict.fromkeys((*one.patterns, *other.patterns))),
            None,
            one.where or other.where,
        ),
    )


def _least_of(one: int | None, other: int | None) -> int | None:
    return min((most for most in (one, other) if most is not None), default=None)


def _common_multiple(one: Fraction | None, other: Fraction | None) -> Fraction | None:
    if one is None or other is None:
        return one or other
    return Fraction(math.lcm(one.numerator, other.numerator), math.gcd(one.denominator, other.denominator))
