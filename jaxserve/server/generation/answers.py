"""How answers are held in a form and taken apart: reasoning, content, calls of tools. Knows no API's shapes."""

from __future__ import annotations

import bisect
import enum
import re
import uuid
from dataclasses import dataclass
from typing import Literal

import msgspec

from jaxserve.api_types import FinishReason
from jaxserve.server.generation.custom_input import CustomInputReader
from jaxserve.server.generation.tools import ToolUse
from jaxserve.server.server_state import LoadedModel
from jaxserve.text.answers.answer import Answer
from jaxserve.text.answers.call_texts import CallText
from jaxserve.text.answers.held import channels_grammar, either, whole_answer
from jaxserve.text.answers.held_calls import calls_grammar, free_calls_grammar, held_calls
from jaxserve.text.answers.reader import Format, Kind, Part
from jaxserve.text.answers.reasoning import Thinking
from jaxserve.text.grammars.lark import MARK
from jaxserve.text.output import OutputDelta


@dataclass(frozen=True)
class AnswerPlan:
    """How the answers of a request are read: by `formats`, each of which reads the content of the one before.

    Without formats an answer is content only. `reasons` says whether reasoning is told from content, `shows_reasoning`
    whether the client gets it. `held` is the form of calls that a grammar holds in a free answer. With
    `reads_special_tokens`, the marks in answers are special tokens, and the text must have these.
    """

    formats: tuple[Format, ...]
    tools: ToolUse | None
    reasons: bool
    shows_reasoning: bool
    short_ids: bool
    held: CallText | None = None
    reads_special_tokens: bool = False

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

    The marks that follow the text of the last message count; with `continues`, the answer continues that message, and
    the marks in it and directly before it count.
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
    ends_reasoning: bool = False,
) -> AnswerPlan:
    """Return how answers are read that begin at a place in their reasoning. With `is_held`, they have a grammar; with
    `ends_reasoning`, the prompt ends with the mark that ends it."""
    names = loaded.formats
    reasons = names.reasoning is not None and separates_reasoning
    formats: list[Format] = []
    if names.reasoning is not None and (reasons or tools is not None):  # calls come after it, wherever it is reported
        formats.append(names.reasoning.read(inside=place is Place.INSIDE, ended=ends_reasoning))
    if tools is not None and not names.in_channels:
        formats.append(held_calls(names.calls.held) if tools.required else names.calls.read(tools.schemas))
    has_free_calls = tools is not None and not tools.required and not names.in_channels
    held = names.calls.free if is_held and has_free_calls else None
    special = bool(formats) and names.shows_special_tokens(loaded.tokenizer)
    return AnswerPlan(tuple(formats), tools, reasons, shows_reasoning, names.calls.short_ids, held, special)


def answer_grammar(loaded: LoadedModel, tools: ToolUse | None, form: str, place: Place) -> str:
    """Return the grammar of answers that begin at a place in their reasoning: of their `form`, of calls, or of both.

    It is "" if anything may follow. An answer that must be a call has no other form. Raises `ValueError` for what can't
    be held.
    """
    names = loaded.formats
    strict = frozenset() if tools is None else tools.strict
    if names.in_channels:
        if not form and (tools is None or not (tools.required or tools.held)):
            return ""
        schemas, required = ({}, False) if tools is None else (tools.schemas, tools.required)
        return channels_grammar(form, schemas, loaded.tokenizer, required=required, strict=strict)
    if tools is not None and tools.required:
        form = calls_grammar(names.calls.held, tools.schemas, loaded.tokenizer, several=tools.several, strict=strict)
    elif tools is not None and (form or tools.held):
        make = calls_grammar if form else free_calls_grammar
        calls = make(names.calls.free, tools.schemas, loaded.tokenizer, several=tools.several, strict=strict)
        form = either(form, calls) if form else calls
    if not form or place is Place.AFTER:
        return form
    return whole_answer(form, names, loaded.tokenizer, inside=place is Place.INSIDE)


class AnswerPart(msgspec.Struct, frozen=True, gc=False):
    """A new part of an answer. Parts of a call have its number and its id: the name comes first, then its arguments, as
    pieces of one JSON text, or the `input` of a custom tool, as pieces of any text."""

    kind: Kind | Literal["input"]
    text: str
    call: int = 0
    call_id: str = ""
    is_custom: bool = False


class AnswerReader:
    """Takes the answer of one choice apart, and leaves out what the client doesn't get."""

    def __init__(self, plan: AnswerPlan) -> None:
        self._plan = plan
        self._answer = Answer(plan.formats)
        self._num_calls = 0
        self._call_id = ""
        self._input: CustomInputReader | None = None
        self._offsets: list[int] = []

    @property
    def num_reasoning_tokens(self) -> int | None:
        """The number of tokens up to the end of the reasoning; None if it isn't told from content."""
        return bisect.bisect_left(self._offsets, self._answer.reasoning_end) if self._plan.reasons else None

    @property
    def asks_for_calls(self) -> bool:
        """Whether the answer has calls that the client didn't order by the function's name."""
        tools = self._plan.tools
        return self._num_calls > 0 and tools is not None and not tools.named

    def push(self, delta: OutputDelta) -> list[AnswerPart]:
        """Return the parts that a new output adds."""
        plan = self._plan
        if not plan.formats:
            return [AnswerPart("content", delta.text)] if delta.text else []
        if plan.reasons:
            self._offsets += delta.text_offsets
        parts = self._answer.push(delta.text, last=delta.finish_reason is not None)
        if delta.finish_reason is FinishReason.LENGTH and plan.held is not None:
            parts = _without_cut_call(parts, plan.held)
        found: list[AnswerPart] = []
        for kind, text in parts:
            if kind != "arguments":
                self._end_input(found)
            if kind == "content":
                found.append(AnswerPart("content", text))
            elif kind == "reasoning" and plan.reasons:
                if plan.shows_reasoning:
                    found.append(AnswerPart(kind, text))
            elif kind == "reasoning" or plan.tools is None:  # a call, though the request has no tools
                found.append(AnswerPart("content", text))
            else:
                self._add_call(kind, text, plan.tools, found)
        if delta.finish_reason is not None:
            self._end_input(found)
        return found

    def _add_call(self, kind: Kind, text: str, tools: ToolUse, found: list[AnswerPart]) -> None:
        """Add the name of a call, or a piece of its arguments."""
        if kind == "call":
            self._num_calls += 1
            self._call_id = self._plan.make_id()
        if self._num_calls > 1 and not tools.several:
            return
        if kind == "call":
            is_custom = text in tools.customs
            self._input = CustomInputReader() if is_custom else None
            found.append(AnswerPart(kind, text, self._num_calls - 1, self._call_id, is_custom))
        elif self._input is not None:
            self._add_input(self._input.push(text), found)
        else:
            found.append(AnswerPart(kind, text, self._num_calls - 1, self._call_id))

    def _end_input(self, found: list[AnswerPart]) -> None:
        if self._input is not None:
            rest, self._input = self._input.finish(), None
            self._add_input(rest, found)

    def _add_input(self, text: str, found: list[AnswerPart]) -> None:
        if text:
            found.append(AnswerPart("input", text, self._num_calls - 1, self._call_id, is_custom=True))


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
