"""The response bodies of the OpenAI routes. Owns shapes only; `openapi.py` describes them to clients."""

from __future__ import annotations

from typing import Literal

import msgspec

from jaxserve.server.generation.responder import TotalUsage
from jaxserve.server.generation.token_logprobs import TokenLogprobInfo


class PromptTokensDetails(msgspec.Struct):
    """The number of prompt tokens that came from the prefix cache."""

    cached_tokens: int = 0


class CompletionTokensDetails(msgspec.Struct):
    """The number of output tokens up to the end of the reasoning."""

    reasoning_tokens: int = 0


class UsageInfo(msgspec.Struct):
    """The token counts of one request: all its choices together, but each prompt only once, whatever its `n`."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | msgspec.UnsetType = msgspec.UNSET


def usage_info(usage: TotalUsage) -> UsageInfo:
    """Return the token counts of a request in OpenAI's shape."""
    return UsageInfo(
        usage.prompt_tokens,
        usage.completion_tokens,
        usage.prompt_tokens + usage.completion_tokens,
        PromptTokensDetails(usage.cached_tokens),
        msgspec.UNSET if usage.reasoning_tokens is None else CompletionTokensDetails(usage.reasoning_tokens),
    )


class CompletionLogprobs(msgspec.Struct):
    """Log probabilities in the legacy shape: four lists with one entry per token, null for a prompt's first token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(msgspec.Struct, kw_only=True):
    """One completion, or in a stream the new part of one.

    `matched_stop`, as in SGLang, is the stop string, pattern or token id that ended it; `stop_reason`, as in vLLM, is
    the same except that it is null for the model's own end tokens.
    """

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None = None
    matched_stop: int | str | None = None
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class CompletionResponse(msgspec.Struct, kw_only=True):
    """The response of `/v1/completions`."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    system_fingerprint: str | None = None
    choices: list[CompletionChoice]
    usage: UsageInfo


class ChatLogprobs(msgspec.Struct):
    """The log probabilities of a message, one entry per token."""

    content: list[TokenLogprobInfo]
    refusal: None = None


class FunctionCall(msgspec.Struct):
    """A function and its arguments as JSON text."""

    name: str
    arguments: str


class ToolCall(msgspec.Struct, tag="function"):
    """A call of a function."""

    id: str
    function: FunctionCall


class CustomCall(msgspec.Struct):
    """A custom tool and its input, which is any text."""

    name: str
    input: str


class CustomToolCall(msgspec.Struct, tag="custom"):
    """A call of a custom tool."""

    id: str
    custom: CustomCall


class ChatMessage(msgspec.Struct):
    """The answer: its content is null if there are only calls or reasoning.

    `reasoning_content` is there with models that reason, null if they did not.
    """

    role: str
    content: str | None
    refusal: None = None
    reasoning_content: str | msgspec.UnsetType | None = msgspec.UNSET
    tool_calls: list[ToolCall | CustomToolCall] | msgspec.UnsetType = msgspec.UNSET


class ChatChoice(msgspec.Struct, kw_only=True):
    """One choice: a whole message."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: str
    stop_reason: int | str | None = None
    matched_stop: int | str | None = None
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class ChatResponse(msgspec.Struct, kw_only=True):
    """The response of `/v1/chat/completions`."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    system_fingerprint: str | None = None
    choices: list[ChatChoice]
    usage: UsageInfo
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class FunctionDelta(msgspec.Struct):
    """The new part of a call: the name comes first, then the arguments in pieces."""

    arguments: str
    name: str | msgspec.UnsetType = msgspec.UNSET


class CustomDelta(msgspec.Struct):
    """The new part of a call of a custom tool: the name comes first, then the input in pieces."""

    input: str
    name: str | msgspec.UnsetType = msgspec.UNSET


class CallDelta(msgspec.Struct):
    """The new part of the call number `index`; its first one has the id and the name."""

    index: int
    function: FunctionDelta | msgspec.UnsetType = msgspec.UNSET
    custom: CustomDelta | msgspec.UnsetType = msgspec.UNSET
    id: str | msgspec.UnsetType = msgspec.UNSET
    type: Literal["function", "custom"] | msgspec.UnsetType = msgspec.UNSET


class ChatDelta(msgspec.Struct, omit_defaults=True):
    """The new part of a message."""

    role: str | None = None
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[CallDelta] | None = None


class ChatChunkChoice(msgspec.Struct, kw_only=True):
    """One choice of a chat chunk. The chunk with the last of its text has the finish reason."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | msgspec.UnsetType | None = msgspec.UNSET
    matched_stop: int | str | msgspec.UnsetType | None = msgspec.UNSET
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class ModelCard(msgspec.Struct, kw_only=True):
    """A served model."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "jaxserve"
    max_model_len: int | None = None


class ModelList(msgspec.Struct, kw_only=True):
    """The response of `/v1/models`."""

    object: Literal["list"] = "list"
    data: list[ModelCard]
