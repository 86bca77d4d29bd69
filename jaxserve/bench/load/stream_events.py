"""The events of an OpenAI stream: text, finish reason, usage, or an error. Unknown fields are ignored."""

from __future__ import annotations

from typing import Any

import msgspec


class StreamDelta(msgspec.Struct, gc=False):
    """A piece of a chat answer; reasoning and tool calls count as tokens too."""

    role: str | None = None
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: Any = None


class StreamChoice(msgspec.Struct, gc=False):
    """A piece of one answer: `text` in completions, `delta` in chats."""

    text: str | None = None
    delta: StreamDelta | None = None
    finish_reason: str | None = None

    def new_text(self) -> str:
        """Return the new text."""
        if self.delta is None:
            return self.text or ""
        return self.delta.content or self.delta.reasoning_content or self.delta.reasoning or ""

    def is_token(self) -> bool:
        """Return whether it holds a token. A token may have no text (half a character); the event that opens a chat
        and the one that only has a finish reason hold none."""
        delta = self.delta
        if self.new_text() or (delta is not None and delta.tool_calls):
            return True
        return self.finish_reason is None and (delta is None or delta.role is None)


class StreamUsage(msgspec.Struct, gc=False):
    """The server's token counts."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class StreamChunk(msgspec.Struct, gc=False):
    """The data of one event."""

    choices: list[StreamChoice] = []
    usage: StreamUsage | None = None
    error: Any = None
    object: str | None = None
    message: str | None = None

    def error_text(self) -> str | None:
        """Return the server's error message, or None when the event is not an error."""
        error = self.error
        if error is None:
            return self.message if self.object == "error" else None
        return str(error.get("message", error)) if isinstance(error, dict) else str(error)


DONE = b"[DONE]"

decode_stream_chunk = msgspec.json.Decoder(StreamChunk).decode
"""Decode an event's data. Raises `msgspec.DecodeError` (not JSON) or `msgspec.ValidationError`."""
