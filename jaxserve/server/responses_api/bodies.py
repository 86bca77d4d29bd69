"""The response bodies of OpenAI's Responses API: the response, its output items, its token counts. Owns shapes only."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from jaxserve.server.generation.responder import TotalUsage
from jaxserve.server.generation.token_logprobs import TokenLogprobInfo

ItemStatus = Literal["in_progress", "completed", "incomplete"]
ResponseStatus = Literal["in_progress", "completed", "incomplete", "cancelled", "failed"]


class OutputText(msgspec.Struct, tag="output_text"):
    """A text of the answer. `logprobs` is empty unless the request includes it."""

    text: str
    annotations: list[Any] = msgspec.field(default_factory=list)
    logprobs: list[TokenLogprobInfo] = msgspec.field(default_factory=list)


class ReasoningText(msgspec.Struct, tag="reasoning_text"):
    """Reasoning as the model wrote it."""

    text: str


class SummaryText(msgspec.Struct, tag="summary_text"):
    """Reasoning for a client that asked for a summary: the whole of it, since nothing shortens it here."""

    text: str


class OutputMessage(msgspec.Struct, kw_only=True, tag="message"):
    """A message of the assistant."""

    id: str
    status: ItemStatus
    role: Literal["assistant"] = "assistant"
    content: list[OutputText]


class ReasoningItem(msgspec.Struct, kw_only=True, tag="reasoning"):
    """Reasoning, as `content` or as `summary`. `encrypted_content` has it once more in a form for sending it back."""

    id: str
    status: ItemStatus
    summary: list[SummaryText]
    content: list[ReasoningText] | msgspec.UnsetType = msgspec.UNSET
    encrypted_content: str | msgspec.UnsetType = msgspec.UNSET


class FunctionCallItem(msgspec.Struct, kw_only=True, tag="function_call"):
    """A call of a function, with its arguments as JSON text."""

    id: str
    status: ItemStatus
    call_id: str
    name: str
    arguments: str
    namespace: str | msgspec.UnsetType = msgspec.UNSET


class CustomCallItem(msgspec.Struct, kw_only=True, tag="custom_tool_call"):
    """A call of a custom tool, with its input, which is any text."""

    id: str
    status: ItemStatus
    call_id: str
    name: str
    input: str
    namespace: str | msgspec.UnsetType = msgspec.UNSET


OutputItem = OutputMessage | ReasoningItem | FunctionCallItem | CustomCallItem


class InputDetails(msgspec.Struct):
    """The number of input tokens that came from the prefix cache. Writing to it costs nothing."""

    cached_tokens: int
    cache_write_tokens: int = 0


class OutputDetails(msgspec.Struct):
    """The number of output tokens up to the end of the reasoning."""

    reasoning_tokens: int


class ResponseUsage(msgspec.Struct):
    """The token counts of a response."""

    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


def response_usage(usage: TotalUsage) -> ResponseUsage:
    """Return the token counts of a request in the shape of Responses."""
    return ResponseUsage(
        usage.prompt_tokens,
        InputDetails(usage.cached_tokens),
        usage.completion_tokens,
        OutputDetails(usage.reasoning_tokens or 0),
        usage.prompt_tokens + usage.completion_tokens,
    )


class IncompleteDetails(msgspec.Struct):
    """Why a response is incomplete."""

    reason: Literal["max_output_tokens"]


class ResponseFailure(msgspec.Struct):
    """Why a response failed."""

    code: str
    message: str


JsonValue = Annotated[msgspec.Raw, msgspec.Meta(extra_json_schema={"x-explicit-schema": {}})]


class ResponseObject(msgspec.Struct, kw_only=True):
    """A response. The fields after `usage` say what the request asked for."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    completed_at: int | None = None
    status: ResponseStatus
    error: ResponseFailure | None = None
    incomplete_details: IncompleteDetails | None = None
    model: str
    output: list[OutputItem] = msgspec.field(default_factory=list)
    usage: ResponseUsage | None = None

    instructions: Any
    previous_response_id: str | None
    tools: JsonValue
    tool_choice: JsonValue
    parallel_tool_calls: bool
    text: JsonValue
    reasoning: JsonValue
    max_output_tokens: int | None
    max_tool_calls: int | None
    temperature: float
    top_p: float
    top_logprobs: int
    truncation: Literal["auto", "disabled"]
    background: Literal[False] = False
    store: bool
    service_tier: Literal["default"] = "default"
    metadata: JsonValue
    user: JsonValue
    safety_identifier: JsonValue
    prompt_cache_key: JsonValue


class DeletedResponse(msgspec.Struct, kw_only=True):
    """The response of `DELETE /v1/responses/{response_id}`."""

    id: str
    object: Literal["response"] = "response"
    deleted: Literal[True] = True


class InputItemList(msgspec.Struct, kw_only=True):
    """A page of the items that a response was an answer to."""

    object: Literal["list"] = "list"
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


class InputTokenCount(msgspec.Struct, kw_only=True):
    """The number of tokens that the model would read."""

    object: Literal["response.input_tokens"] = "response.input_tokens"
    input_tokens: int
