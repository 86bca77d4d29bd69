"""Encodes the chunks of a stream; constant parts are encoded once, so a token costs one small encode and two joins.

Knows the outer shape that completions and chat share, but not the shape of their choices.
"""

from __future__ import annotations

from typing import Any

import msgspec

from jaxserve.server.generation.responder import ResponseChoice, TotalUsage
from jaxserve.server.http.sse import DONE
from jaxserve.server.openai.protocol import OpenAIFields
from jaxserve.server.openai.responses import usage_info

_encode = msgspec.json.Encoder().encode


class ChunkEncoder:
    """Encodes the `data: …` lines of the response to `request`.

    `before` and `after` are the JSON around a choice's text. With `continuous_usage_stats`, every chunk has the token
    counts of its choice so far.
    """

    def __init__(
        self, request: OpenAIFields, head: dict[str, Any], *, kind: str, num_choices: int, before: str, after: str
    ) -> None:
        named = {"id": head["id"], "object": kind, **head, "system_fingerprint": None}
        opening = b"data: " + _encode(named)[:-1]
        self._include_usage = request.include_usage
        self._continuous_usage = request.continuous_usage
        self._opening = opening + b',"choices":['
        self._closing = b'],"usage":null}\n\n' if request.include_usage else b"]}\n\n"
        self._before = [self._opening + f'{{"index":{index},{before}'.encode() for index in range(num_choices)]
        self._after = after.encode() + b"}"
        self._usage = opening + b',"choices":[],"usage":'

    def text_chunk(self, choice: ResponseChoice, text: str) -> bytes:
        """Return a chunk with text only."""
        return self._before[choice.index] + _encode(text) + self._after + self._end(choice)

    def choice_chunk(self, choice: ResponseChoice, shaped: Any, *, with_prompt: bool = False) -> bytes:
        """Return a chunk with a choice of any shape and, outside the choice, the ids of its prompt."""
        if not with_prompt:
            return self._opening + _encode(shaped) + self._end(choice)
        ids = b'],"prompt_token_ids":' + _encode(choice.prompt_ids)
        return self._opening + _encode(shaped) + ids + self._end(choice).removeprefix(b"]")

    def last_chunks(self, usage: TotalUsage) -> bytes:
        """Return the end of a stream: the chunk with the token counts and no choices, if it is asked for."""
        return (self._usage + _encode(usage_info(usage)) + b"}\n\n" if self._include_usage else b"") + DONE

    def _end(self, choice: ResponseChoice) -> bytes:
        if not self._continuous_usage:
            return self._closing
        prompt, output = len(choice.prompt_ids), choice.num_tokens
        usage = {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}
        return b'],"usage":' + _encode(usage) + b"}\n\n"
