"""How the answers of a chat request are held in a form and taken apart: reasoning, content, calls of tools."""

from __future__ import annotations

import bisect
import enum
import re
import uuid
from dataclasses import dataclass

from msgspec import UNSET

from jaxserve.api_types import FinishReason
from jaxserve.server.generation.tools import ToolUse
from jaxserve.server.openai.responses import CallDelta, ChatDelta, ChatMessage, FunctionCall, FunctionDelta, ToolCall
from jaxserve.server.server_state import LoadedModel
from jaxserve.text.answers.answer import Answer
from jaxserve.text.answers.call_texts import CallText
from jaxserve.text.answers.held import channels_grammar, either, whole_answer
from jaxserve.text.answers.held_calls import calls_grammar, free_calls_grammar, held_calls
from jaxserve.text.answers.reader import Format, Part
from jaxserve.text.answers.reasoning import Thinking
from jaxserve.text.grammars.lark import MARK
from jaxserve.text.output import OutputDelta


@dataclass(frozen=True)
class AnswerPlan:
    """How the answers of a request are read: by `formats`, each of which reads the content of the one before.

    Without formats an answer is content only. `reasons`: whether reasoning is told from content; then `shows_reasoning`
    says whether the client gets it. `held` is the form of calls that a grammar holds in a free answer.
    """

    formats: tuple[Format, ...]
    tools: ToolUse | None
    reasons: bool
    shows_reasoning: bool
    short_ids: bool
    held: CallText | None = None

    def make_id(self) -> str:
        """Return a new id of a call; Mistral's templates want nine characters."""
        return uuid.uuid4().hex[:9] if self.short_ids else f"call_{uuid.uuid4().hex[:24]}"


class Place(enum.Enum):
    """Where in a prompt's last answer its reasoning is: still to come, if at all, going on, or over."""

    BEFORE = enum.auto()
    INSIDE = enum.auto()
    AFTER = enum.auto()


def place_in_reasoning(marks: Thinking | None, prompt: str, last_text: str, *, continues: bool) -> Place:
    """Return where an answer to a prompt begins.

    What counts are the marks that follow the text of the last message; with `continues`, the answer continues that
    message, and the marks in it and directly before it count.
    """
    if marks is None:
        return Place.BEFORE
    text = last_text.strip()
    at = prompt.rfind(text) if text else -1
    if at < 0:  # the template shows something else
        answer = "" if continues else prompt
        before = prompt
    else:
        answer = prompt[at if continues else at + len(text) :]
        before = prompt[:at] if continues else ""
    found = re.findall("|".join(map(re.escape, (*marks.begins, *marks.ends))), answer if at >= 0 else "")
    if not found:
        found = [mark for mark in (*marks.begins, *marks.ends) if before.rstrip().endswith(mark)]
    if found:
        return Place.INSIDE if found[-1] in marks.begins else Place.AFTER
    return Place.AFTER if continues else Place.BEFORE


def plan_answer(
    loaded: LoadedModel,
    tools: ToolUse | None,
    place: Place,
    *,
    is_held: bool,
    separates_reasoning: bool,
    shows_reasoning: bool,
) -> AnswerPlan:
    """Return how answers are read that begin at a place in their reasoning. With `is_held`, they have a grammar."""
    names = loaded.formats
    reasons = names.reasoning is not None and separates_reasoning
    formats: list[Format] = []
    if names.reasoning is not None and (reasons or tools is not None):  # calls come after it, wherever it is reported
        formats.append(names.reasoning.read(inside=place is Place.INSIDE))
    if tools is not None and not names.in_channels:
        formats.append(held_calls(names.calls.held) if tools.required else names.calls.read(tools.schemas))
    has_free_calls = tools is not None and not tools.required and not names.in_channels
    held = names.calls.free if is_held and has_free_calls else None
    return AnswerPlan(tuple(formats), tools, reasons, shows_reasoning, names.calls.short_ids, held)


