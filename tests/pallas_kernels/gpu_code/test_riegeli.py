"""Reads files built by hand from the description of the format."""

from __future__ import annotations

import struct

import pytest

from pallas_kernels.gpu_code.riegeli import SIGNATURE, records
from pallas_kernels.gpu_code.wire import UnreadableError

BLOCK = 2**16


def chunk(data: bytes, *, kind: str, count: int = 0) -> bytes:
    """Return a chunk without checksums, which are not verified."""
    return struct.pack("<5Q", 0, len(data), 0, count << 8 | ord(kind), 0) + data


def simple(*records: bytes, packing: bytes = b"\0") -> bytes:
    """Return a chunk of records shorter than 61 bytes in all, so that one Snappy literal holds them."""
    parts = [bytes(map(len, records)), b"".join(records)]
    if packing == b"s":
        parts = [bytes([len(part), len(part), len(part) - 1 << 2]) + part for part in parts]
    sizes, values = parts
    return chunk(packing + bytes([len(sizes)]) + sizes + values, kind="r", count=len(records))


def file(*chunks: bytes) -> bytes:
    """Return a file of these chunks after its signature, with a header before each of its blocks."""
    data = b"".join((chunk(b"", kind="s"), *chunks))
    rest = BLOCK - 24
    blocks = [SIGNATURE.ljust(24, b"\0") + data[at : at + rest] for at in range(0, len(data), rest)]
    return b"".join(blocks)


@pytest.mark.parametrize("packing", [b"\0", b"s"])
def test_records_of_several_chunks(packing: bytes) -> None:
    data = file(chunk(b"about", kind="m"), simple(b"a", b"", b"long", packing=packing), simple(b"b"))
    assert list(records(data)) == [b"a", b"", b"long", b"b"]


def test_a_record_that_spans_several_blocks() -> None:
    record = bytes(range(256)) * 1000
    size = bytes([0x80 | len(record) & 0x7F, 0x80 | len(record) >> 7 & 0x7F, len(record) >> 14])
    [found] = records(file(chunk(b"\0\x03" + size + record, kind="r", count=1)))
    assert found == record


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "doesn't begin"),
        (b"PK\3\4", "doesn't begin"),
        (file(simple(b"a"))[:-1], "it ends at byte"),
        (file(simple(b"a")) + b"more", "it ends at byte"),
        (file(chunk(b"", kind="t")), "a Riegeli chunk of type 't'"),
        (file(chunk(b"z\x01\x01a", kind="r", count=1)), "packed with b'z'"),
        (file(chunk(b"\0\x01\x02a", kind="r", count=1)), "it ends at byte 1, before 2"),
        (file(chunk(b"\0\x01\x01ab", kind="r", count=1)), "1 records fill 1 of 2 bytes"),
        (file(chunk(b"s\x03\x02\x01\x00\x01a", kind="r", count=1)), "says 1 for Riegeli records of 2"),
        (file(chunk(b"s\x06" + b"\x80\x80\x04" * 2, kind="r", count=1)), "a Snappy block of 6 bytes says 65536"),
        (file(chunk(b"s\x04\x01\x01\x04a\x01", kind="r", count=1)), "a Snappy block is damaged"),
    ],
)
def test_damaged_and_unknown_files_are_refused(data: bytes, why: str) -> None:
    with pytest.raises(UnreadableError, match=why):
        list(records(data))
