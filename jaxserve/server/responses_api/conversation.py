"""Turns a Responses request into a conversation for a chat template. Never renders or tokenizes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jaxserve.api_types import StructuredOutputs
from jaxserve.errors import InvalidRequestError
from jaxserve.server.generation.conversation import Conversation, TemplateOptions
from jaxserve.server.generation.message_fields import KNOWN_EFFORTS
from jaxserve.server.generation.message_list import MessageList, TemplateAbilities
from jaxserve.server.generation.tools import tool_use
from jaxserve.server.responses_api.items import InputReader
from jaxserve.server.responses_api.protocol import (
    JsonObjectFormat,
    LarkFormat,
    ResponsesInput,
    SchemaFormat,
    TextSettings,
)
from jaxserve.server.responses_api.tools import ResponsesTools


def conversation(
    request: ResponsesInput,
    tools: ResponsesTools,
    items: Sequence[tuple[str, Mapping[str, Any]]],
    can: TemplateAbilities,
    special_texts: Sequence[str],
) -> Conversation:
    """Return what a request asks, as a template that `can` do some things shows it. Each of its `items` comes with the
    field that has it.

    Raises `InvalidRequestError` naming the field that can't be used.
    """
    use = tool_use(tools.offered, tools.choice(request.tool_choice), several=request.parallel_tool_calls is not False)
    reader = InputReader(MessageList(can), special_texts)
    reader.messages.add("system", [request.instructions] if request.instructions else [])
    for where, item in items:
        reader.add(item, where)
    reader.finish()
    messages = reader.messages.rendered()
    if all(message["role"] == "system" for message in messages):
        raise InvalidRequestError(
            "input has nothing to answer; send a text, or items with a message of the user", param="input"
        )
    effort = None if request.reasoning is None else request.reasoning.effort
    return Conversation(
        messages,
        TemplateOptions(chat_template_kwargs=request.chat_template_kwargs),
        tools=None if request.tool_choice == "none" else use,
        shown_tools=None if use is None else use.shown,
        form=_form(request.text or TextSettings()),
        reasoning_effort=effort and KNOWN_EFFORTS.get(effort, effort),
        thinking_budget=getattr(request, "thinking_token_budget", None),
        thinks=False if effort == "none" else None,
        param="input",
    )


def _form(text: TextSettings) -> tuple[str, StructuredOutputs] | None:
    """Return the form of the answer and the field that asks for it."""
    match text.format:
        case JsonObjectFormat():
            return "text.format", StructuredOutputs(json_object=True)
        case SchemaFormat(schema=schema, strict=strict):
            return "text.format.schema", StructuredOutputs(json=schema, strict=strict is True)
        case LarkFormat(grammar=grammar):
            return "text.format.grammar", StructuredOutputs(grammar=grammar)
        case _:
            return None


def without_oldest(messages: Sequence[dict[str, Any]], count: int) -> list[dict[str, Any]] | None:
    """Return messages without the `count` oldest ones after the system prompt; None if none would be left.

    Results whose calls are among them go too, and answers before the next question, if there is one.
    """
    first = 1 if messages[0]["role"] == "system" else 0
    rest = messages[first + count :]
    asks = any(message["role"] == "user" for message in rest)
    while rest and rest[0]["role"] in (("tool", "assistant") if asks else ("tool",)):
        rest = rest[1:]
    return [*messages[:first], *rest] if rest else None
