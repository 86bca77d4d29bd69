"""The outer shape that completions and chat share: the head, the chunks of a stream and their end.

Constant parts are encoded once, so a token costs one small encode and two joins. Knows no shape of a choice.
"""

from __future__ import annotations

import time
from typing import Any, ClassVar

import msgspec

from jaxserve.server.generation.responder import ResponseChoice, ResponseShape, TotalUsage
from jaxserve.server.http.sse import DONE
from jaxserve.server.openai.protocol import OpenAIFields
from jaxserve.server.openai.responses import usage_info
from jaxserve.server.server_state import LoadedModel, ServerState

_encode = msgspec.json.Encoder().encode


class OpenAIShape(ResponseShape):
    """The shape of the response to `request`. In a chunk with text only, `before` and `after` are the JSON around it.

    A stream whose client asks for log probabilities or token ids is not `plain`: its chunks have more than text. With
    `names_ids`, tokens of log probabilities are written as ids.
    """

    kind: ClassVar[str]
    before: ClassVar[str]
    after: ClassVar[str]

    def __init__(
        self,
        state: ServerState,
        loaded: LoadedModel,
        request: OpenAIFields,
        id: str,
        num_choices: int,
        *,
        logprobs: bool,
    ) -> None:
        self.tokenizer = loaded.tokenizer
        self.names_ids = request.names_ids(state.config)
        self.plain = not logprobs and not request.return_token_ids
        self.head: dict[str, Any] = {
            "id": id,
            "created": int(time.time()),
            "model": state.model_name,
            "system_fingerprint": state.system_fingerprint,
        }
        head = {"id": id, "object": self.kind} | self.head
        opening = b"data: " + _encode(head)[:-1]
        self._include_usage, self._continuous_usage = request.includes_usage(state.config)
        self._opening = opening + b',"choices":['
        self._closing = b'],"usage":null}\n\n' if self._include_usage else b"]}\n\n"
        self._before = [self._opening + f'{{"index":{index},{self.before}'.encode() for index in range(num_choices)]
        self._after = self.after.encode() + b"}"
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

    def last_events(self, usage: TotalUsage) -> bytes:
        """Return the chunk with the token counts and no choices, if it is asked for, and the end."""
        return (self._usage + _encode(usage_info(usage)) + b"}\n\n" if self._include_usage else b"") + DONE

    def _end(self, choice: ResponseChoice) -> bytes:
        if not self._continuous_usage:
            return self._closing
        prompt, output = len(choice.prompt_ids), choice.num_tokens
        usage = {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}
        return b'],"usage":' + _encode(usage) + b"}\n\n"
