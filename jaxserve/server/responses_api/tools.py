"""The tools of a Responses request and the choice among them. Owns their shapes, and the names under which the model
sees tools of a namespace."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from jaxserve.errors import InvalidRequestError
from jaxserve.server.generation.inert_fields import InertToolFields
from jaxserve.server.generation.tools import MAX_TOOLS, CallChoice, FunctionName, GrammarSyntax, OfferedTool
from jaxserve.server.http.decoding import validation_error
from jaxserve.server.http.fields import refuse_unsupported_fields
from jaxserve.text.grammars.custom.custom_text import CustomText


class FunctionDefinition(InertToolFields, kw_only=True, forbid_unknown_fields=True, tag="function"):
    """A function."""

    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class AnyText(msgspec.Struct, forbid_unknown_fields=True, tag="text"):
    """Any text."""


class GrammarText(msgspec.Struct, forbid_unknown_fields=True, tag="grammar"):
    """Texts in a grammar, in Lark or as a regular expression."""

    definition: str
    syntax: GrammarSyntax


class CustomDefinition(InertToolFields, kw_only=True, forbid_unknown_fields=True, tag="custom"):
    """A tool whose input is a text, which a grammar holds in any answer if it has one."""

    name: FunctionName
    description: str | None = None
    format: AnyText | GrammarText | None = None


class NamespaceDefinition(InertToolFields, kw_only=True, forbid_unknown_fields=True, tag="namespace"):
    """Tools that belong together. The model sees each as `namespace.name`."""

    name: FunctionName
    tools: Annotated[list[dict[str, Any]], Meta(max_length=MAX_TOOLS)]
    description: str | None = None


class ChosenTool(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The name of a tool, or that of a namespace."""

    type: str
    name: str
    namespace: str | None = None


class ChosenTools(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, tag="allowed_tools"):
    """The tools that may be called. The model sees the others too, so that the prompt begins alike."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[dict[str, Any]], Meta(min_length=1, max_length=MAX_TOOLS)]


_DEFINITIONS: dict[str, Any] = {
    "function": FunctionDefinition,
    "custom": CustomDefinition,
    "namespace": NamespaceDefinition,
}
_CHOOSABLE = ("function", "custom", "namespace")


def full_name(namespace: str | None, name: str) -> str:
    """Return the name under which the model sees a tool."""
    return f"{namespace}.{name}" if namespace else name


@dataclass
class ResponsesTools:
    """The tools that a request offers; `names` has the namespace and the name of each by the name that models see."""

    offered: list[OfferedTool] = field(default_factory=list)
    names: dict[str, tuple[str, str]] = field(default_factory=dict)

    @classmethod
    def of(cls, given: list[dict[str, Any]] | None) -> ResponsesTools:
        """Return the tools of a request. Raises `InvalidRequestError` for a tool that isn't one of the client's own."""
        found = cls()
        for number, tool in enumerate(given or ()):
            found._add(tool, f"tools[{number}]")
        if len(found.offered) > MAX_TOOLS:
            raise InvalidRequestError(
                f"tools: {len(found.offered)} with those in namespaces; send at most {MAX_TOOLS}", param="tools"
            )
        return found

    def choice(self, given: str | dict[str, Any] | None) -> CallChoice:
        """Return which tools a `tool_choice` other than `none` lets the answer call."""
        if not isinstance(given, dict):
            return CallChoice(required=given == "required")
        if given.get("type") != "allowed_tools":
            names = dict.fromkeys(self._chosen(given, "tool_choice"), "tool_choice.name")
            return CallChoice(required=True, names=names, named=given.get("type") != "namespace")
        allowed = _converted(given, ChosenTools, "tool_choice")
        where = "tool_choice.tools"
        places = {f"{where}[{number}]": tool for number, tool in enumerate(allowed.tools)}
        names = {name: f"{place}.name" for place, tool in places.items() for name in self._chosen(tool, place)}
        return CallChoice(required=allowed.mode == "required", names=names)

    def _add(self, given: dict[str, Any], where: str, namespace: NamespaceDefinition | None = None) -> None:
        kind = given.get("type")
        if not isinstance(kind, str) or kind not in _DEFINITIONS or (namespace is not None and kind == "namespace"):
            raise _refused(kind, where, _CHOOSABLE if namespace is None else _CHOOSABLE[:2])
        if kind == "function" and isinstance(given.get("function"), dict):
            raise InvalidRequestError(
                f"{where}.function: this route has the fields of a function in the tool itself; move them there",
                param=f"{where}.function",
            )
        tool = _converted(given, _DEFINITIONS[kind], where)
        refuse_unsupported_fields(tool, f"{where}.")
        if isinstance(tool, NamespaceDefinition):
            for number, inner in enumerate(tool.tools):
                self._add(inner, f"{where}.tools[{number}]", tool)
            return
        described = tool.description
        if namespace is not None and namespace.description and namespace.tools[0] is given:
            about = f"{namespace.name}: {namespace.description}"
            described = f"{about}\n\n{described}" if described else about
        name = full_name(namespace.name if namespace is not None else None, tool.name)
        if namespace is not None:
            self.names[name] = (namespace.name, tool.name)
        if isinstance(tool, FunctionDefinition):
            offered = OfferedTool(name, described, tool.parameters, tool.strict is True, where=where)
        else:
            form = tool.format
            grammar = CustomText(form.syntax, form.definition) if isinstance(form, GrammarText) else None
            offered = OfferedTool(name, described, is_custom=True, grammar=grammar, where=where)
        self.offered.append(offered)

    def _chosen(self, given: dict[str, Any], where: str) -> list[str]:
        """Return the names that the model sees of a tool that was chosen, or of all in a namespace."""
        if given.get("type") not in _CHOOSABLE:
            raise _refused(given.get("type"), where, _CHOOSABLE)
        chosen = _converted(given, ChosenTool, where)
        if chosen.type == "namespace":
            inside = [name for name, (namespace, _) in self.names.items() if namespace == chosen.name]
            return inside or [chosen.name]
        name = full_name(chosen.namespace, chosen.name)
        if name in (tool.name for tool in self.offered):
            return [name]
        inside = [shown for shown, (_, own) in self.names.items() if own == name]
        return inside if len(inside) == 1 else [name]


def _converted(given: Mapping[str, Any], kind: Any, where: str) -> Any:
    try:
        return msgspec.convert(given, kind)
    except msgspec.ValidationError as error:
        raise validation_error(str(error), where, kind=kind) from error


def _refused(kind: Any, where: str, possible: tuple[str, ...]) -> InvalidRequestError:
    """Return the error for a tool that isn't the client's own."""
    if not isinstance(kind, str) or kind in ("", "none", "auto", "required", *_DEFINITIONS):
        text = f"{where}.type must be one of {', '.join(possible)}, got {str(kind)[:40]!r}"
    else:
        text = (
            f"{where}: {str(kind)[:60]!r} is a tool that OpenAI runs or defines, and this server has none; leave it "
            "out, or define a tool of type function or custom that your client runs"
        )
        if kind == "web_search":
            text += '. Codex leaves it out with web_search = "disabled" in its config.toml'
    return InvalidRequestError(text, param=f"{where}.type")
