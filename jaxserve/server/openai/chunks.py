"""The constant parts of a stream's chunks, encoded once, so that a token costs one small encode and two joins.

Owns bytes; knows the outer shape that completions and chat share, not their choices.
"""

from __future__ import annotations

from typing import Any

import msgspec

from jaxserve.server.openai.responses import UsageInfo

encode = msgspec.json.Encoder().encode


class Chunks:
    """Builds the `data: …` lines of one response. `before` and `after` stand around a choice's text in JSON."""

    def __init__(self, head: dict[str, Any], *, num_choices: int, before: str, after: str, include_usage: bool) -> None:
        opening = b"data: " + encode(head)[:-1]
        self._opening = opening + b',"choices":['
        self._closing = b'],"usage":null}\n\n' if include_usage else b"]}\n\n"
        self._before = [
            self._opening + b'{"index":' + str(index).encode() + b"," + before.encode() for index in range(num_choices)
        ]
        self._after = after.encode() + b"}" + self._closing
        self._usage = opening + b',"choices":[],"usage":'

    def text(self, index: int, text: str) -> bytes:
        """A chunk that brings text and nothing else."""
        return self._before[index] + encode(text) + self._after

    def choice(self, choice: Any) -> bytes:
        """A chunk with a choice of any shape."""
        return self._opening + encode(choice) + self._closing

    def usage(self, usage: UsageInfo) -> bytes:
        """The chunk with the token counts and no choices."""
        return self._usage + encode(usage) + b"}\n\n"
