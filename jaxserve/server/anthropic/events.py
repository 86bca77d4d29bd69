"""The shape of a message: one JSON object, or Anthropic's events. Owns the order of blocks and events.

Constant parts are encoded once, so a token of text costs one small encode and a join.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import msgspec

from jaxserve.api_types import FinishReason
from jaxserve.server.anthropic.responses import (
    MessageResponse,
    MessageUsage,
    StopReason,
    TextBlock,
    ThinkingBlock,
    ToolUseBlock,
    message_usage,
)
from jaxserve.server.errors import MESSAGES_PATH, HttpError
from jaxserve.server.generation.answers import AnswerPart
from jaxserve.server.generation.responder import ResponseChoice, ResponseShape, TotalUsage
from jaxserve.server.http.sse import error_event
from jaxserve.text.output import OutputDelta

_encode = msgspec.json.Encoder().encode
_PING = b'event: ping\ndata: {"type":"ping"}\n\n'
_STOP = b'event: message_stop\ndata: {"type":"message_stop"}\n\n'
INVALID_JSON = "INVALID_JSON"


def _event(name: str, **fields: Any) -> bytes:
    return f"event: {name}\ndata: ".encode() + _encode({"type": name, **fields}) + b"\n\n"


class _Signature:
    """The signature of a block of reasoning, which grows with it."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()

    def add(self, text: str) -> None:
        self._hash.update(text.encode(errors="surrogatepass"))

    @property
    def text(self) -> str:
        return self._hash.hexdigest()


class MessageShape(ResponseShape):
    """Writes the one answer of a request as a message named `id`.

    With `fills_context`, its limit of tokens is what the context leaves, not what the client asked for. Reasoning is
    shown as an empty block if `omits_thinking`.
    """

    def __init__(self, id: str, model: str, *, fills_context: bool, omits_thinking: bool) -> None:
        self._id, self._model = id, model
        self._fills_context = fills_context
        self._omits_thinking = omits_thinking
        self._stop: tuple[StopReason, str | None] | None = None
        self._started = False
        self._block: tuple[str, int] | None = None
        self._index = -1
        self._signature = _Signature()
        self._has_calls = False
        self._text_begins = b""

    def event(self, choice: ResponseChoice, delta: OutputDelta, parts: Sequence[AnswerPart]) -> bytes:
        """Return the events of what is new: beginnings, pieces and ends of blocks."""
        if self._block == ("content", 0) and len(parts) == 1 and parts[0].kind == "content" and not delta.finish_reason:
            return self._text_begins + _encode(parts[0].text) + b"}}\n\n"  # nearly always
        found = b""
        if not self._started:
            self._started = True
            found = self._message_start(choice)
        for part in parts:
            kind = "call" if part.kind == "arguments" else part.kind
            if self._block != (kind, part.call):
                found += self._block_stop() + self._block_start(kind, part)
            if part.kind == "content":
                found += self._text_begins + _encode(part.text) + b"}}\n\n"
            elif part.kind == "arguments":
                found += self._delta(type="input_json_delta", partial_json=part.text)
            elif part.kind == "reasoning":
                self._signature.add(part.text)
                if not self._omits_thinking:
                    found += self._delta(type="thinking_delta", thinking=part.text)
        if delta.finish_reason is not None:
            self._stop = self._stop_reason(delta)
            found += self._block_stop()
        return found

    def last_events(self, usage: TotalUsage) -> bytes:
        """Return the reason of the end, the token counts, and the end."""
        assert self._stop is not None
        reason, sequence = self._stop
        ends = {"stop_reason": reason, "stop_sequence": sequence}
        return _event("message_delta", delta=ends, usage=message_usage(usage)) + _STOP

    def error_event(self, error: HttpError) -> bytes:
        """Return the event that ends a stream after an error."""
        return error_event(error, MESSAGES_PATH)

    def body(self, choices: Sequence[ResponseChoice], usage: TotalUsage) -> MessageResponse:
        """Return the whole message."""
        [choice] = choices
        blocks: list[TextBlock | ThinkingBlock | ToolUseBlock] = []
        for part in choice.parts:
            if part.kind == "content":
                blocks.append(TextBlock(text=part.text))
            elif part.kind == "reasoning":
                signature = _Signature()
                signature.add(part.text)
                thinking = "" if self._omits_thinking else part.text
                blocks.append(ThinkingBlock(thinking=thinking, signature=signature.text))
            elif part.kind == "call":
                self._has_calls = True
                blocks.append(ToolUseBlock(id=_call_id(part), name=part.text, input={}))
            else:
                assert isinstance(blocks[-1], ToolUseBlock)
                blocks[-1].input = _arguments(part.text)
        reason, sequence = self._stop_reason(choice.output)
        return MessageResponse(
            id=self._id,
            model=self._model,
            content=blocks,
            stop_reason=reason,
            stop_sequence=sequence,
            usage=message_usage(usage),
        )

    def _message_start(self, choice: ResponseChoice) -> bytes:
        cached = choice.num_cached_tokens
        usage = MessageUsage(
            input_tokens=len(choice.prompt_ids) - cached, cache_read_input_tokens=cached, output_tokens=0
        )
        message = MessageResponse(
            id=self._id, model=self._model, content=[], stop_reason=None, stop_sequence=None, usage=usage
        )
        return _event("message_start", message=message) + _PING

    def _block_start(self, kind: str, part: AnswerPart) -> bytes:
        self._block = kind, part.call
        self._index += 1
        block: TextBlock | ThinkingBlock | ToolUseBlock
        if kind == "content":
            block = TextBlock(text="")
            begins = f'{{"type":"content_block_delta","index":{self._index},"delta":{{"type":"text_delta","text":'
            self._text_begins = b"event: content_block_delta\ndata: " + begins.encode()
        elif kind == "reasoning":
            block = ThinkingBlock(thinking="", signature="")
            self._signature = _Signature()
        else:
            self._has_calls = True
            block = ToolUseBlock(id=_call_id(part), name=part.text, input={})
        return _event("content_block_start", index=self._index, content_block=block)

    def _block_stop(self) -> bytes:
        if self._block is None:
            return b""
        kind, _ = self._block
        self._block = None
        signed = kind == "reasoning"
        signature = self._delta(type="signature_delta", signature=self._signature.text) if signed else b""
        return signature + _event("content_block_stop", index=self._index)

    def _delta(self, **delta: str) -> bytes:
        return _event("content_block_delta", index=self._index, delta=delta)

    def _stop_reason(self, end: OutputDelta) -> tuple[StopReason, str | None]:
        """Return why an answer ended, and the stop sequence that ended it. Raises `HttpError` for an aborted one."""
        if end.finish_reason is FinishReason.ABORT:
            raise HttpError(499, "The request was aborted", type="request_aborted")
        if end.finish_reason is FinishReason.LENGTH:
            return "model_context_window_exceeded" if self._fills_context else "max_tokens", None
        if isinstance(end.stop_reason, str):
            return "stop_sequence", end.stop_reason
        return "tool_use" if self._has_calls else "end_turn", None


def _call_id(part: AnswerPart) -> str:
    """Return the id of a call; Anthropic's begin otherwise than OpenAI's."""
    name = part.call_id.removeprefix("call_")
    return part.call_id if name == part.call_id else f"toolu_{name}"


def _arguments(text: str) -> dict[str, Any]:
    try:
        return msgspec.json.decode(text or "{}", type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
        return {INVALID_JSON: text}
