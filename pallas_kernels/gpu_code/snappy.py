"""Unpacks a Snappy block (https://github.com/google/snappy/blob/main/format_description.txt).

In Python, as it is wanted where programs are compiled for minutes: 20 MB take a second.
"""

from __future__ import annotations

from pallas_kernels.gpu_code.wire import UnreadableError, varint

_OFFSET_BYTES = (0, 1, 2, 4)  # by the kind of a copy


def unpack(data: bytes) -> bytes:
    """What was packed. Raises `UnreadableError` for bytes that are no Snappy block."""
    size, at = varint(data, 0)
    out = bytearray()
    while at < len(data):
        tag = data[at]
        kind, length = tag & 3, (tag >> 2) + 1
        at += 1
        if kind == 0:
            if length > 60:
                more = length - 60
                length = int.from_bytes(data[at : at + more], "little") + 1
                at += more
            out += data[at : at + length]
            at += length
            continue
        offset = int.from_bytes(data[at : at + _OFFSET_BYTES[kind]], "little")
        at += _OFFSET_BYTES[kind]
        if kind == 1:
            length, offset = 4 + (tag >> 2 & 7), offset | tag >> 5 << 8
        if not 0 < offset <= len(out):
            raise UnreadableError(f"a copy from {offset} bytes back, where {len(out)} are unpacked")
        start = len(out) - offset
        if offset >= length:
            out += out[start : start + length]
        else:
            out += (out[start:] * (length // offset + 1))[:length]
    # Pieces that the end cut short show here.
    if at != len(data) or len(out) != size:
        raise UnreadableError(f"{len(out)} bytes came out of a Snappy block of {size}")
    return bytes(out)
