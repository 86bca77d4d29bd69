"""Reads integers and fields of messages, whole and truncated."""

from __future__ import annotations

import pytest

from pallas_kernels.gpu_code.wire import MessageField, UnreadableError, fields, take, varint

# 150 in field 1, "hi" in field 2, four bytes in field 3, eight in field 4.
MESSAGE = bytes.fromhex("089601 12026869 1d01020304 210102030405060708")


def test_an_integer_comes_with_its_end() -> None:
    assert varint(MESSAGE, 1) == (150, 3)


def test_fields_have_their_offsets() -> None:
    integer, *others = fields(MESSAGE, 0, len(MESSAGE))
    assert integer == MessageField(1, 1, 3, 150)
    assert [MESSAGE[one.start : one.end] for one in others] == [b"hi", MESSAGE[8:12], MESSAGE[13:21]]
    assert [one.number for one in others] == [2, 3, 4]


@pytest.mark.parametrize("end", [1, 2, 4, 5, 6, 9, 15])
def test_a_truncated_message_is_refused(end: int) -> None:
    with pytest.raises(UnreadableError):
        list(fields(MESSAGE[:end], 0, end))


@pytest.mark.parametrize("data", ["0b", "0001", "80" * 11], ids=["group", "field 0", "endless"])
def test_bytes_that_are_no_message_are_refused(data: str) -> None:
    with pytest.raises(UnreadableError):
        list(fields(bytes.fromhex(data), 0, len(data) // 2))


def test_taking_more_bytes_than_there_are_is_an_error() -> None:
    assert take(b"abc", 1, 2) == b"bc"
    with pytest.raises(UnreadableError, match="ends at byte 3, before 3 bytes at 1"):
        take(b"abc", 1, 3)
