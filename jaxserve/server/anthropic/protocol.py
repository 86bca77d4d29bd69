"""The request bodies of Anthropic's Messages API. Owns shapes only.

Fields that ask something of Anthropic's own service are in `generation/inert_fields.py`. Keys of content blocks that
the server doesn't know are left out, as clients send back blocks with all that a server once gave them.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from jaxserve.server.generation.inert_fields import InertFields, InertToolFields
from jaxserve.server.generation.sampling_fields import with_shared_options
from jaxserve.server.generation.tools import MAX_TOOLS, FunctionName
from jaxserve.server.http.fields import MAX_STOP_STRINGS, ModelName, NullOrEmptyObject, Text, accepts_only


class TextPart(msgspec.Struct, tag="text"):
    """A text."""

    text: str


class ImagePart(msgspec.Struct, tag="image"):
    """An image, which is refused."""


class DocumentPart(msgspec.Struct, tag="document"):
    """A document, which is refused."""


class SearchResultPart(msgspec.Struct, tag="search_result"):
    """A search result, which is refused."""


class ToolReferencePart(msgspec.Struct, tag="tool_reference"):
    """In the result of a tool: a deferred tool may be called from here on."""

    tool_name: FunctionName


class ThinkingPart(msgspec.Struct, tag="thinking"):
    """Reasoning of the assistant. The signature is never checked."""

    thinking: str
    signature: str | None = None


class RedactedThinkingPart(msgspec.Struct, tag="redacted_thinking"):
    """Encrypted reasoning, which is left out of the prompt."""

    data: str | None = None


class ToolUsePart(msgspec.Struct, tag="tool_use"):
    """A call of a tool. Some clients send arguments that were cut off as the text they are."""

    id: str
    name: str
    input: dict[str, Any] | str | None = None


class ToolResultPart(msgspec.Struct, tag="tool_result"):
    """The result of a call."""

    tool_use_id: str
    content: str | list[TextPart | ImagePart | DocumentPart | SearchResultPart | ToolReferencePart] | None = None
    is_error: bool | None = None


class ToolDefinition(InertToolFields, kw_only=True, forbid_unknown_fields=True):
    """A tool of the client: a function with the JSON schema of its input.

    With `defer_loading`, it can't be called before a message adds it or refers to it.
    """

    name: FunctionName
    input_schema: dict[str, Any]
    description: str | None = None
    type: Literal["custom"] | None = None
    strict: bool | None = None
    defer_loading: bool | None = None


class ToolReference(msgspec.Struct, tag="tool_reference"):
    """The name of a tool that the request defines."""

    name: FunctionName


class InlineTool(msgspec.Struct, tag="tool_definition"):
    """A tool that a message defines."""

    definition: dict[str, Any]


class ToolAdditionPart(msgspec.Struct, tag="tool_addition"):
    """In a system message: a tool may be called from here on."""

    tool: ToolReference | InlineTool


class ToolRemovalPart(msgspec.Struct, tag="tool_removal"):
    """In a system message: a tool may not be called any more."""

    tool: ToolReference


ContentBlock = (
    TextPart
    | ImagePart
    | DocumentPart
    | SearchResultPart
    | ThinkingPart
    | RedactedThinkingPart
    | ToolUsePart
    | ToolResultPart
    | ToolReferencePart
    | ToolAdditionPart
    | ToolRemovalPart
)


class MessageParam(msgspec.Struct, kw_only=True):
    """One message. A message of the system with `clear_at: next_user_message` is left out after a later question."""

    role: Literal["user", "assistant", "system"]
    content: str | list[ContentBlock] | None = None
    clear_at: Literal["never", "next_user_message"] | None = None
    output_config: NullOrEmptyObject = None


class ThinkingEnabled(msgspec.Struct, tag="enabled", forbid_unknown_fields=True):
    """Reasoning of at most `budget_tokens` tokens. `block_binding` says what happens to reasoning that fails a check of
    its signature, which this server doesn't make."""

    budget_tokens: Annotated[int, Meta(ge=0)]
    display: Literal["summarized", "omitted"] | None = None
    block_binding: Any = None


class ThinkingAdaptive(msgspec.Struct, tag="adaptive", forbid_unknown_fields=True):
    """Reasoning as the model likes."""

    display: Literal["summarized", "omitted"] | None = None
    block_binding: Any = None


class ThinkingDisabled(msgspec.Struct, tag="disabled", forbid_unknown_fields=True):
    """No reasoning."""


class JsonOutputFormat(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The JSON schema that an answer must match."""

    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """How much the model reasons, and the form of its answer."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: JsonOutputFormat | None = None


class ToolChoiceAuto(msgspec.Struct, tag="auto", forbid_unknown_fields=True):
    """The model decides whether it calls tools."""

    disable_parallel_tool_use: bool | None = None


class ToolChoiceAny(msgspec.Struct, tag="any", forbid_unknown_fields=True):
    """The model calls a tool."""

    disable_parallel_tool_use: bool | None = None


class ToolChoiceTool(msgspec.Struct, tag="tool", forbid_unknown_fields=True):
    """The model calls this tool."""

    name: str
    disable_parallel_tool_use: bool | None = None


class ToolChoiceNone(msgspec.Struct, tag="none", forbid_unknown_fields=True):
    """The model calls no tool."""

    disable_parallel_tool_use: bool | None = None


class ContextEdit(msgspec.Struct):
    """A change of the conversation that the server is asked to make. Only that of thinking is accepted: chat templates
    leave out earlier reasoning by themselves."""

    type: Annotated[Any, accepts_only("clear_thinking_20251015", advice="shorten the conversation yourself")]


class ContextManagement(msgspec.Struct, forbid_unknown_fields=True):
    """Changes of the conversation before the model reads it."""

    edits: list[ContextEdit] | None = None


class Diagnostics(msgspec.Struct, forbid_unknown_fields=True):
    """A question about the prompt cache of another response, which is not answered."""

    previous_message_id: Any = None


class CountTokensRequest(InertFields, kw_only=True, forbid_unknown_fields=True):
    """The body of `/v1/messages/count_tokens`, and what it has in common with `/v1/messages`."""

    messages: Annotated[list[MessageParam], Meta(min_length=1)]
    model: ModelName | None = None
    system: str | list[TextPart] | None = None
    tools: Annotated[list[dict[str, Any]], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoiceAuto | ToolChoiceAny | ToolChoiceTool | ToolChoiceNone | None = None
    thinking: ThinkingEnabled | ThinkingAdaptive | ThinkingDisabled | None = None
    output_config: OutputConfig | None = None
    output_format: JsonOutputFormat | None = None
    context_management: ContextManagement | None = None
    diagnostics: Diagnostics | None = None


@with_shared_options
class MessagesRequest(CountTokensRequest, kw_only=True, forbid_unknown_fields=True):
    """The body of `/v1/messages`. The answer may be shorter than `max_tokens` if the context has no more room."""

    max_tokens: Annotated[int, Meta(ge=0)]
    stop_sequences: Annotated[list[Text], Meta(max_length=MAX_STOP_STRINGS)] | None = None
    stream: bool | None = None
