"""The items of an answer while they are written: the events at their beginning and end, and for each new text.

Each event is its name and its fields; `events.py` numbers and encodes them.
"""

from __future__ import annotations

import abc
import uuid
from typing import Any, ClassVar

from jaxserve.server.generation.answers import AnswerPart
from jaxserve.server.generation.token_logprobs import TokenLogprobInfo
from jaxserve.server.responses_api.bodies import (
    CustomCallItem,
    FunctionCallItem,
    ItemStatus,
    OutputItem,
    OutputMessage,
    OutputText,
    ReasoningItem,
    ReasoningText,
    SummaryText,
)
from jaxserve.server.responses_api.reasoning_text import packed

Event = tuple[str, dict[str, Any]]


class ItemWriter(abc.ABC):
    """An item that is being written, whose id begins with `prefix`."""

    prefix: ClassVar[str]

    def __init__(self) -> None:
        self.id = f"{self.prefix}_{uuid.uuid4().hex}"
        self.pieces: list[str] = []

    @property
    def text(self) -> str:
        """All of the text so far."""
        return "".join(self.pieces)

    @abc.abstractmethod
    def item(self, status: ItemStatus) -> OutputItem:
        """Return the item with the text so far."""

    def begin(self) -> list[Event]:
        """Return the events that follow `output_item.added`."""
        return []

    @abc.abstractmethod
    def delta(self, text: str) -> Event:
        """Return the event of a new text."""

    @abc.abstractmethod
    def end(self) -> list[Event]:
        """Return the events that precede `output_item.done`."""


class MessageWriter(ItemWriter):
    """A message. `logprobs` are those of its tokens, and `new_logprobs` those of which no event has told yet."""

    prefix = "msg"

    def __init__(self) -> None:
        super().__init__()
        self.logprobs: list[TokenLogprobInfo] = []
        self.new_logprobs: list[TokenLogprobInfo] = []

    def item(self, status: ItemStatus) -> OutputMessage:
        content = [] if status == "in_progress" and not self.pieces else [OutputText(self.text, logprobs=self.logprobs)]
        return OutputMessage(id=self.id, status=status, content=content)

    def begin(self) -> list[Event]:
        return [("content_part.added", {"content_index": 0, "part": OutputText("")})]

    def delta(self, text: str) -> Event:
        told, self.new_logprobs = self.new_logprobs, []
        return "output_text.delta", {"content_index": 0, "delta": text, "logprobs": told}

    def end(self) -> list[Event]:
        whole = OutputText(self.text, logprobs=self.logprobs)
        done = {"content_index": 0, "text": whole.text, "logprobs": self.logprobs}
        return [("output_text.done", done), ("content_part.done", {"content_index": 0, "part": whole})]


class ReasoningWriter(ItemWriter):
    """Reasoning. With `packs`, the item has it in the form for sending it back, too."""

    prefix = "rs"

    def __init__(self, *, packs: bool) -> None:
        super().__init__()
        self._packs = packs

    def item(self, status: ItemStatus) -> ReasoningItem:
        shown = [ReasoningText(self.text)] if self.pieces else []
        return self._packed(ReasoningItem(id=self.id, status=status, summary=[], content=shown))

    def begin(self) -> list[Event]:
        return [("content_part.added", {"content_index": 0, "part": ReasoningText("")})]

    def delta(self, text: str) -> Event:
        return "reasoning_text.delta", {"content_index": 0, "delta": text}

    def end(self) -> list[Event]:
        whole = self.text
        return [
            ("reasoning_text.done", {"content_index": 0, "text": whole}),
            ("content_part.done", {"content_index": 0, "part": ReasoningText(whole)}),
        ]

    def _packed(self, item: ReasoningItem) -> ReasoningItem:
        if self._packs and self.pieces:
            item.encrypted_content = packed(self.text)
        return item


class SummaryWriter(ReasoningWriter):
    """Reasoning for a client that asked for a summary."""

    def item(self, status: ItemStatus) -> ReasoningItem:
        shown = [SummaryText(self.text)] if self.pieces else []
        return self._packed(ReasoningItem(id=self.id, status=status, summary=shown))

    def begin(self) -> list[Event]:
        return [("reasoning_summary_part.added", {"summary_index": 0, "part": SummaryText("")})]

    def delta(self, text: str) -> Event:
        return "reasoning_summary_text.delta", {"summary_index": 0, "delta": text}

    def end(self) -> list[Event]:
        whole = self.text
        return [
            ("reasoning_summary_text.done", {"summary_index": 0, "text": whole}),
            ("reasoning_summary_part.done", {"summary_index": 0, "part": SummaryText(whole)}),
        ]


class FunctionCallWriter(ItemWriter):
    """A call of a function, which may have a namespace."""

    prefix = "fc"

    def __init__(self, part: AnswerPart, name: str, namespace: str) -> None:
        super().__init__()
        self._call: dict[str, Any] = {"call_id": part.call_id, "name": name}
        if namespace:
            self._call["namespace"] = namespace

    def item(self, status: ItemStatus) -> FunctionCallItem | CustomCallItem:
        return FunctionCallItem(id=self.id, status=status, arguments=self.text, **self._call)

    def delta(self, text: str) -> Event:
        return "function_call_arguments.delta", {"delta": text}

    def end(self) -> list[Event]:
        return [("function_call_arguments.done", {"name": self._call["name"], "arguments": self.text})]


class CustomCallWriter(FunctionCallWriter):
    """A call of a custom tool."""

    prefix = "ctc"

    def item(self, status: ItemStatus) -> CustomCallItem:
        return CustomCallItem(id=self.id, status=status, input=self.text, **self._call)

    def delta(self, text: str) -> Event:
        return "custom_tool_call_input.delta", {"delta": text}

    def end(self) -> list[Event]:
        return [("custom_tool_call_input.done", {"input": self.text})]
