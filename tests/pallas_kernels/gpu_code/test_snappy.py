"""Blocks written by hand, after the description of the format."""

from __future__ import annotations

import pytest

from pallas_kernels.gpu_code.snappy import unpack
from pallas_kernels.gpu_code.wire import UnreadableError

LONG = bytes(range(256)) * 2
BLOCKS = {
    "literal": (b"\x03\x08abc", b"abc"),
    "literal, its length in one byte": (b"\x50\xf0\x4f" + LONG[:80], LONG[:80]),
    "literal, its length in two bytes": (b"\x80\x04\xf4\xff\x01" + LONG, LONG),
    # A byte of offset: 4 + 1 bytes from 3 back, which run into what they write.
    "copy that overlaps": (b"\x08\x08abc\x05\x03", b"abcabcab"),
    "copy, its offset in two bytes": (b"\x06\x08abc\x0a\x03\x00", b"abcabc"),
    "copy, its offset in four bytes": (b"\x06\x08abc\x0b\x03\x00\x00\x00", b"abcabc"),
    # Its offset has three more bits in the tag: 300 = 1 * 256 + 44.
    "copy from afar": (b"\x84\x04\xf4\xff\x01" + LONG + b"\x21\x2c", LONG + LONG[212:216]),
    "nothing": (b"\x00", b""),
}


@pytest.mark.parametrize(("packed", "data"), BLOCKS.values(), ids=BLOCKS)
def test_a_block_is_unpacked(packed: bytes, data: bytes) -> None:
    assert unpack(packed) == data


@pytest.mark.parametrize("packed", [packed for packed, _ in BLOCKS.values()], ids=BLOCKS)
def test_a_block_that_is_cut_short_is_refused(packed: bytes) -> None:
    for end in range(len(packed)):
        with pytest.raises(UnreadableError):
            unpack(packed[:end])


@pytest.mark.parametrize("packed", [b"\x06\x08abc\x0a\x04\x00", b"\x06\x08abc\x0a\x00\x00"], ids=["before", "itself"])
def test_a_copy_of_what_is_not_there_is_refused(packed: bytes) -> None:
    with pytest.raises(UnreadableError, match="where 3 are unpacked"):
        unpack(packed)


def test_a_block_of_another_length_than_it_says_is_refused() -> None:
    with pytest.raises(UnreadableError, match="3 bytes came out of a Snappy block of 4"):
        unpack(b"\x04\x08abc")
