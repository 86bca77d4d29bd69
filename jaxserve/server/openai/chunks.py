"""The constant parts of a stream's chunks, encoded once, so that a token costs one small encode and two joins.

Owns bytes; knows the outer shape that completions and chat share, not their choices.
"""

from __future__ import annotations

from typing import Any

import msgspec

from jaxserve.server.openai.responses import UsageInfo
from jaxserve.text.output import OutputDelta

encode = msgspec.json.Encoder().encode


class Chunks:
    """Builds the `data: …` lines of one response. `before` and `after` stand around a choice's text in JSON.

    With `prompt_tokens`, of each choice, every chunk brings the counts of its choice so far, which `count` keeps.
    """

    def __init__(
        self,
        head: dict[str, Any],
        *,
        num_choices: int,
        before: str,
        after: str,
        include_usage: bool,
        prompt_tokens: list[int] | None = None,
    ) -> None:
        opening = b"data: " + encode(head)[:-1]
        self._opening = opening + b',"choices":['
        self._closing = b'],"usage":null}\n\n' if include_usage else b"]}\n\n"
        self._before = [
            self._opening + b'{"index":' + str(index).encode() + b"," + before.encode() for index in range(num_choices)
        ]
        self._after = after.encode() + b"}"
        self._prompt_tokens = prompt_tokens
        self._output_tokens = [0] * num_choices
        self._usage = opening + b',"choices":[],"usage":'

    def count(self, index: int, delta: OutputDelta) -> None:
        """What has come of a choice."""
        self._output_tokens[index] += len(delta.token_ids)
        if delta.usage is not None:
            self._output_tokens[index] = delta.usage.completion_tokens

    def text(self, index: int, text: str) -> bytes:
        """A chunk that brings text and nothing else."""
        return self._before[index] + encode(text) + self._after + self._end(index)

    def choice(self, choice: Any, prompt_ids: list[int] | None = None) -> bytes:
        """A chunk with a choice of any shape, and the ids of its prompt beside it."""
        if prompt_ids is None:
            return self._opening + encode(choice) + self._end(choice.index)
        ids = b'],"prompt_token_ids":' + encode(prompt_ids)
        return self._opening + encode(choice) + ids + self._end(choice.index).removeprefix(b"]")

    def usage(self, usage: UsageInfo) -> bytes:
        """The chunk with the token counts and no choices."""
        return self._usage + encode(usage) + b"}\n\n"

    def _end(self, index: int) -> bytes:
        if self._prompt_tokens is None:
            return self._closing
        prompt, output = self._prompt_tokens[index], self._output_tokens[index]
        usage = {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}
        return b'],"usage":' + encode(usage) + b"}\n\n"
