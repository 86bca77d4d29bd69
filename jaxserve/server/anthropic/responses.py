"""The response bodies of Anthropic's Messages API. Owns shapes only."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from jaxserve.server.generation.responder import TotalUsage

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]


class OutputTokensDetails(msgspec.Struct):
    """The number of output tokens up to the end of the reasoning."""

    thinking_tokens: int


class MessageUsage(msgspec.Struct, kw_only=True):
    """The token counts of a request. `input_tokens` of the prompt were computed, the others found in the prefix cache.

    Writing to that cache costs nothing, so `cache_creation_input_tokens` is always 0.
    """

    input_tokens: int
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: OutputTokensDetails | msgspec.UnsetType = msgspec.UNSET


def message_usage(usage: TotalUsage) -> MessageUsage:
    """Return the token counts of a request in Anthropic's shape."""
    return MessageUsage(
        input_tokens=usage.prompt_tokens - usage.cached_tokens,
        cache_read_input_tokens=usage.cached_tokens,
        output_tokens=usage.completion_tokens,
        output_tokens_details=(
            msgspec.UNSET if usage.reasoning_tokens is None else OutputTokensDetails(usage.reasoning_tokens)
        ),
    )


class TextBlock(msgspec.Struct, kw_only=True, tag="text"):
    """A text of the answer."""

    text: str


class ThinkingBlock(msgspec.Struct, kw_only=True, tag="thinking"):
    """Reasoning, "" if the request asks to omit it. The signature is a hash of it, which clients send back."""

    thinking: str
    signature: str


class ToolUseBlock(msgspec.Struct, kw_only=True, tag="tool_use"):
    """A call of a tool. If its arguments are no JSON object, as after a limit, `input` has their text under
    `INVALID_JSON`."""

    id: str
    name: str
    input: dict[str, Any]


class MessageResponse(msgspec.Struct, kw_only=True):
    """The response of `/v1/messages`."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[TextBlock | ThinkingBlock | ToolUseBlock]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessageUsage


class TokenCount(msgspec.Struct):
    """The response of `/v1/messages/count_tokens`."""

    input_tokens: int
