"""Turns the messages and tools of Anthropic's Messages into a conversation as chat templates expect it.

Nothing moves: a tool that comes or goes in the middle, and a system message there, are rendered where they stand, so
that the prompt of the next turn begins with the prompt of this one. Never renders or tokenizes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from jaxserve.api_types import StructuredOutputs
from jaxserve.errors import InvalidRequestError
from jaxserve.server.anthropic.protocol import (
    CountTokensRequest,
    InlineTool,
    MessageParam,
    RedactedThinkingPart,
    TextPart,
    ThinkingDisabled,
    ThinkingEnabled,
    ThinkingPart,
    ToolAdditionPart,
    ToolChoiceAny,
    ToolChoiceNone,
    ToolChoiceTool,
    ToolDefinition,
    ToolReferencePart,
    ToolRemovalPart,
    ToolResultPart,
    ToolUsePart,
)
from jaxserve.server.generation.conversation import Conversation, TemplateOptions
from jaxserve.server.generation.message_fields import KNOWN_EFFORTS
from jaxserve.server.generation.message_list import MessageList, TemplateAbilities
from jaxserve.server.generation.tools import CallChoice, OfferedTool, ToolUse, tool_use
from jaxserve.server.http.decoding import validation_error
from jaxserve.server.http.fields import refuse_unsupported_fields

BILLING_HEADER = "x-anthropic-billing-header:"
"""Claude Code begins its first system block with this and a hash of the request, which no cached prefix survives."""

_ADDED = "This tool may be called from now on:\n"
_REMOVED = "This tool may not be called any more: "


def conversation(request: CountTokensRequest, can: TemplateAbilities, *, keeps_billing_header: bool) -> Conversation:
    """Return what a request asks, as a template that `can` do some things shows it.

    Raises `InvalidRequestError` naming the field that can't be used.
    """
    tools = _Tools(request)
    messages = _Messages(tools, can)
    messages.add_system(request.system, keeps_billing_header)
    last_question = max((at for at, one in enumerate(request.messages) if one.role == "user"), default=-1)
    for number, message in enumerate(request.messages):
        passed = message.clear_at == "next_user_message" and number < last_question
        messages.add_message(message, f"messages[{number}]", shows_text=not passed)
    if not messages.found:
        raise InvalidRequestError("messages have no content; send a text", param="messages")
    last = messages.found[-1]
    continues = last["role"] == "assistant"
    if continues and "tool_calls" in last:
        raise InvalidRequestError(
            "messages: the last message has a call without its result; add a message of the user with a tool_result",
            param="messages",
        )
    if continues and not last["content"]:
        raise InvalidRequestError(
            "messages: the last message of the assistant has no text to continue; leave it out",
            param="messages",
        )
    thinking, config = request.thinking, request.output_config
    effort = None if config is None or config.effort is None else KNOWN_EFFORTS.get(config.effort, config.effort)
    return Conversation(
        messages.rendered(),
        TemplateOptions(continue_final_message=continues),
        tools=tools.use(request),
        shown_tools=tools.shown,
        form=_form(request),
        reasoning_effort=None if isinstance(thinking, ThinkingDisabled) else effort,
        thinking_budget=thinking.budget_tokens if isinstance(thinking, ThinkingEnabled) else None,
        thinks=None if thinking is None else not isinstance(thinking, ThinkingDisabled),
    )


def _form(request: CountTokensRequest) -> tuple[str, StructuredOutputs] | None:
    """Return the form of the answer and the field that asks for it; `output_format` is the older name."""
    config = request.output_config
    if config is not None and config.format is not None:
        return "output_config.format", StructuredOutputs(json=config.format.schema, strict=True)
    if request.output_format is not None:
        return "output_format", StructuredOutputs(json=request.output_format.schema, strict=True)
    return None


class _Tools:
    """Keeps the tools that a request defines, and which of them may be called after the messages so far."""

    def __init__(self, request: CountTokensRequest) -> None:
        self._defined: dict[str, OfferedTool] = {}
        self._shown: list[OfferedTool] = []
        self._callable: dict[str, None] = {}
        for number, given in enumerate(request.tools or ()):
            tool = _tool(given, f"tools[{number}]")
            self._define(tool, f"tools[{number}]")
            if not tool.defer_loading:
                self._shown.append(self._defined[tool.name])
                self._callable[tool.name] = None

    def add(self, name: str, where: str) -> str:
        """Let a tool be called from here on; return the text that says so."""
        tool = self._defined.get(name)
        if tool is None:
            raise InvalidRequestError(f"{where}: no tool is called {name[:100]!r}; define it in tools", param=where)
        self._callable[name] = None
        shown = {"name": name, "description": tool.description, "input_schema": tool.parameters}
        return _ADDED + msgspec.json.encode({key: one for key, one in shown.items() if one is not None}).decode()

    def define(self, given: dict[str, Any], where: str) -> str:
        """Define a tool here, which may be called at once; return the text that says so."""
        tool = _tool(given, where)
        self._define(tool, where)
        return self.add(tool.name, where)

    def remove(self, name: str, where: str) -> str:
        """Let a tool not be called any more; return the text that says so."""
        if name not in self._defined:
            raise InvalidRequestError(f"{where}: no tool is called {name[:100]!r}; define it in tools", param=where)
        self._callable.pop(name, None)
        return _REMOVED + name

    def use(self, request: CountTokensRequest) -> ToolUse | None:
        """Return how the answer may use tools, or None if it may call none."""
        chosen = request.tool_choice
        if isinstance(chosen, ToolChoiceNone):
            return None
        names = {chosen.name: "tool_choice.name"} if isinstance(chosen, ToolChoiceTool) else None
        choice = CallChoice(isinstance(chosen, ToolChoiceAny | ToolChoiceTool), names, named=names is not None)
        several = not getattr(chosen, "disable_parallel_tool_use", None)
        found = tool_use([self._defined[name] for name in self._callable], choice, several=several)
        return None if found is None else dataclasses.replace(found, shown=self.shown)

    @property
    def shown(self) -> list[dict[str, Any]]:
        """The tools that the template shows, whatever may be called now: the prompt begins alike on each turn."""
        return [tool.shown for tool in {tool.name: tool for tool in self._shown}.values()]

    def _define(self, tool: ToolDefinition, where: str) -> None:
        offered = OfferedTool(
            tool.name,
            tool.description,
            tool.input_schema,
            tool.strict is True,
            where=where,
            schema_field="input_schema",
        )
        tool_use([self._defined.setdefault(tool.name, offered), offered], CallChoice(), several=True)


def _tool(given: dict[str, Any], where: str) -> ToolDefinition:
    kind = given.get("type")
    if kind not in (None, "custom"):
        raise InvalidRequestError(
            f"{where}: {str(kind)[:60]!r} is a tool that Anthropic defines or runs, and this server has none; define a "
            "tool of type custom with its input_schema",
            param=f"{where}.type",
        )
    try:
        tool = msgspec.convert(given, ToolDefinition)
    except msgspec.ValidationError as error:
        raise validation_error(str(error), where, kind=ToolDefinition) from error
    refuse_unsupported_fields(tool, f"{where}.")
    return tool


class _Messages(MessageList):
    """The messages of a chat so far, with the tools that may be called after them."""

    def __init__(self, tools: _Tools, can: TemplateAbilities) -> None:
        super().__init__(can)
        self._tools = tools

    def add_system(self, given: str | Sequence[TextPart] | None, keeps_billing_header: bool) -> None:
        """Add the system prompt, without Claude Code's billing header."""
        texts = [given] if isinstance(given, str) else [part.text for part in given or ()]
        if texts and not keeps_billing_header and texts[0].startswith(BILLING_HEADER):
            texts[0] = texts[0].partition("\n")[2].lstrip("\n")
        self.add("system", [text for text in texts if text])

    def add_message(self, message: MessageParam, where: str, *, shows_text: bool) -> None:
        """Add a message. Without `shows_text`, only its changes of tools remain."""
        parts = [TextPart(message.content)] if isinstance(message.content, str) else message.content or []
        if message.output_config:
            raise InvalidRequestError(
                f"{where}.output_config is not supported: use output_config of the request",
                param=f"{where}.output_config",
            )
        if message.role == "assistant":
            self._add_blocks(parts, where)
            return
        texts: list[str] = []
        for number, part in enumerate(parts):
            place = f"{where}.content[{number}]"
            if isinstance(part, TextPart):
                texts += [part.text] if shows_text and part.text else []
            elif message.role == "system" and isinstance(part, ToolAdditionPart):
                if isinstance(part.tool, InlineTool):
                    texts.append(self._tools.define(part.tool.definition, f"{place}.tool.definition"))
                else:
                    texts.append(self._tools.add(part.tool.name, f"{place}.tool.name"))
            elif message.role == "system" and isinstance(part, ToolRemovalPart):
                texts.append(self._tools.remove(part.tool.name, f"{place}.tool.name"))
            elif message.role == "user" and isinstance(part, ToolResultPart):
                self.add(message.role, texts)
                texts = []
                self._add_tool_result(part, place)
            elif message.role == "user" and isinstance(part, ToolReferencePart):
                texts.append(self._tools.add(part.tool_name, f"{place}.tool_name"))
            else:
                raise _refused(part, place, message.role)
        self.add(message.role, texts)

    def _add_blocks(self, parts: Sequence[Any], where: str) -> None:
        texts, thoughts, calls = [], [], []
        for number, part in enumerate(parts):
            if isinstance(part, TextPart):
                texts.append(part.text)
            elif isinstance(part, ThinkingPart):
                thoughts.append(part.thinking)
            elif isinstance(part, ToolUsePart):
                calls.append((part.id, part.name, part.input or {}))
            elif not isinstance(part, RedactedThinkingPart):
                raise _refused(part, f"{where}.content[{number}]", "assistant")
        self.add_answer("".join(texts), "\n".join(filter(None, thoughts)), calls)

    def _add_tool_result(self, result: ToolResultPart, where: str) -> None:
        texts = [result.content] if isinstance(result.content, str) else []
        for number, part in enumerate([] if isinstance(result.content, str) else result.content or []):
            place = f"{where}.content[{number}]"
            if isinstance(part, TextPart):
                texts.append(part.text)
            elif isinstance(part, ToolReferencePart):
                texts.append(self._tools.add(part.tool_name, f"{place}.tool_name"))
            else:
                raise _refused(part, place, "user")
        text = "\n".join(texts)
        if result.is_error and "error" not in text[:80].lower():
            text = f"Error: {text}" if text else "Error"
        self.add_result(result.tool_use_id, text)


_KINDS: Mapping[str, str] = {"image": "images", "document": "documents", "search_result": "search results"}


def _refused(part: msgspec.Struct, where: str, role: str) -> InvalidRequestError:
    kind = str(part.__struct_config__.tag)
    if kind in _KINDS:
        return InvalidRequestError(
            f"{where} has type {kind!r}: {_KINDS[kind]} are not supported; leave them out, or describe them in a text",
            param=where,
        )
    return InvalidRequestError(
        f"{where} has type {kind!r}: a message of the {role} has no such blocks; leave it out", param=where
    )
