"""JSON schemas as sets of shapes: a value matches a schema if it matches one of its shapes, each of one JSON type.

`json_schema` reads them, `json_algebra` intersects them, `json_grammar` writes them.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from fractions import Fraction

from jaxserve.text.grammars import patterns
from jaxserve.text.grammars.numbers import Bound, integer_regex, number_regex
from jaxserve.text.grammars.patterns import Node


@dataclass(frozen=True)
class Null:
    """null."""


@dataclass(frozen=True)
class Boolean:
    """One of some truth values."""

    values: frozenset[bool] = frozenset((True, False))


@dataclass(frozen=True)
class Number:
    """A number within bounds, perhaps an integer, perhaps a multiple of another one."""

    integer: bool = False
    low: Bound | None = None
    high: Bound | None = None
    multiple: Fraction | None = None
    where: str = field(default="", compare=False)

    @functools.cached_property
    def regex(self) -> str:
        """The expression of the numbers within the bounds, "" if there are none."""
        return (integer_regex if self.integer else number_regex)(self.low, self.high)


@dataclass(frozen=True)
class Text:
    """A text of `least` to `most` characters that matches all patterns; if `values` aren't None, one of them."""

    least: int = 0
    most: int | None = None
    patterns: tuple[Node, ...] = ()
    values: tuple[str, ...] | None = None
    where: str = field(default="", compare=False)

    def allows(self, text: str) -> bool:
        """Return whether a text matches."""
        return (
            self.least <= len(text) <= (len(text) if self.most is None else self.most)
            and (self.values is None or text in self.values)
            and all(patterns.matches(pattern, text) for pattern in self.patterns)
        )


@dataclass(frozen=True)
class LarkText:
    """A text in a grammar in Lark. It goes with no other shape."""

    definition: str
    where: str = field(default="", compare=False)


@dataclass(frozen=True)
class List:
    """A list of `least` to `most` items: the first match `prefix` one by one, the others `items`."""

    prefix: tuple[Schema, ...]
    items: Schema
    least: int = 0
    most: int | None = None
    unique: bool = False
    where: str = field(default="", compare=False)

    def item(self, index: int) -> Schema:
        """Return what the item at an index must match."""
        return self.prefix[index] if index < len(self.prefix) else self.items


@dataclass(frozen=True)
class OpenKeys:
    """The schemas of values whose keys no property names: those of all patterns that the key matches, else `others`."""

    patterns: tuple[tuple[Node, Schema], ...]
    others: Schema


@dataclass(frozen=True)
class Object:
    """An object of `least` to `most` keys. `properties` says all that is asked of their values, `open` of the others.

    Every key must match all `names`.
    """

    properties: tuple[tuple[str, Schema], ...]
    open: tuple[OpenKeys, ...]
    required: tuple[str, ...] = ()
    least: int = 0
    most: int | None = None
    names: tuple[Text, ...] = ()
    where: str = field(default="", compare=False)


@dataclass(frozen=True)
class Ref:
    """The shapes of another schema, which are looked up when they are needed: schemas may contain themselves."""

    pointer: str


type Shape = Null | Boolean | Number | Text | LarkText | List | Object | Ref
type Schema = tuple[Shape, ...]

NEVER: Schema = ()
ANY: Schema = (Ref("any"),)
ANY_KEYS = OpenKeys((), ANY)
ANY_OBJECT: Schema = (Object((), (ANY_KEYS,)),)
ANY_SHAPES: Schema = (Null(), Boolean(), Number(), Text(), List((), ANY), *ANY_OBJECT)
