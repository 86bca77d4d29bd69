"""Reads Riegeli files (https://github.com/google/riegeli/blob/master/doc/riegeli_records_file_format.md).

It reads only the forms that XLA writes: chunks of simple records, packed with Snappy or not at all. Checksums are not
verified.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

from pallas_kernels.gpu_code.wire import UnreadableError, take, varint

SIGNATURE = bytes.fromhex("83af70d10d884a3f")

# Each block of a file begins with a header that says which chunk it belongs to.
_BLOCK_BYTES = 2**16
_BLOCK_HEADER_BYTES = 24
# Checksum, bytes of data, their checksum, type (one byte) and number of records, bytes of the records.
_CHUNK_HEADER = struct.Struct("<5Q")
_WITHOUT_RECORDS = {"s", "m", "p"}  # signature, metadata, padding
# The most bytes that one byte of a Snappy block can become: a copy of 64 bytes takes 3.
_SNAPPY_RATIO = 22


def records(data: bytes) -> Iterator[bytes]:
    """Yield the records of a file. Raises `UnreadableError`."""
    if not data.startswith(SIGNATURE):
        raise UnreadableError("it doesn't begin as a Riegeli file does")
    blocks = range(0, len(data), _BLOCK_BYTES)
    chunks = b"".join(data[at + _BLOCK_HEADER_BYTES : at + _BLOCK_BYTES] for at in blocks)
    at = 0
    while at < len(chunks):
        _, size, _, type_and_count, _ = _CHUNK_HEADER.unpack(take(chunks, at, _CHUNK_HEADER.size))
        chunk_type, count = chr(type_and_count & 0xFF), type_and_count >> 8
        at += _CHUNK_HEADER.size
        if chunk_type == "r":
            yield from _simple_records(take(chunks, at, size), count)
        elif chunk_type not in _WITHOUT_RECORDS:
            raise UnreadableError(f"a Riegeli chunk of type {chunk_type!r}")
        at += size


def _simple_records(data: bytes, count: int) -> Iterator[bytes]:
    packing = take(data, 0, 1)
    size, at = varint(data, 1)
    sizes, values = _decompressed(packing, take(data, at, size)), _decompressed(packing, data[at + size :])
    at = start = 0
    for _ in range(count):
        size, at = varint(sizes, at)
        yield take(values, start, size)
        start += size
    if (at, start) != (len(sizes), len(values)):
        raise UnreadableError(f"{count} records fill {start} of {len(values)} bytes")


def _decompressed(packing: bytes, data: bytes) -> bytes:
    if packing == b"\0":
        return data
    if packing != b"s":
        raise UnreadableError(f"Riegeli records packed with {packing!r}")
    import cramjam

    size, at = varint(data, 0)
    unpacked_size, _ = varint(data, at)
    # The library allocates as many bytes as a block claims to unpack to.
    if unpacked_size != size or size > _SNAPPY_RATIO * len(data):
        raise UnreadableError(f"a Snappy block of {len(data)} bytes says {unpacked_size} for Riegeli records of {size}")
    try:
        return bytes(cramjam.snappy.decompress_raw(data[at:]))
    except cramjam.DecompressionError as error:
        raise UnreadableError(f"a Snappy block is damaged: {error}") from error
