"""The messages of a chat and the options of its template, as clients send them. Owns shapes only."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from jaxserve.server.http.fields import bound_at_load, explicit_schema
from jaxserve.text.template_arguments import Effort

ROLES = ("system", "developer", "user", "assistant", "tool")
# Names of an answer's reasoning: vLLM's and SGLang's, OpenRouter's, gpt-oss'.
REASONING_NAMES = ("reasoning_content", "reasoning", "thinking")
UNSUPPORTED_MESSAGE_FIELDS = {
    "audio": "send what was said as content",
    "function_call": "send it as one of tool_calls",
}
"""Fields of a message that are refused with this advice, unless they are null or empty."""
# Mistral's and Moonshot's names of `continue_final_message`, which few templates read.
CONTINUED_MESSAGE_FIELDS = ("prefix", "partial")
# What clients add to messages, or send back with them, that says nothing to a model.
INERT_MESSAGE_FIELDS = ("annotations", "cache_control", "provider_specific_fields")


TemplateSource = Annotated[
    str, msgspec.Meta(min_length=1, max_length=2**17, extra_json_schema=bound_at_load("chat_template"))
]


class ContentPart(msgspec.Struct):
    """One part of a message's content; only parts of type `text` and `refusal` are supported."""

    type: str
    text: str | None = None
    refusal: str | None = None


class MessageFunction(msgspec.Struct):
    """The function of a call, with its arguments as an object or as JSON text, whatever that holds.

    Clients send calls back with fields of their own, such as OpenAI's `parsed_arguments`.
    """

    name: str
    arguments: Any = None


class MessageCustomCall(msgspec.Struct):
    """A custom tool and its input."""

    name: str
    input: str


class MessageCall(msgspec.Struct):
    """A call in a message of the assistant: of a `function`, or of a `custom` tool."""

    function: MessageFunction | None = None
    custom: MessageCustomCall | None = None
    id: str | None = None
    type: Literal["function", "custom"] | None = None

    def __post_init__(self) -> None:
        needed = self.type or ("function" if self.custom is None else "custom")
        if getattr(self, needed) is None:
            raise ValueError(f"Object missing required field `{needed}`")


class MessageFields(msgspec.Struct):
    """The fields of a chat message that the server checks; the chat template gets its other keys unchanged."""

    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    refusal: Any = None
    audio: Any = None
    function_call: Any = None
    tool_calls: list[MessageCall] | None = None
    tool_call_id: str | None = None


_ID = {"type": ["string", "null"]}
_FUNCTION = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
_CUSTOM = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "input": {"type": "string"}},
    "required": ["name", "input"],
}
_TOOL_CALL = {
    "anyOf": [
        {
            "type": "object",
            "properties": {"id": _ID, "type": {"enum": [kind, None]}, kind: call},
            "required": [kind],
        }
        for kind, call in (("function", _FUNCTION), ("custom", _CUSTOM))
    ]
}
_PART = {
    "anyOf": [
        {
            "type": "object",
            "properties": {"type": {"const": kind}, kind: {"type": "string"}},
            "required": ["type", kind],
        }
        for kind in ("text", "refusal")
    ]
}
_MAY_BE_EMPTY = {"properties": {"role": {"enum": ["assistant", "tool"]}}}
_HAS_CONTENT = {"properties": {"content": {"type": ["string", "array"]}}, "required": ["content"]}
_MESSAGE_SCHEMA = {
    "type": "object",
    "properties": {
        "role": {"enum": list(ROLES)},
        "content": {"anyOf": [{"type": ["string", "null"]}, {"type": "array", "items": _PART}]},
        "name": {"type": ["string", "null"]},
        "tool_calls": {"anyOf": [{"type": "null"}, {"type": "array", "items": _TOOL_CALL}]},
        "tool_call_id": {"type": ["string", "null"]},
    }
    | {name: {"enum": [None, []]} for name in UNSUPPORTED_MESSAGE_FIELDS},
    "required": ["role"],
    "anyOf": [_MAY_BE_EMPTY, _HAS_CONTENT],
}
_NONEMPTY_TEXT = {"properties": {"content": {"type": "string", "minLength": 1}}, "required": ["content"]}
# Only the last message is continued, but a schema can only constrain all messages.
_CONTINUABLE = {"add_generation_prompt": {"enum": [None, False]}, "messages": {"items": _NONEMPTY_TEXT}}
CONTINUE_FINAL_MESSAGE = {
    "anyOf": [{"properties": {"continue_final_message": {"enum": [None, False]}}}, {"properties": _CONTINUABLE}]
}
Messages = Annotated[list[dict[str, Any]], explicit_schema({"type": "array", "items": _MESSAGE_SCHEMA, "minItems": 1})]
KNOWN_EFFORTS = {"xhigh": "high", "max": "high"}
"""What agents' routes say to templates, which know no more than three efforts, for those that they don't know."""
ReasoningEffort = Annotated[Effort, msgspec.Meta(extra_json_schema=bound_at_load("reasoning_effort"))]
# A number of tokens, or -1 for no bound.
ThinkingTokens = Annotated[int, msgspec.Meta(ge=-1, le=2**31 - 1)]
TemplateArguments = Annotated[dict[str, Any], msgspec.Meta(extra_json_schema=bound_at_load("template_arguments"))]
Documents = Annotated[list[dict[str, Any]], msgspec.Meta(extra_json_schema=bound_at_load("documents"))]
