"""Bytes of a foreign format: slices, integers, and the fields of a protobuf message."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

_FIXED = {1: 8, 5: 4}  # bytes of a field, by wire type


class UnreadableError(ValueError):
    """Raised for bytes that are damaged, or in a form that isn't known here; the message says which."""


class MessageField(NamedTuple):
    """A field of a message: where its bytes are, and its value if it is an integer."""

    number: int
    start: int
    end: int
    value: int | None = None


def take(data: bytes, at: int, size: int) -> bytes:
    """Return `size` bytes from `at` on. Raises `UnreadableError` if there are fewer."""
    if at + size > len(data):
        raise UnreadableError(f"it ends at byte {len(data)}, before {size} bytes at {at}")
    return data[at : at + size]


def varint(data: bytes, at: int) -> tuple[int, int]:
    """Return the integer of 7 bits a byte at `at`, and where it ends. Raises `UnreadableError` if it has no end."""
    value = 0
    for shift, byte in enumerate(data[at : at + 10]):
        value |= (byte & 127) << 7 * shift
        if byte < 128:
            return value, at + shift + 1
    raise UnreadableError(f"an integer at byte {at} of {len(data)} has no end")


def fields(data: bytes, start: int, end: int) -> Iterator[MessageField]:
    """Yield the fields of the message in `data[start:end]`. Raises `UnreadableError` if there is no message."""
    at = start
    while at < end:
        key, at = varint(data, at)
        number, wire_type = key >> 3, key & 7
        if wire_type == 0:
            value, after = varint(data, at)
            field = MessageField(number, at, after, value)
        elif wire_type == 2:
            size, at = varint(data, at)
            field = MessageField(number, at, at + size)
        elif wire_type in _FIXED:
            field = MessageField(number, at, at + _FIXED[wire_type])
        else:
            raise UnreadableError(f"a field of wire type {wire_type}")
        if number == 0 or field.end > end:
            raise UnreadableError(f"field {number} of a message ends at byte {field.end} of {end}")
        yield field
        at = field.end
