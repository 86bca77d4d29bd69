"""Extreme values of every numeric field of a struct: ends of its range and what lies beside them, and what float32 has
no number for."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import msgspec.inspect as types

FLOATS = (0.0, 5e-324, 1e-45, 1e-40, 1.2e-38, 1e-10, 0.01, 1e38, 1e308)
INTS = (0, -1, 1, 2**31 - 1, 2**31, -(2**31), 2**63 - 1, 2**63, -(2**63), 2**64, 10**30)


def extremes(struct: type) -> Iterator[tuple[str, Any]]:
    """Yield the name of each numeric field with each extreme value, in the field's form."""
    found = types.type_info(struct)
    assert isinstance(found, types.StructType)
    for field in found.fields:
        for value in dict.fromkeys(map(_Value, _values(field.type))):
            yield field.encode_name, value.value


class _Value:
    """A value that differs from those of other types and signs: 0, 0.0 and -0.0 are not the same."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __hash__(self) -> int:
        return hash(repr(self.value))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Value) and repr(self.value) == repr(other.value)


def _values(kind: Any) -> Iterator[Any]:
    match kind:
        case types.Metadata():
            yield from _values(kind.type)
        case types.UnionType():
            for each in kind.types:
                yield from _values(each)
        case types.DictType(value_type=value) if isinstance(value, types.FloatType | types.Metadata):
            key = 3 if isinstance(kind.key_type, types.IntType) else "3"
            yield from ({key: one} for one in _values(value))
        case types.FloatType():
            ends = [float(end) for end in (kind.ge, kind.gt, kind.le, kind.lt) if end is not None]
            yield from (sign * one for one in FLOATS for sign in (1, -1))
            for end in ends:
                yield from (end, *(math.nextafter(end, side) for side in (-math.inf, math.inf)))
        case types.IntType():
            yield from INTS
            yield from (end + step for end in (kind.ge, kind.le) if end is not None for step in (-1, 0, 1))
