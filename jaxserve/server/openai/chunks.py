"""Encodes the chunks of a stream; constant parts are encoded once, so a token costs one small encode and two joins.

Knows the outer shape that completions and chat share, but not the shape of their choices.
"""

from __future__ import annotations

from typing import Any

import msgspec

from jaxserve.server.openai.responses import UsageInfo
from jaxserve.text.output import OutputDelta

_encode = msgspec.json.Encoder().encode


class ChunkEncoder:
    """Encodes the `data: …` lines of one response. `before` and `after` are the JSON around a choice's text.

    With `prompt_tokens` (one number per choice), every chunk has the token counts of its choice so far; `count_tokens`
    keeps them.
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
        opening = b"data: " + _encode(head)[:-1]
        self._opening = opening + b',"choices":['
        self._closing = b'],"usage":null}\n\n' if include_usage else b"]}\n\n"
        self._before = [
            self._opening + b'{"index":' + str(index).encode() + b"," + before.encode() for index in range(num_choices)
        ]
        self._after = after.encode() + b"}"
        self._prompt_tokens = prompt_tokens
        self._output_tokens = [0] * num_choices
        self._usage = opening + b',"choices":[],"usage":'

    def count_tokens(self, index: int, delta: OutputDelta) -> None:
        """Count the tokens of a choice's new output."""
        self._output_tokens[index] += len(delta.token_ids)
        if delta.usage is not None:
            self._output_tokens[index] = delta.usage.completion_tokens

    def text_chunk(self, index: int, text: str) -> bytes:
        """Return a chunk with text only."""
        return self._before[index] + _encode(text) + self._after + self._end(index)

    def choice_chunk(self, choice: Any, prompt_ids: list[int] | None = None) -> bytes:
        """Return a chunk with a choice of any shape and, outside the choice, the ids of its prompt."""
        if prompt_ids is None:
            return self._opening + _encode(choice) + self._end(choice.index)
        ids = b'],"prompt_token_ids":' + _encode(prompt_ids)
        return self._opening + _encode(choice) + ids + self._end(choice.index).removeprefix(b"]")

    def usage_chunk(self, usage: UsageInfo) -> bytes:
        """Return the chunk with the token counts and no choices."""
        return self._usage + _encode(usage) + b"}\n\n"

    def _end(self, index: int) -> bytes:
        if self._prompt_tokens is None:
            return self._closing
        prompt, output = self._prompt_tokens[index], self._output_tokens[index]
        usage = {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}
        return b'],"usage":' + _encode(usage) + b"}\n\n"
