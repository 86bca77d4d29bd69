from __future__ import annotations

import asyncio
import io

import pytest

from jaxserve.framing import FrameFormat, read_exactly

FRAMES = FrameFormat(num_kinds=2, max_bytes=1000)
MESSAGES = [(0, b""), (1, b"a"), (0, bytes(1000))]
STREAM = b"".join(FRAMES.encode(body, kind) for kind, body in MESSAGES)


class Dribble(io.BytesIO):
    """Returns at most three bytes at a time, as a pipe may."""

    def read(self, size: int | None = -1) -> bytes:
        return super().read(min(size or 0, 3))


def test_every_reader_returns_the_messages() -> None:
    stream = Dribble(STREAM)
    assert [FRAMES.read(stream.read) for _ in MESSAGES] == MESSAGES
    with pytest.raises(EOFError):
        FRAMES.read(stream.read)

    async def read_all() -> list[tuple[int, bytes]]:
        reader = asyncio.StreamReader()
        reader.feed_data(STREAM)
        reader.feed_eof()
        found = [await FRAMES.read_from(reader) for _ in MESSAGES]
        with pytest.raises(EOFError):
            await FRAMES.read_from(reader)
        return found

    assert asyncio.run(read_all()) == MESSAGES


def test_frames_are_taken_from_a_buffer_once_they_are_complete() -> None:
    received, found = bytearray(), []
    for number in range(len(STREAM)):
        received += STREAM[number : number + 1]
        while (frame := FRAMES.take(received)) is not None:
            found.append(frame)
    assert found == MESSAGES
    assert not received


@pytest.mark.parametrize(
    ("frame", "says"),
    [
        (FRAMES.encode(b"", 2), "unknown kind 2"),
        (FRAMES.encode(bytes(1001)), "1001 bytes, more than the limit of 1000"),
    ],
)
def test_a_frame_of_another_format_is_refused_by_its_header(frame: bytes, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        FRAMES.read(io.BytesIO(frame).read)
    with pytest.raises(ValueError, match=says):
        FRAMES.take(bytearray(frame[:5]))


def test_an_input_that_ends_early_is_an_error() -> None:
    assert read_exactly(Dribble(b"12345").read, 5) == b"12345"
    with pytest.raises(EOFError, match="2 bytes early"):
        read_exactly(Dribble(b"12345").read, 7)
