"""The fields of a chat that offer tools, and what they ask for: which functions, which calls, and in which form."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from jaxserve.errors import InvalidRequestError

MAX_TOOLS = 1024
_FUNCTION_NAME = "^[a-zA-Z0-9_./:-]{1,256}$"

FunctionName = Annotated[str, Meta(pattern=_FUNCTION_NAME)]


class ToolFunction(msgspec.Struct, forbid_unknown_fields=True):
    """A function that the model may call. `parameters` is the JSON schema of its arguments; without it, it has none.

    With `strict`, arguments always match the schema, whatever `tool_choice` is.
    """

    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    # Agents send these to servers that load tools later or bill caches; they have no effect.
    cache_control: Any = None
    defer_loading: Any = None


class Tool(msgspec.Struct, forbid_unknown_fields=True):
    """A tool; functions are the only type."""

    type: Literal["function"]
    function: ToolFunction
    cache_control: Any = None
    defer_loading: Any = None


class NamedFunction(msgspec.Struct, forbid_unknown_fields=True):
    """The name of a function."""

    name: str


class NamedTool(msgspec.Struct, forbid_unknown_fields=True):
    """The choice of one function, which is always called."""

    type: Literal["function"]
    function: NamedFunction


Tools = Annotated[list[Tool], Meta(max_length=MAX_TOOLS)]
ToolChoice = Literal["none", "auto", "required"] | NamedTool


@dataclass(frozen=True)
class ToolUse:
    """The tools that a request uses. Templates get `shown`. `schemas` has the arguments' JSON schema of each function
    that may be called.

    With `required`, the answer has only calls. `named`: the request names the one function to call. `strict`: the
    functions whose calls are held in any answer. Without `several`, there is at most one call.
    """

    shown: list[dict[str, Any]]
    schemas: dict[str, dict[str, Any]]
    required: bool
    named: bool
    strict: frozenset[str]
    several: bool

    def loosened(self) -> ToolUse | None:
        """Return the same with any arguments for functions that aren't strict; None if all must be held as they are."""
        if self.required or self.strict >= self.schemas.keys():
            return None
        return replace(
            self,
            schemas={name: one if name in self.strict else _only_names(one) for name, one in self.schemas.items()},
        )


def tool_use(tools: list[Tool] | None, choice: ToolChoice | None, *, several: bool) -> ToolUse | None:
    """Return how a request uses tools, or None if it offers none or chooses none.

    Raises `InvalidRequestError` for a choice that the tools don't offer, for two different functions of one name, and
    for one whose arguments aren't an object.
    """
    if not tools:
        if choice not in (None, "none", "auto"):
            raise InvalidRequestError("tool_choice asks for a call, but there are no tools", param="tool_choice")
        return None
    by_name: dict[str, ToolFunction] = {}
    for number, tool in enumerate(tools):
        _check(tool.function, by_name.setdefault(tool.function.name, tool.function), f"tools[{number}].function")
    if choice == "none":
        return None
    named = choice.function.name if isinstance(choice, NamedTool) else None
    if named is not None and named not in by_name:
        param = "tool_choice.function.name"
        raise InvalidRequestError(
            f"{param}: no tool is called {named[:100]!r}; name one of `tools`, or add it there", param=param
        )
    functions = [function for name, function in by_name.items() if named in (None, name)]
    return ToolUse(
        shown=[_shown(function) for function in by_name.values()],
        schemas={function.name: _schema(function) for function in functions},
        required=choice == "required" or named is not None,
        named=named is not None,
        strict=frozenset(function.name for function in functions if function.strict),
        several=several and named is None,
    )


def _check(function: ToolFunction, first: ToolFunction, where: str) -> None:
    """Raise `InvalidRequestError` for a function that can't be called, or that has the name of a different one.

    `first` is the first function of this name: it may be there several times.
    """
    if function != first:
        param = f"{where}.name"
        raise InvalidRequestError(
            f"{param}: {function.name!r} is the name of another function too; give each a name of its own", param=param
        )
    kind = (function.parameters or {}).get("type")
    if kind is not None and "object" not in (kind if isinstance(kind, list) else [kind]):
        param = f"{where}.parameters.type"
        raise InvalidRequestError(
            f"{param}: arguments are an object, got {str(kind)[:40]!r}; make it a property of an object",
            param=param,
        )


def _shown(function: ToolFunction) -> dict[str, Any]:
    """Return a tool for a template: the fields that were given, except `strict`, which the model need not know."""
    fields = {"name": function.name, "description": function.description, "parameters": function.parameters}
    return {"type": "function", "function": {name: value for name, value in fields.items() if value is not None}}


def _schema(function: ToolFunction) -> dict[str, Any]:
    if function.parameters is None:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    return {"type": "object"} | function.parameters


def _only_names(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema that has the parameters of another one, with any values."""
    properties = schema.get("properties")
    return {"type": "object", "properties": {name: {} for name in properties} if isinstance(properties, dict) else {}}