def answer_grammar(loaded: LoadedModel, tools: ToolUse | None, form: str, place: Place) -> str:
    """Return the grammar of answers that begin at a place in their reasoning: of their `form`, of calls, or of both.

    It is "" if anything may follow. An answer that must be a call has no other form. Raises `ValueError` for what can't
    be held.
    """
    names = loaded.formats
    strict = frozenset() if tools is None else tools.strict
    if names.in_channels:
        if not form and (tools is None or not (tools.required or tools.strict)):
            return ""
        schemas, required = ({}, False) if tools is None else (tools.schemas, tools.required)
        return channels_grammar(form, schemas, loaded.tokenizer, required=required, strict=strict)
    if tools is not None and tools.required:
        form = calls_grammar(names.calls.held, tools.schemas, loaded.tokenizer, several=tools.several, strict=strict)
    elif tools is not None and (form or tools.strict):
        make = calls_grammar if form else free_calls_grammar
        calls = make(names.calls.free, tools.schemas, loaded.tokenizer, several=tools.several, strict=strict)
        form = either(form, calls) if form else calls
    if not form or place is Place.AFTER:
        return form
    return whole_answer(form, names, loaded.tokenizer, inside=place is Place.INSIDE)


class AnswerState:
    """The answer of one choice so far."""

    def __init__(self, plan: AnswerPlan) -> None:
        self._plan = plan
        self._answer = Answer(plan.formats)
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[tuple[str, str, list[str]]] = []
        self._num_calls = 0
        self._offsets: list[int] = []

    @property
    def num_reasoning_tokens(self) -> int:
        """The number of tokens up to the end of the reasoning."""
        return bisect.bisect_left(self._offsets, self._answer.reasoning_end)

    def push(self, delta: OutputDelta) -> ChatDelta:
        """Return what a new output adds to the message."""
        if self._plan.reasons:
            self._offsets += delta.text_offsets
        added = ChatDelta()
        parts = self._answer.push(delta.text, last=delta.finish_reason is not None)
        if delta.finish_reason is FinishReason.LENGTH and self._plan.held is not None:
            parts = _without_cut_call(parts, self._plan.held)
        for part in parts:
            self._add(part, added)
        return added

    def _add(self, part: Part, added: ChatDelta) -> None:
        if part.kind == "content" or (part.kind == "reasoning" and not self._plan.reasons):
            self._content.append(part.text)
            added.content = (added.content or "") + part.text
        elif part.kind == "reasoning":
            if self._plan.shows_reasoning:
                self._reasoning.append(part.text)
                added.reasoning_content = (added.reasoning_content or "") + part.text
        elif self._plan.tools is None:  # a call, though the request has no tools
            self._add(Part("content", part.text), added)
        else:
            self._num_calls += part.kind == "call"
            if self._num_calls == 1 or self._plan.tools.several:
                self._add_call(part, added)

    def _add_call(self, part: Part, added: ChatDelta) -> None:
        deltas = added.tool_calls = added.tool_calls or []
        if part.kind == "call":
            call_id = self._plan.make_id()
            deltas.append(CallDelta(len(self._calls), FunctionDelta("", part.text), call_id, "function"))
            self._calls.append((call_id, part.text, []))
            return
        index = len(self._calls) - 1
        self._calls[-1][2].append(part.text)
        if not deltas or deltas[-1].index != index:
            deltas.append(CallDelta(index, FunctionDelta("")))
        deltas[-1].function.arguments += part.text

    def message(self) -> ChatMessage:
        """Return the whole message."""
        content = "".join(self._content)
        message = ChatMessage("assistant", content or (None if self._calls or self._reasoning else ""))
        if self._plan.reasons and self._plan.shows_reasoning:
            message.reasoning_content = "".join(self._reasoning) or None
        message.tool_calls = [
            ToolCall(call_id, FunctionCall(name, "".join(arguments))) for call_id, name, arguments in self._calls
        ] or UNSET
        return message

    def finish_reason(self, reason: FinishReason) -> str:
        """Return why the answer ended, as OpenAI says it; one that was made to call a named function just stopped."""
        tools = self._plan.tools
        calls = reason is FinishReason.STOP and self._calls and tools is not None and not tools.named
        return "tool_calls" if calls else reason.value


def _without_cut_call(parts: list[Part], form: CallText) -> list[Part]:
    """Return the last parts of an answer without a call that was cut off, or without the beginning of a mark."""
    others = [*parts]
    text = ""
    while others and others[-1].kind == "content":
        text = others.pop().text + text
    marks = (*form.marks, *MARK.findall(form.end + form.closing))
    begun = (rf"{re.escape(mark[:size])}\Z" for mark in marks for size in range(len(mark) - 1, 1, -1))
    found = re.search(rf"\s*(?:{'|'.join((*map(re.escape, form.marks), *begun))})", text)
    return parts if found is None else [*others, Part("content", text[: found.start()])]
