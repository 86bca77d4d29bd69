"""The request bodies of OpenAI's Responses API. Owns shapes only; items of an input are in `items.py`, tools in
`tools.py`."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from jaxserve import api_types
from jaxserve.server.generation.inert_fields import InertFields
from jaxserve.server.generation.message_fields import TemplateArguments, ThinkingTokens
from jaxserve.server.generation.sampling_fields import with_shared_options
from jaxserve.server.generation.tools import MAX_TOOLS
from jaxserve.server.http.fields import (
    ModelName,
    Name,
    NumLogprobs,
    Priority,
    StopStrings,
    Text,
    TokenLimit,
    accepts_only,
    explicit_schema,
    requires,
)

ENCRYPTED_REASONING = "reasoning.encrypted_content"
TEXT_LOGPROBS = "message.output_text.logprobs"
# All but the first two are parts of items that this server never makes.
Includable = Literal[
    "reasoning.encrypted_content",
    "message.output_text.logprobs",
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "web_search_call.action.sources",
    "web_search_call.results",
]
_ITEM = {"type": "object", "properties": {"type": {"type": ["string", "null"]}}}
Input = Annotated[
    str | list[dict[str, Any]],
    explicit_schema({"anyOf": [{"type": "string"}, {"type": "array", "items": _ITEM, "minItems": 1}]}),
]


class ReasoningSettings(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """How much the model reasons. With a `summary`, the reasoning comes as one, whole: nothing shortens it here.
    `generate_summary` is its older name. `context` changes nothing: the chat template decides which reasoning it
    shows."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None
    context: Literal["auto", "current_turn", "all_turns"] | None = None
    mode: Annotated[Any, accepts_only("standard")] = None


class PlainFormat(msgspec.Struct, forbid_unknown_fields=True, tag="text"):
    """Any text."""


class JsonObjectFormat(msgspec.Struct, forbid_unknown_fields=True, tag="json_object"):
    """Any JSON object."""


class SchemaFormat(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, tag="json_schema"):
    """JSON that matches a schema, which is held either way; `strict` refuses what only the client can check."""

    schema: dict[str, Any]
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class LarkFormat(msgspec.Struct, forbid_unknown_fields=True, tag="grammar"):
    """A text in a grammar, in Lark."""

    grammar: Text


class TextSettings(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The form of the answer. `verbosity` changes nothing."""

    format: PlainFormat | JsonObjectFormat | SchemaFormat | LarkFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ResponsesStreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    """Options of a stream, which change nothing: its last event has the token counts, and no event is padded."""

    include_obfuscation: bool | None = None
    include_usage: bool | None = None


class ResponsesInput(InertFields, kw_only=True, forbid_unknown_fields=True):
    """The body of `/v1/responses/input_tokens`, and what it has in common with `/v1/responses`.

    `input` is a text or a list of items. `instructions` are the system prompt of this response only.
    """

    input: Input | None = None
    model: ModelName | None = None
    instructions: str | None = None
    previous_response_id: Name | None = None
    tools: Annotated[list[dict[str, Any]], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningSettings | None = None
    text: TextSettings | None = None
    truncation: Literal["auto", "disabled"] | None = None
    chat_template_kwargs: TemplateArguments | None = None

    messages: Annotated[Any, accepts_only(advice="send them as input")] = None
    response_format: Annotated[Any, accepts_only(advice="send it as text.format")] = None
    reasoning_effort: Annotated[Any, accepts_only(advice="send it as reasoning.effort")] = None
    conversation: Annotated[Any, accepts_only(advice="continue a response with previous_response_id")] = None
    prompt: Annotated[Any, accepts_only(advice="send the prompt itself, as instructions and input")] = None


@with_shared_options
class ResponsesRequest(ResponsesInput, kw_only=True, forbid_unknown_fields=True):
    """The body of `/v1/responses`. The answer may be shorter than `max_output_tokens` if the context has no more room.

    With `store`, the default, the response can be continued and read later. `thinking_token_budget` and the options of
    sampling are those of chat.
    """

    conditions: ClassVar[tuple[dict[str, Any], ...]] = (requires("stream_options", [None], "stream"),)

    max_output_tokens: Annotated[int, Meta(ge=0)] | None = None
    include: list[Includable] | None = None
    top_logprobs: NumLogprobs | None = None
    store: bool | None = None
    stream: bool | None = None
    stream_options: ResponsesStreamOptions | None = None
    thinking_token_budget: ThinkingTokens | None = None
    seed: api_types.Seed | None = None
    stop: StopStrings | None = None
    min_tokens: TokenLimit | None = None
    ignore_eos: bool | None = None
    priority: Priority | None = None
    cache_salt: Text | None = None

    max_tokens: Annotated[Any, accepts_only(advice="send it as max_output_tokens")] = None
    max_completion_tokens: Annotated[Any, accepts_only(advice="send it as max_output_tokens")] = None
    n: Annotated[Any, accepts_only(1, advice="send several requests")] = None
    logprobs: Annotated[Any, accepts_only(False, advice=f"send top_logprobs, or include: [{TEXT_LOGPROBS}]")] = None

    # These limit tools that OpenAI runs, and images. This server has neither.
    max_tool_calls: int | None = None
    image: Any = None
