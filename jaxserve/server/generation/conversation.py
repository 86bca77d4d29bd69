"""Turns a conversation into the ids of its prompt, the grammar of its answers, and the plan by which these are read."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any, NamedTuple

from jaxserve.api_types import StructuredOutputs, ThinkingBudget
from jaxserve.errors import InvalidRequestError
from jaxserve.server.generation.answers import AnswerPlan, Place, answer_grammar, place_in_reasoning, plan_answer
from jaxserve.server.generation.chat_messages import (
    ChatOptions,
    RenderedPrompt,
    render_prompt,
    switches_thinking,
    text_of,
)
from jaxserve.server.generation.engine_requests import check_grammar
from jaxserve.server.generation.prompts import encode_texts, fit_prompt
from jaxserve.server.generation.template_facts import reasoning_end
from jaxserve.server.generation.tools import ToolUse
from jaxserve.server.server_state import LoadedModel, ServerState
from jaxserve.text.answers.thought_marks import ThoughtMarks
from jaxserve.text.grammars.default_blanks import with_default_blanks
from jaxserve.text.grammars.formats import grammar_of


@dataclass
class TemplateOptions:
    """`ChatOptions` of an API whose requests have no such fields, or few."""

    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None
    escape_marks: bool | None = None


@dataclass(frozen=True)
class Conversation:
    """Messages, the options of their template, and what is asked of the answer.

    Without `tools`, the template shows `shown_tools`, of which none may be called. `form` is the form that the answer
    must have, after the field that says so. `add_special_tokens`: the tokenizer adds its own, though a template writes
    them itself. An answer has at most `thinking_budget` tokens of reasoning; -1 is no bound, None the server's default.
    `thinks` asks for reasoning or for none, unless the options do. Errors call the messages `param`.
    """

    messages: list[dict[str, Any]]
    options: ChatOptions
    tools: ToolUse | None = None
    shown_tools: list[dict[str, Any]] | None = None
    form: tuple[str, StructuredOutputs] | None = None
    reasoning_effort: str | None = None
    add_special_tokens: bool = False
    separates_reasoning: bool = True
    shows_reasoning: bool = True
    thinking_budget: int | None = None
    thinks: bool | None = None
    param: str = "messages"


@dataclass(frozen=True)
class PreparedAnswer:
    """The ids of a prompt, the grammar of its answers ("" for none), how they are read, and the bound of their
    reasoning."""

    ids: list[int]
    grammar: str
    plan: AnswerPlan
    thinking: ThinkingBudget | None = None


async def count_prompt(state: ServerState, loaded: LoadedModel, asked: Conversation) -> int:
    """Return the number of tokens of the prompt, which may be longer than the context."""
    begun = await _begin(state, loaded, asked)
    (ids,) = await encode_texts(
        state,
        loaded,
        [begun.prompt.written],
        add_special_tokens=asked.add_special_tokens,
        param=None,
        encoder=begun.prompt.encoder,
    )
    return len(ids) + len(begun.closing)


async def prepare_answer(
    state: ServerState, loaded: LoadedModel, asked: Conversation, *, truncates: bool | None = None
) -> PreparedAnswer:
    """Return the prompt, and how its answers are held and read.

    Raises `InvalidRequestError` for what the template or a grammar can't express, and for a prompt that is too long,
    unless it `truncates` it, by default as `allow_auto_truncate` says.
    """
    truncates = state.config.allow_auto_truncate if truncates is None else truncates
    tools = asked.tools
    prompt, place, closing, thinking = await _begin(state, loaded, asked)
    grammar = await _compile_grammar(state, loaded, tools, asked.form, place)
    (ids,) = await encode_texts(
        state,
        loaded,
        [prompt.written],
        add_special_tokens=asked.add_special_tokens,
        param=None if truncates else asked.param,
        encoder=prompt.encoder,
    )
    ids = fit_prompt([*ids, *closing], loaded.engine.info, param=asked.param, truncates=truncates)
    plan = plan_answer(
        loaded,
        tools,
        place,
        is_held=grammar != "",
        separates_reasoning=asked.separates_reasoning,
        shows_reasoning=asked.shows_reasoning,
        ends_reasoning=bool(closing),
    )
    return PreparedAnswer(ids, grammar, plan, thinking)


class _Beginning(NamedTuple):
    """A prompt and how an answer to it begins: its place in the reasoning, the tokens after the prompt that end
    reasoning at once, and the bound of reasoning."""

    prompt: RenderedPrompt
    place: Place
    closing: tuple[int, ...] = ()
    thinking: ThinkingBudget | None = None


async def _begin(state: ServerState, loaded: LoadedModel, asked: Conversation) -> _Beginning:
    tools, effort = asked.shown_tools if asked.tools is None else asked.tools.shown, asked.reasoning_effort
    prompt = await render_prompt(state, loaded, asked.messages, asked.options, tools, effort, asked.thinks)
    place = place_in_reasoning(
        loaded.formats.thinking,
        prompt.text,
        text_of(asked.messages[-1]),
        continues=bool(asked.options.continue_final_message),
    )
    budget = _thinking_budget(state, asked)
    marks = None if budget < 0 else await _thought_marks(state, loaded)
    if marks is None:
        return _Beginning(prompt, place)
    if budget == 0 and place is Place.INSIDE:
        return _Beginning(prompt, Place.AFTER, marks.closings[0], marks.budget(0, inside=False))
    return _Beginning(prompt, place, (), marks.budget(budget, inside=place is Place.INSIDE))


def _thinking_budget(state: ServerState, asked: Conversation) -> int:
    """Return how many tokens of reasoning an answer may have; -1 is no bound."""
    if asked.thinks is False and not switches_thinking(asked.options):
        return 0  # the template may not be able to turn it off
    return state.config.default_thinking_budget if asked.thinking_budget is None else asked.thinking_budget


async def _thought_marks(state: ServerState, loaded: LoadedModel) -> ThoughtMarks | None:
    """Return the marks of the model's reasoning, if it has any."""
    end = await reasoning_end(loaded)
    if loaded.formats.reasoning is None or "thought_marks" in loaded.template_facts:
        return loaded.thought_marks(end)
    # One at a time, so that they are made once
    return await asyncio.get_running_loop().run_in_executor(state.large_tokenizer_threads, loaded.thought_marks, end)


async def _compile_grammar(
    state: ServerState,
    loaded: LoadedModel,
    tools: ToolUse | None,
    asked: tuple[str, StructuredOutputs] | None,
    place: Place,
) -> str:
    """Return the grammar of answers that begin at a place in their reasoning, or "".

    Raises `InvalidRequestError` naming the field at fault. An answer that must be a call needs no form.
    """
    field, outputs = asked if asked and not (tools and tools.required) else ("tools", None)
    if outputs is None and tools is None:
        return ""

    def compose(tools: ToolUse | None) -> str:
        form = "" if outputs is None else grammar_of(with_default_blanks(outputs, state.config))
        return answer_grammar(loaded, tools, form, place)

    try:
        return await check_grammar(state, loaded, lambda: compose(tools), param=field)
    except InvalidRequestError:
        loosened = None if tools is None else tools.loosened()
        if loosened is None:
            raise
    return await check_grammar(state, loaded, lambda: compose(loosened), param=field)
