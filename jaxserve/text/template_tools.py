"""Tools in conversations: the forms of calls that templates want, and a form for templates that know no tools.

For the latter, the first message describes the tools, as Hermes' models read them, and calls and results become text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jaxserve.text.answers.call_texts import CallText, written
from jaxserve.text.answers.json_text import is_object

_PROMPT = """You may call functions. These are described here:
<tools>
{tools}
</tools>

To call a function, write its name and its arguments {how}:
{example}"""
_EXAMPLE = ("the function's name", {"an argument's name": "its value"})


class CallForm(NamedTuple):
    """How a template wants calls: with arguments as JSON text or as objects, in messages with no content or an empty
    one. One that wants objects may show a text as it is (`shows_text`), or fail."""

    arguments_as_text: bool
    null_content: bool
    shows_text: bool = True

    def apply(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Return a message in this form. Arguments that are no object stay the text they are, or none are shown."""
        calls = message.get("tool_calls")
        if not calls:
            return dict(message)
        converted = []
        for call in calls:
            function = dict(call["function"])
            arguments = function.get("arguments")
            if self.arguments_as_text and not isinstance(arguments, str):
                function["arguments"] = json.dumps(arguments, ensure_ascii=False)
            elif not self.arguments_as_text and isinstance(arguments, str):
                found = _object(arguments)
                function["arguments"] = found if found is not None else arguments if self.shows_text else {}
            converted.append({**call, "function": function})
        content = message.get("content") or (None if self.null_content else "")
        return {**message, "content": content, "tool_calls": converted}


CALL_FORMS = [CallForm(as_text, null) for null in (False, True) for as_text in (False, True)]
"""All forms, the usual one first."""


def described_in_text(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], form: CallText
) -> list[dict[str, Any]]:
    """Return the messages with the tools in the system message, or in the first message of the user.

    Calls are asked for as `form` writes them.
    """
    lines = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    prompt = _PROMPT.format(tools=lines, how=form.example, example=written(form, [_EXAMPLE]))
    found = [dict(message) for message in messages]
    system = next((message for message in found if message.get("role") == "system"), None)
    first = system or next((message for message in found if message.get("role") == "user"), None)
    if first is None:
        return [{"role": "system", "content": prompt}, *found]
    text = first.get("content") or ""
    if isinstance(text, str):
        first["content"] = f"{text}\n\n{prompt}" if first is system else f"{prompt}\n\n{text}"
    else:
        part = {"type": "text", "text": prompt}
        first["content"] = [*text, part] if first is system else [part, *text]
    return found


def calls_in_text(messages: Sequence[Mapping[str, Any]], form: CallText) -> list[dict[str, Any]]:
    """Return the messages as texts only: a call is part of the assistant's text, as `form` writes it, and a result is a
    message of the user."""
    found: list[dict[str, Any]] = []
    after_tool = False
    for message in messages:
        changed = dict(message)
        if message.get("role") == "tool":
            text = f"<tool_response>\n{_text(message.get('content'))}\n</tool_response>"
            if after_tool:
                found[-1]["content"] += f"\n{text}"
                continue
            changed = {"role": "user", "content": text}
        elif changed.pop("tool_calls", None):
            asked = CallForm(arguments_as_text=False, null_content=False).apply(message)["tool_calls"]
            calls = written(form, [(call["function"]["name"], call["function"]["arguments"]) for call in asked])
            changed["content"] = "\n".join(filter(None, (_text(message.get("content")), calls)))
        after_tool = message.get("role") == "tool"
        found.append(changed)
    return found


def _object(text: str) -> dict[str, Any] | None:
    """Return the object that a JSON text is, or None."""
    return json.loads(text) if is_object(text.strip()) else None


def _text(content: Any) -> str:
    if isinstance(content, list):
        return "\n".join(part.get("text", "") if isinstance(part, Mapping) else str(part) for part in content)
    return content or ""
