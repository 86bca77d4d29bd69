"""Bytes that somebody else wrote: pieces, integers, and the fields of a protobuf message."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

_FIXED = {1: 8, 5: 4}  # bytes of a field, by wire type


class UnreadableError(ValueError):
    """Bytes that aren't what they should be, or are it in a form that isn't known here; says which."""


class Field(NamedTuple):
    """A field of a message: where its bytes stand, or what its integer is."""

    number: int
    start: int
    end: int
    value: int | None = None


def take(data: bytes, at: int, size: int) -> bytes:
    """So many bytes. Raises `UnreadableError` where there are fewer."""
    if at + size > len(data):
        raise UnreadableError(f"it ends at byte {len(data)}, before {size} bytes at {at}")
    return data[at : at + size]


def varint(data: bytes, at: int) -> tuple[int, int]:
    """An integer of 7 bits a byte, and where it ends. Raises `UnreadableError` where it doesn't."""
    value = 0
    for shift, byte in enumerate(data[at : at + 10]):
        value |= (byte & 127) << 7 * shift
        if byte < 128:
            return value, at + shift + 1
    raise UnreadableError(f"an integer at byte {at} of {len(data)} has no end")


def fields(data: bytes, start: int, end: int) -> Iterator[Field]:
    """The fields of the message that stands there. Raises `UnreadableError` where none does."""
    at = start
    while at < end:
        key, at = varint(data, at)
        number, wire_type = key >> 3, key & 7
        if wire_type == 0:
            value, after = varint(data, at)
            field = Field(number, at, after, value)
        elif wire_type == 2:
            size, at = varint(data, at)
            field = Field(number, at, at + size)
        elif wire_type in _FIXED:
            field = Field(number, at, at + _FIXED[wire_type])
        else:
            raise UnreadableError(f"a field of wire type {wire_type}")
        if number == 0 or field.end > end:
            raise UnreadableError(f"field {number} of a message ends at byte {field.end} of {end}")
        yield field
        at = field.end
