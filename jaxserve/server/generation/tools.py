"""The tools that a request offers, whatever its API calls them, and how its answers may use them.

Models call functions. A custom tool, whose input is a text, is shown to them as a function with that one argument.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

from msgspec import Meta

from jaxserve.errors import InvalidRequestError
from jaxserve.text.grammars.custom.custom_text import CustomText

MAX_TOOLS = 1024
_FUNCTION_NAME = "^[a-zA-Z0-9_./:-]{1,256}$"
INPUT = "input"
"""The argument of a custom tool."""

FunctionName = Annotated[str, Meta(pattern=_FUNCTION_NAME)]
GrammarSyntax = Literal["lark", "regex"]
_SYNTAX_NAMES: dict[GrammarSyntax, str] = {"lark": "grammar in Lark", "regex": "regular expression"}


@dataclass(frozen=True)
class OfferedTool:
    """A function with the JSON schema of its arguments (without one, it has none), or a tool with a text as its input.

    With `strict`, arguments always match the schema, whatever the choice of tools; so does an input its `grammar`.
    Errors name `where`, the field of the request that defines the tool, and its `schema_field`.
    """

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool = False
    is_custom: bool = False
    grammar: CustomText | None = None
    where: str = field(default="tools", compare=False)
    schema_field: str = field(default="parameters", compare=False)

    @property
    def shown(self) -> dict[str, Any]:
        """The tool for a template: what was given, except `strict`, which the model need not know."""
        described, parameters = self.description, self.parameters
        if self.is_custom:
            parameters = {"type": "object", "properties": {INPUT: {"type": "string"}}, "required": [INPUT]}
        if self.grammar is not None:
            form = f"The input is a text in this {_SYNTAX_NAMES[self.grammar.syntax]}:\n{self.grammar.definition}"
            described = f"{described}\n\n{form}" if described else form
        fields = {"name": self.name, "description": described, "parameters": parameters}
        return {"type": "function", "function": {name: value for name, value in fields.items() if value is not None}}

    @property
    def schema(self) -> dict[str, Any]:
        """The JSON schema of the arguments."""
        if self.is_custom:
            text = {"type": "string"} if self.grammar is None else self.grammar
            return {"type": "object", "properties": {INPUT: text}, "required": [INPUT], "additionalProperties": False}
        if self.parameters is None:
            return {"type": "object", "properties": {}, "additionalProperties": False}
        return {"type": "object"} | self.parameters


@dataclass(frozen=True)
class CallChoice:
    """The choice among the tools of a request. With `required`, the answer is a call. If `names` is given, only these
    tools may be called; each name has the field of the request that says it. With `named`, the request names one tool.
    """

    required: bool = False
    names: Mapping[str, str] | None = None
    named: bool = False


@dataclass(frozen=True)
class ToolUse:
    """The tools that a request uses. Templates get `shown`. `schemas` has the arguments' JSON schema of each function
    that may be called, and `customs` are those of them that stand for custom tools.

    With `required`, the answer has only calls. `named`: the request names the one function to call. `strict`: the
    functions whose calls are held in any answer. Without `several`, there is at most one call. `restricted`: some of
    the shown functions may not be called.
    """

    shown: list[dict[str, Any]]
    schemas: dict[str, dict[str, Any]]
    customs: frozenset[str]
    required: bool
    named: bool
    strict: frozenset[str]
    several: bool
    restricted: bool

    @property
    def held(self) -> bool:
        """Whether a grammar holds the calls of an answer that may have none."""
        return bool(self.strict) or self.restricted

    def loosened(self) -> ToolUse | None:
        """Return the same with any arguments for functions that aren't strict; None if all must be held as they are."""
        if self.required or self.strict >= self.schemas.keys():
            return None
        return replace(
            self,
            schemas={name: one if name in self.strict else _only_names(one) for name, one in self.schemas.items()},
        )


def tool_use(offered: Sequence[OfferedTool], choice: CallChoice, *, several: bool) -> ToolUse | None:
    """Return how a request uses tools, or None if it offers none.

    Raises `InvalidRequestError` for a choice that the tools don't offer, for two different tools of one name, and for
    a function whose arguments aren't an object.
    """
    if not offered:
        if choice.required or choice.names is not None:
            raise InvalidRequestError(
                "tool_choice asks for a call, but there are no tools; add them, or leave tool_choice out",
                param="tool_choice",
            )
        return None
    by_name: dict[str, OfferedTool] = {}
    for tool in offered:
        _check(tool, by_name.setdefault(tool.name, tool))
    for name, where in (choice.names or {}).items():
        if name not in by_name:
            raise InvalidRequestError(
                f"{where}: no tool is called {name[:100]!r}; name one of `tools`, or add it there", param=where
            )
    callable_tools = [tool for name, tool in by_name.items() if choice.names is None or name in choice.names]
    return ToolUse(
        shown=[tool.shown for tool in by_name.values()],
        schemas={tool.name: tool.schema for tool in callable_tools},
        customs=frozenset(tool.name for tool in callable_tools if tool.is_custom),
        required=choice.required,
        named=choice.named,
        strict=frozenset(tool.name for tool in callable_tools if tool.strict or tool.grammar is not None),
        several=several and not choice.named,
        restricted=len(callable_tools) < len(by_name),
    )


def _check(tool: OfferedTool, first: OfferedTool) -> None:
    """Raise `InvalidRequestError` for a tool that can't be called, or that has the name of a different one.

    `first` is the first tool of this name: it may be there several times.
    """
    if tool != first:
        param = f"{tool.where}.name"
        raise InvalidRequestError(
            f"{param}: {tool.name!r} is the name of another tool too; give each a name of its own", param=param
        )
    kind = (tool.parameters or {}).get("type")
    if kind is not None and "object" not in (kind if isinstance(kind, list) else [kind]):
        param = f"{tool.where}.{tool.schema_field}.type"
        raise InvalidRequestError(
            f"{param}: arguments are an object, got {str(kind)[:40]!r}; make it a property of an object",
            param=param,
        )


def _only_names(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema that has the parameters of another one, with any values."""
    properties = schema.get("properties")
    return {"type": "object", "properties": {name: {} for name in properties} if isinstance(properties, dict) else {}}
