"""What the events of an OpenAI stream say: text, its end, usage, or an error. Any server's extra fields are ignored."""

from __future__ import annotations

from typing import Any

import msgspec


class Delta(msgspec.Struct, gc=False):
    """A piece of a chat answer; reasoning and tool calls are tokens as well."""

    role: str | None = None
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: Any = None


class Choice(msgspec.Struct, gc=False):
    """A piece of one answer; `text` from completions, `delta` from chats."""

    text: str | None = None
    delta: Delta | None = None
    finish_reason: str | None = None

    def said(self) -> str:
        """The new text."""
        if self.delta is None:
            return self.text or ""
        return self.delta.content or self.delta.reasoning_content or self.delta.reasoning or ""

    def is_token(self) -> bool:
        """Whether a token came with it. A token may have no text (half a character); the message that opens a chat
        and the one that only says why it ended hold none."""
        delta = self.delta
        if self.said() or (delta is not None and delta.tool_calls):
            return True
        return self.finish_reason is None and (delta is None or delta.role is None)


class Usage(msgspec.Struct, gc=False):
    """What the server counted."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class Chunk(msgspec.Struct, gc=False):
    """One event."""

    choices: list[Choice] = []
    usage: Usage | None = None
    error: Any = None
    object: str | None = None
    message: str | None = None

    def fault(self) -> str | None:
        """What went wrong at the server, where this says so."""
        error = self.error
        if error is None:
            return self.message if self.object == "error" else None
        return str(error.get("message", error)) if isinstance(error, dict) else str(error)


DONE = b"[DONE]"

decode_chunk = msgspec.json.Decoder(Chunk).decode
"""A `Chunk` from an event's data. Raises `msgspec.DecodeError` (not JSON) or `msgspec.ValidationError`."""
