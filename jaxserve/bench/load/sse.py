"""Parses server-sent events out of bytes that may be split anywhere."""

from __future__ import annotations

_ERROR_LINE = b"error:"
_DATA_LINE = b"data:"


class EventSplitter:
    """Collects bytes and returns the data of complete events; comments, names and ids are skipped.

    A line `error: …` counts as data: it is in no standard, but llama.cpp's server has sent it.
    """

    __slots__ = ("_data", "_rest")

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, body: bytes) -> list[bytes]:
        """Return the data of the events that `body` completes."""
        lines = (self._rest + body).split(b"\n") if self._rest else body.split(b"\n")
        self._rest = lines.pop()
        events: list[bytes] = []
        for line in lines:
            if line.endswith(b"\r"):
                line = line[:-1]
            if not line:
                if self._data:
                    events.append(b"\n".join(self._data))
                    self._data = []
            elif line.startswith((_DATA_LINE, _ERROR_LINE)):
                self._data.append(line.partition(b":")[2].lstrip(b" "))
        return events

    def finish(self) -> list[bytes]:
        """Return the last event after the response has ended; some servers omit the final empty line."""
        return self.feed(b"\n\n")
