"""The items of an input, and the messages that they become for a chat template.

Items come with or without ids and status, as agents send them back; keys that the server doesn't know are left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from jaxserve.errors import InvalidRequestError
from jaxserve.server.generation.message_list import MessageList
from jaxserve.server.generation.tools import INPUT
from jaxserve.server.http.decoding import validation_error
from jaxserve.server.responses_api.reasoning_text import unpacked
from jaxserve.server.responses_api.tools import full_name


class InputPart(msgspec.Struct):
    """A part of a message or of an output; only texts and refusals are supported."""

    type: str
    text: str | None = None
    refusal: str | None = None


class InputMessage(msgspec.Struct):
    """A message."""

    role: Literal["user", "system", "developer", "assistant"]
    content: str | list[InputPart]


class ReasoningInput(msgspec.Struct):
    """Reasoning of the assistant, as text, as a summary, or in the form for sending it back."""

    summary: list[InputPart] | None = None
    content: list[InputPart] | None = None
    encrypted_content: str | None = None


class FunctionCallInput(msgspec.Struct):
    """A call of a function."""

    call_id: str
    name: str
    arguments: str | dict[str, Any] | None = None
    namespace: str | None = None


class CustomCallInput(msgspec.Struct):
    """A call of a custom tool."""

    call_id: str
    name: str
    input: str
    namespace: str | None = None


class CallOutputInput(msgspec.Struct):
    """What a call returned."""

    call_id: str
    output: str | list[InputPart]


_KINDS: dict[str, type[msgspec.Struct]] = {
    "message": InputMessage,
    "reasoning": ReasoningInput,
    "function_call": FunctionCallInput,
    "function_call_output": CallOutputInput,
    "custom_tool_call": CustomCallInput,
    "custom_tool_call_output": CallOutputInput,
}
_TEXTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text")
_PARTS = {
    "input_image": "images are not supported",
    "input_file": "files are not supported",
    "input_audio": "audio is not supported",
    "computer_screenshot": "screenshots are not supported",
}


class InputReader:
    """Adds items to `messages`, one after another. `special_texts` are those of the model's special tokens."""

    def __init__(self, messages: MessageList, special_texts: Sequence[str]) -> None:
        self.messages = messages
        self._special_texts = special_texts
        self._open_calls: dict[str, str] = {}
        self._closed_calls: set[str] = set()

    def add(self, given: Mapping[str, Any], where: str) -> None:
        """Add an item. Raises `InvalidRequestError` naming what can't be used."""
        kind = kind_of(given)
        if kind not in _KINDS:
            raise _refused(kind, where)
        try:
            item = msgspec.convert(given, _KINDS[kind])
        except msgspec.ValidationError as error:
            raise validation_error(str(error), where, kind=_KINDS[kind]) from error
        match item:
            case InputMessage("assistant"):
                self.messages.add_answer(_text(item.content, f"{where}.content"))
            case InputMessage():
                role = "user" if item.role == "user" else "system"
                self.messages.add(role, _texts(item.content, f"{where}.content"))
            case ReasoningInput():
                self.messages.add_answer("", self._reasoning(item, where))
            case FunctionCallInput():
                self._add_call(item.call_id, full_name(item.namespace, item.name), item.arguments or "{}", where)
            case CustomCallInput():
                self._add_call(item.call_id, full_name(item.namespace, item.name), {INPUT: item.input}, where)
            case CallOutputInput():
                self._add_output(item, where)

    def finish(self) -> None:
        """Raise `InvalidRequestError` for a call without its output."""
        for call_id, where in self._open_calls.items():
            raise InvalidRequestError(
                f"No tool output found for the call {call_id[:100]}; add an item with its output", param=where
            )

    def _reasoning(self, item: ReasoningInput, where: str) -> str:
        if item.content:
            return _text(item.content, f"{where}.content")
        packed = unpacked(item.encrypted_content or "", self._special_texts)
        return _text(item.summary or [], f"{where}.summary", "\n") if packed is None else packed

    def _add_call(self, call_id: str, name: str, arguments: str | dict[str, Any], where: str) -> None:
        if call_id in self._open_calls or call_id in self._closed_calls:
            raise InvalidRequestError(
                f"{where}.call_id: {call_id[:100]!r} is the id of an earlier call too; send each call once",
                param=f"{where}.call_id",
            )
        self._open_calls[call_id] = where
        self.messages.add_answer("", calls=[(call_id, name, arguments)])

    def _add_output(self, item: CallOutputInput, where: str) -> None:
        if self._open_calls.pop(item.call_id, None) is None:
            again = item.call_id in self._closed_calls
            problem = "A second output" if again else "No tool call found"
            advice = "send one output for each call" if again else "add the call before its output"
            raise InvalidRequestError(
                f"{problem} for the output with call_id {item.call_id[:100]}; {advice}", param=f"{where}.call_id"
            )
        self._closed_calls.add(item.call_id)
        self.messages.add_result(item.call_id, _text(item.output, f"{where}.output", "\n"))


def kind_of(item: Mapping[str, Any]) -> str:
    """Return the type of an item, which messages and references need not say."""
    kind = item.get("type")
    if kind is None:
        return "message" if "role" in item or "id" not in item else "item_reference"
    return str(kind)


def _texts(content: str | Sequence[InputPart], where: str) -> list[str]:
    if isinstance(content, str):
        return [content] if content else []
    found = []
    for number, part in enumerate(content):
        text = part.text if part.type in _TEXTS else part.refusal if part.type == "refusal" else None
        if text is None:
            place = f"{where}[{number}]"
            problem = _PARTS.get(part.type, f"only {', '.join(_TEXTS)} with a text, and refusal, are read")
            raise InvalidRequestError(
                f"{place} has type {part.type[:40]!r}: {problem}; leave it out, or describe it in a text", param=place
            )
        found += [text] if text else []
    return found


def _text(content: str | Sequence[InputPart], where: str, between: str = "") -> str:
    return between.join(_texts(content, where))


def _refused(kind: str, where: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"{where} has type {kind[:60]!r}: this server makes and reads no such items; send one of "
        f"{', '.join(_KINDS)}, or item_reference for an item of a stored response",
        param=f"{where}.type",
    )
