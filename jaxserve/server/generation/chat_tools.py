"""The fields of a chat that offer tools and choose among them, as OpenAI's chat has them. Owns shapes, and what they
say as `OfferedTool` and `CallChoice`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from jaxserve.server.generation.inert_fields import InertToolFields
from jaxserve.server.generation.tools import (
    MAX_TOOLS,
    CallChoice,
    FunctionName,
    GrammarSyntax,
    OfferedTool,
    ToolUse,
    tool_use,
)
from jaxserve.server.http.fields import refuse_unsupported_fields
from jaxserve.text.grammars.custom.custom_text import CustomText


class ToolFunction(InertToolFields, kw_only=True, forbid_unknown_fields=True):
    """A function that the model may call. `parameters` is the JSON schema of its arguments; without it, it has none.

    With `strict`, arguments always match the schema, whatever `tool_choice` is.
    """

    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class FunctionTool(InertToolFields, kw_only=True, forbid_unknown_fields=True, tag="function"):
    """A function."""

    function: ToolFunction


class TextFormat(msgspec.Struct, forbid_unknown_fields=True, tag="text"):
    """Any text."""


class GrammarDefinition(msgspec.Struct, forbid_unknown_fields=True):
    """A grammar, in Lark or as a regular expression."""

    definition: str
    syntax: GrammarSyntax


class GrammarFormat(msgspec.Struct, forbid_unknown_fields=True, tag="grammar"):
    """Texts in a grammar."""

    grammar: GrammarDefinition


class CustomToolFields(InertToolFields, kw_only=True, forbid_unknown_fields=True):
    """A tool whose input is a text, which a grammar holds in any answer if it has one."""

    name: FunctionName
    description: str | None = None
    format: TextFormat | GrammarFormat | None = None


class CustomTool(InertToolFields, kw_only=True, forbid_unknown_fields=True, tag="custom"):
    """A custom tool."""

    custom: CustomToolFields


class ToolName(msgspec.Struct, forbid_unknown_fields=True):
    """The name of a tool."""

    name: str


class NamedFunction(msgspec.Struct, forbid_unknown_fields=True, tag="function"):
    """The choice of one function, which is always called."""

    function: ToolName


class NamedCustomTool(msgspec.Struct, forbid_unknown_fields=True, tag="custom"):
    """The choice of one custom tool, which is always called."""

    custom: ToolName


class AllowedTools(msgspec.Struct, forbid_unknown_fields=True):
    """The tools that may be called. The model sees the others too, so that the prompt begins alike."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedFunction | NamedCustomTool], Meta(min_length=1, max_length=MAX_TOOLS)]


class AllowedToolsChoice(msgspec.Struct, forbid_unknown_fields=True, tag="allowed_tools"):
    """The choice of some tools."""

    allowed_tools: AllowedTools


Tools = Annotated[list[FunctionTool | CustomTool], Meta(max_length=MAX_TOOLS)]
ToolChoice = Literal["none", "auto", "required"] | NamedFunction | NamedCustomTool | AllowedToolsChoice


def chat_tool_use(
    tools: list[FunctionTool | CustomTool] | None, choice: ToolChoice | None, *, several: bool
) -> ToolUse | None:
    """Return how a chat uses tools, or None if it offers none or chooses none. Raises as `tool_use` does."""
    found = tool_use(
        [_offered(tool, f"tools[{number}]") for number, tool in enumerate(tools or ())],
        _choice(choice),
        several=several,
    )
    return None if choice == "none" else found


def _offered(tool: FunctionTool | CustomTool, where: str) -> OfferedTool:
    refuse_unsupported_fields(tool, f"{where}.")
    if isinstance(tool, FunctionTool):
        refuse_unsupported_fields(tool.function, f"{where}.function.")
        given = tool.function
        return OfferedTool(
            given.name, given.description, given.parameters, given.strict is True, where=f"{where}.function"
        )
    refuse_unsupported_fields(tool.custom, f"{where}.custom.")
    custom, form = tool.custom, tool.custom.format
    grammar = CustomText(form.grammar.syntax, form.grammar.definition) if isinstance(form, GrammarFormat) else None
    return OfferedTool(custom.name, custom.description, is_custom=True, grammar=grammar, where=f"{where}.custom")


def _choice(choice: ToolChoice | None) -> CallChoice:
    if choice is None or isinstance(choice, str):
        return CallChoice(required=choice == "required")
    if isinstance(choice, AllowedToolsChoice):
        allowed, where = choice.allowed_tools, "tool_choice.allowed_tools.tools"
        names = dict(_named(tool, f"{where}[{number}]") for number, tool in enumerate(allowed.tools))
        return CallChoice(required=allowed.mode == "required", names=names)
    return CallChoice(required=True, names=dict([_named(choice, "tool_choice")]), named=True)


def _named(choice: NamedFunction | NamedCustomTool, where: str) -> tuple[str, str]:
    if isinstance(choice, NamedFunction):
        return choice.function.name, f"{where}.function.name"
    return choice.custom.name, f"{where}.custom.name"
