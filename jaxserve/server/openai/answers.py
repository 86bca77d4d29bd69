"""How the answers of a chat request are held in a form and taken apart: reasoning, content, calls of tools."""

from __future__ import annotations

import bisect
import uuid
from dataclasses import dataclass

from msgspec import UNSET

from jaxserve.api_types import FinishReason
from jaxserve.errors import InvalidRequestError
from jaxserve.server.openai.responses import CallDelta, ChatDelta, ChatMessage, FunctionCall, FunctionDelta, ToolCall
from jaxserve.server.openai.tools import ToolUse
from jaxserve.server.server_state import LoadedModel
from jaxserve.text.answers.answer import Answer
from jaxserve.text.answers.formats import HARMONY
from jaxserve.text.answers.harmony import harmony
from jaxserve.text.answers.held import channels_grammar, either, whole_answer
from jaxserve.text.answers.held_calls import (
    calls_grammar,
    free_calls_grammar,
    free_form,
    held_calls,
    held_form,
)
from jaxserve.text.answers.reader import Format, Part
from jaxserve.text.answers.reasoning import thinking
from jaxserve.text.output import OutputDelta


@dataclass(frozen=True)
class AnswerPlan:
    """How the answers of a request are read: by `formats`, each of which reads the content of the one before.

    Without formats an answer is content only. `reasons`: whether reasoning is told from content; then `shows_reasoning`
    says whether the client gets it.
    """

    formats: tuple[Format, ...]
    tools: ToolUse | None
    reasons: bool
    shows_reasoning: bool
    short_ids: bool

    def make_id(self) -> str:
        """Return a new id of a call; Mistral's templates want nine characters."""
        return uuid.uuid4().hex[:9] if self.short_ids else f"call_{uuid.uuid4().hex[:24]}"


def plan_answer(
    loaded: LoadedModel, tools: ToolUse | None, prompt: str, *, separates_reasoning: bool, shows_reasoning: bool
) -> AnswerPlan:
    """Return how answers to a prompt are read."""
    names = loaded.formats
    reasons = bool(names.reasoning) and separates_reasoning
    formats: list[Format] = []
    if reasons or tools is not None:  # calls come after the reasoning, wherever that is reported
        if names.reasoning == HARMONY:
            formats.append(harmony)
        elif names.thinking is not None:
            formats.append(thinking(names.thinking, inside=_ends_with(prompt, names.thinking.begins)))
    if tools is not None and not names.in_channels:
        formats.append(held_calls(held_form(names)) if tools.required else names.read_calls(tools.schemas))
    return AnswerPlan(tuple(formats), tools, reasons, shows_reasoning, short_ids=names.calls == "mistral")


def answer_grammar(loaded: LoadedModel, tools: ToolUse | None, form: str, prompt: str) -> str:
    """Return the grammar of answers to a prompt: of their `form`, of calls, or of both; "" if anything may follow.

    Raises `InvalidRequestError` for what does not go together, and `ValueError` for what can't be held.
    """
    names = loaded.formats
    if tools is not None and tools.required and form:
        raise InvalidRequestError(
            "tool_choice asks for a call, and another field for a form of the answer; it can have one",
            param="tool_choice",
        )
    if names.in_channels:
        if not form and (tools is None or not (tools.required or tools.strict)):
            return ""
        schemas = {} if tools is None else tools.schemas
        return channels_grammar(form, schemas, loaded.tokenizer, required=tools is not None and tools.required)
    if tools is not None and tools.required:
        form = calls_grammar(held_form(names), tools.schemas, loaded.tokenizer, several=tools.several)
    elif tools is not None and (form or tools.strict):
        make = calls_grammar if form else free_calls_grammar
        calls = make(free_form(names), tools.schemas, loaded.tokenizer, several=tools.several)
        form = either(form, calls) if form else calls
    marks = names.thinking
    if not form or (marks is not None and _ends_with(prompt, marks.ends)):
        return form
    return whole_answer(form, names, loaded.tokenizer, inside=marks is not None and _ends_with(prompt, marks.begins))


def _ends_with(prompt: str, marks: tuple[str, ...]) -> bool:
    return prompt.rstrip().endswith(marks)


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
        for part in self._answer.push(delta.text, last=delta.finish_reason is not None):
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
