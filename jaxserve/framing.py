"""Frames: they separate messages in the byte stream of a pipe or a socket between two processes."""

from __future__ import annotations

import asyncio
import dataclasses
import struct
from collections.abc import Callable

# The kind of the frame and the length of its body.
_HEADER = struct.Struct("<BI")


@dataclasses.dataclass(frozen=True)
class FrameFormat:
    """Frames with kinds from 0 to `num_kinds - 1` and bodies of at most `max_bytes`. Reading any other frame raises
    `ValueError`; the end of the input before the end of a frame raises `EOFError`."""

    num_kinds: int = 1
    max_bytes: int = (1 << 32) - 1

    def encode(self, body: bytes, kind: int = 0) -> bytes:
        """Return the frame with this body."""
        return _HEADER.pack(kind, len(body)) + body

    def read(self, read: Callable[[int], bytes]) -> tuple[int, bytes]:
        """Return the kind and body of the next frame. `read(n)` waits for 1 to `n` bytes; it returns b"" at the end."""
        kind, size = self._unpack_header(read_exactly(read, _HEADER.size))
        return kind, read_exactly(read, size)

    async def read_from(self, stream: asyncio.StreamReader) -> tuple[int, bytes]:
        """Return the kind and body of the next frame of an asyncio stream."""
        kind, size = self._unpack_header(await stream.readexactly(_HEADER.size))
        return kind, await stream.readexactly(size)

    def take(self, received: bytearray) -> tuple[int, bytes] | None:
        """Remove the first frame from `received` and return its kind and body, or None while it is incomplete."""
        if len(received) < _HEADER.size:
            return None
        kind, size = self._unpack_header(received)
        end = _HEADER.size + size
        if len(received) < end:
            return None
        body = bytes(memoryview(received)[_HEADER.size : end])
        del received[:end]
        return kind, body

    def _unpack_header(self, data: bytes | bytearray) -> tuple[int, int]:
        kind, size = _HEADER.unpack_from(data)
        if kind >= self.num_kinds:
            raise ValueError(f"a message of the unknown kind {kind}")
        if size > self.max_bytes:
            raise ValueError(f"a message of {size} bytes, more than the limit of {self.max_bytes}")
        return kind, size


def read_exactly(read: Callable[[int], bytes], size: int) -> bytes:
    """Return `size` bytes from repeated calls of `read`. Raises `EOFError` when the input ends before them."""
    data = b""
    while len(data) < size:
        part = read(size - len(data))
        if not part:
            raise EOFError(f"the input ended {size - len(data)} bytes early")
        data = data + part if data else part
    return data
