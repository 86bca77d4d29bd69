"""Turns the texts and conversations of pooled requests into ids within the model's limits. Never submits anything."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from jaxserve.errors import ConfigError, InvalidRequestError
from jaxserve.model_source.pooling import PooledTask
from jaxserve.server.generation.chat_messages import render_prompt
from jaxserve.server.generation.prompts import LONG, run_off_event_loop, split_prompts
from jaxserve.server.generation.request_templates import with_template_of
from jaxserve.server.pooling.protocol import PairFields, TextFields
from jaxserve.server.server_state import LoadedModel, ServerState
from jaxserve.text.pair_forms import (
    EncodedPair,
    PairTemplate,
    WrittenPair,
    check_instruction,
    choose_form,
    default_instruction,
    encode_pairs,
    encode_written_pairs,
    qwen3_pair,
)
from jaxserve.text.pooled_texts import TextLimits, check_not_empty, encode_texts, first_tokens, with_prompt
from jaxserve.text.requests import check_ids
from jaxserve.text.tokenizers.escaped_marks import EscapedMarks

_NONE: list[list[int]] = [[], []]
_MESSAGE_OPTIONS = (
    "add_generation_prompt",
    "continue_final_message",
    "chat_template",
    "chat_template_kwargs",
    "escape_marks",
)


class _RenderingOptions(msgspec.Struct):
    """How a conversation is rendered as one text: no answer begins at its end unless that is asked for."""

    add_generation_prompt: bool | None
    continue_final_message: bool | None
    chat_template_kwargs: dict[str, Any] | None
    escape_marks: bool | None
    documents: list[dict[str, Any]] | None = None


async def read_texts(
    state: ServerState, loaded: LoadedModel, task: PooledTask, request: TextFields, prompt_name: str | None = None
) -> list[list[int]]:
    """Return the ids of each text, or of the conversation. Raises `InvalidRequestError`."""
    if (request.input is None) == (request.messages is None):
        raise InvalidRequestError("Give one of input and messages", param="input")
    limits = _limits(state, loaded, task, request)
    if request.messages is not None:
        if prompt_name is not None:
            raise InvalidRequestError("prompt_name needs texts in input; leave it out", param="prompt_name")
        return [await _read_messages(state, loaded, request, limits)]
    for name in _MESSAGE_OPTIONS:
        if getattr(request, name):
            raise InvalidRequestError(f"{name} needs messages", param=name)
    assert request.input is not None
    return await encode_input(
        state,
        loaded,
        task,
        request.input,
        limits,
        param="input",
        prompt_name=prompt_name,
        add_special_tokens=request.add_special_tokens is not False,
    )


async def encode_input(
    state: ServerState,
    loaded: LoadedModel,
    task: PooledTask,
    given: str | Sequence[str | int | list[int]],
    limits: TextLimits,
    *,
    param: str,
    prompt_name: str | None = None,
    add_special_tokens: bool = True,
) -> list[list[int]]:
    """Return the ids of one or several texts or lists of ids. Only texts get a prompt and special tokens."""
    texts, ids = split_prompts(given, None, param=param)
    is_list = not isinstance(given, str) and not isinstance(given[0], int)
    names = [f"{param}[{number}]" for number in range(len(texts or ids))] if is_list else [param]
    if texts:
        around = loaded.tokenizer.special_tokens_around(1) if add_special_tokens else _NONE
        for text, name in zip(texts, names, strict=True):
            check_not_empty(text, name)
        texts = with_prompt(task, texts, prompt_name)

        def encode() -> list[list[int]]:
            return encode_texts(loaded.tokenizer, texts, around, limits, names)

        return await run_off_event_loop(state, sum(map(len, texts)), encode)
    if prompt_name is not None:
        raise InvalidRequestError(f"prompt_name needs texts in {param}; leave it out", param="prompt_name")
    for prompt, name in zip(ids, names, strict=True):
        check_not_empty(prompt, name)
        check_ids(prompt, loaded.engine.info.vocab_size, param=name)
    return [limits.fit_ids(prompt, name) for prompt, name in zip(ids, names, strict=True)]


async def read_pairs(
    state: ServerState,
    loaded: LoadedModel,
    task: PooledTask,
    request: PairFields,
    pairs: Sequence[tuple[str, str]],
    names: Sequence[str],
) -> list[EncodedPair]:
    """Return the ids of each pair of a query and a document. Errors call the documents by their `names`."""
    form = choose_form(task, state.config.chat_template, loaded.template_source)
    template = PairTemplate(task, loaded.template_source)
    asked, arguments = request.asked(), request.chat_template_kwargs or {}
    limits = _limits(state, loaded, task, request)
    if form == "template":
        template.check(arguments, asked)
    elif arguments:
        raise InvalidRequestError(
            "chat_template_kwargs needs a chat template for queries and documents; start the server with "
            "--chat-template, or send instruction",
            param="chat_template_kwargs",
        )
    elif asked is not None:
        check_instruction(form, asked[1], param=asked[0])
    instruction = default_instruction(task) if asked is None else asked[1]
    size = sum(len(query) + len(document) for query, document in pairs)
    shortened = await run_off_event_loop(state, size, lambda: _shorten(loaded, request, pairs))
    tokenizer = loaded.tokenizer
    if form == "tokenizer":
        told = [((instruction or "") + query, document) for query, document in shortened]
        return await run_off_event_loop(state, size, lambda: encode_pairs(tokenizer, told, limits, names))
    marks = await _marks(state, loaded)
    written: list[WrittenPair] = []
    if form == "template":
        instruction = None if instruction is None else marks.escape(instruction)
        arguments = template.arguments(instruction, {**loaded.template_defaults, **marks.escape(arguments)})
        written = [
            await _render_pair(loaded, marks, template, pair, instruction, arguments, limits) for pair in shortened
        ]

    def encode() -> list[EncodedPair]:
        ready = written or [qwen3_pair(query, document, instruction, marks) for query, document in shortened]
        return encode_written_pairs(tokenizer, marks, ready, limits, names)

    return await run_off_event_loop(state, size, encode)


async def read_sides(
    state: ServerState,
    loaded: LoadedModel,
    task: PooledTask,
    request: PairFields,
    queries: tuple[str, Sequence[str]],
    documents: tuple[str, Sequence[str]],
) -> list[list[int]]:
    """Return the ids of all queries, then of all documents, for a model of embeddings. Both have names before them."""
    if (asked := request.asked()) is not None:
        check_instruction("tokenizer", asked[1], param=asked[0])
    if request.use_activation is False:
        raise InvalidRequestError("use_activation: a cosine has no activation; leave it out", param="use_activation")
    if request.chat_template_kwargs:
        raise InvalidRequestError(
            "chat_template_kwargs: this model makes an embedding of each text alone; leave it out",
            param="chat_template_kwargs",
        )
    limits = _limits(state, loaded, task, request)
    texts = [*queries[1], *documents[1]]
    names = [f"{param}[{number}]" for param, side in (queries, documents) for number in range(len(side))]
    around = loaded.tokenizer.special_tokens_around(1)

    def encode() -> list[list[int]]:
        pairs = [(text, "") for text in queries[1]], [("", text) for text in documents[1]]
        left, right = (_shorten(loaded, request, side) for side in pairs)
        shortened = [query + document for query, document in (*left, *right)]
        return encode_texts(loaded.tokenizer, with_prompt(task, shortened, None), around, limits, names)

    return await run_off_event_loop(state, sum(map(len, texts)), encode)


def _limits(state: ServerState, loaded: LoadedModel, task: PooledTask, request: PairFields | TextFields) -> TextLimits:
    truncate, side = request.truncate_prompt_tokens, request.truncation_side
    return TextLimits.of(loaded.engine.info.max_model_len, task, default_truncation(state, truncate), side)


def default_truncation(state: ServerState, asked: int | None = None) -> int | None:
    """Return the `truncate_prompt_tokens` of a request that asks for these."""
    return -1 if asked is None and state.config.allow_auto_truncate else asked


def _shorten(loaded: LoadedModel, request: PairFields, pairs: Sequence[tuple[str, str]]) -> Sequence[tuple[str, str]]:
    """Return pairs whose texts have at most the tokens that the request allows each."""
    per_query, per_document = request.max_tokens_per_query or 0, request.max_tokens_per_doc or 0
    if not per_query and not per_document:
        return pairs
    return [
        (
            first_tokens(loaded.tokenizer, query, per_query) if per_query else query,
            first_tokens(loaded.tokenizer, document, per_document) if per_document else document,
        )
        for query, document in pairs
    ]


async def _marks(state: ServerState, loaded: LoadedModel) -> EscapedMarks:
    try:
        return await run_off_event_loop(state, LONG, lambda: loaded.escaped_marks)
    except ConfigError as error:
        raise InvalidRequestError(str(error)) from error


async def _render_pair(
    loaded: LoadedModel,
    marks: EscapedMarks,
    template: PairTemplate,
    pair: tuple[str, str],
    instruction: str | None,
    arguments: dict[str, Any],
    limits: TextLimits,
) -> WrittenPair:
    query, document = map(marks.escape, pair)
    written = [
        await loaded.chat_template.render(template.messages(query, text, instruction), **arguments)
        for text in ((document, "") if limits.truncates else (document,))
    ]
    return WrittenPair(written[0], written[-1])


async def _read_messages(state: ServerState, loaded: LoadedModel, request: TextFields, limits: TextLimits) -> list[int]:
    options = _RenderingOptions(
        bool(request.add_generation_prompt),
        request.continue_final_message,
        request.chat_template_kwargs,
        request.escape_marks,
    )
    loaded = await with_template_of(state, loaded, request.chat_template)
    _, text, encoder = await render_prompt(state, loaded, request.messages or [], options)
    around = loaded.tokenizer.special_tokens_around(1) if request.add_special_tokens else _NONE

    def encode() -> list[list[int]]:
        return encode_texts(encoder, [text], around, limits, ["messages"])

    [ids] = await run_off_event_loop(state, len(text), encode)
    return ids
