"""Builds the messages of a chat template from a conversation in another API's form. Owns which neighbours become one
message, and what a template can't show where it stands; knows no API's shapes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxserve.server.generation.template_facts import shows_later_system, shows_text_after_result
from jaxserve.server.server_state import LoadedModel

# Agents put texts that begin with this beside results of tools.
_REMINDER = "<system-reminder>"


@dataclass(frozen=True)
class TemplateAbilities:
    """What a chat template can show: messages of the system after the first in their place, and messages of the user
    after results of tools."""

    later_system: bool = True
    text_after_result: bool = True


async def template_abilities(loaded: LoadedModel) -> TemplateAbilities:
    """Return what the model's template can show."""
    return TemplateAbilities(await shows_later_system(loaded), await shows_text_after_result(loaded))


# What stands between the texts that become one message.
_BETWEEN = {"system": "\n", "user": "\n", "assistant": "", "tool": "\n\n"}


@dataclass
class MessageList:
    """The messages of a chat so far. Neighbours of the same role become one message, as many templates want them: while
    they are collected, each has a list of texts as its content.

    Nothing moves: what a template can't show in its place becomes a text there, so that the prompt of the next turn
    begins with the prompt of this one.
    """

    can: TemplateAbilities
    found: list[dict[str, Any]] = field(default_factory=list)
    names: dict[str, str] = field(default_factory=dict)
    """The functions of the calls so far, by the ids of the calls."""

    def add(self, role: str, texts: Sequence[str]) -> None:
        """Add texts of the system or of the user."""
        if not texts:
            return
        last = self.found[-1] if self.found else {}
        begins = not self.found or (len(self.found) == 1 and last["role"] == "system")
        if role == "system" and not begins and not self.can.later_system:
            role, texts = "user", [f"<system>\n{text}\n</system>" for text in texts]
        joins = last.get("role") == role and (role == "user" or begins)
        if joins or (last.get("role") == "tool" and role == "user" and self._belong_to_result(texts)):
            last["content"] += texts
        else:
            self.found.append({"role": role, "content": [*texts]})

    def add_answer(self, text: str, reasoning: str = "", calls: Sequence[tuple[str, str, Any]] = ()) -> None:
        """Add what the assistant wrote: a text, its reasoning, and calls with their id, function and arguments."""
        if not (text or reasoning or calls):
            return
        if not self.found or self.found[-1]["role"] != "assistant":
            self.found.append({"role": "assistant", "content": []})
        last = self.found[-1]
        last["content"] += [text] if text else []
        if reasoning:
            last.setdefault("reasoning_content", []).append(reasoning)
        for id, name, arguments in calls:
            self.names[id] = name
            call = {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}
            last.setdefault("tool_calls", []).append(call)

    def add_result(self, call_id: str, text: str) -> None:
        """Add the result of a call."""
        before, last = ([{}, {}, *self.found[-2:]])[-2:]
        texts = [text]
        if not self.can.text_after_result and last.get("role") == "user" and "tool_calls" in before:
            texts = [*self.found.pop()["content"], text]
        message: dict[str, Any] = {"role": "tool", "tool_call_id": call_id, "content": texts}
        if name := self.names.get(call_id):
            message["name"] = name
        self.found.append(message)

    def rendered(self) -> list[dict[str, Any]]:
        """Return the messages, each with one text: some templates would join several without anything between."""
        found = []
        for message in self.found:
            joined = {**message, "content": _BETWEEN[message["role"]].join(message["content"])}
            if "reasoning_content" in message:
                joined["reasoning_content"] = "\n".join(message["reasoning_content"])
            found.append(joined)
        return found

    def _belong_to_result(self, texts: Sequence[str]) -> bool:
        """Return whether texts after a result become part of it. A reminder is no question: after one, templates would
        drop the reasoning before it."""
        return not self.can.text_after_result or all(text.startswith(_REMINDER) for text in texts)
