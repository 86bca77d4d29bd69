"""`/v1/responses`: answers as OpenAI's Responses API does; `/v1/responses/input_tokens` counts the prompt."""

from __future__ import annotations

import dataclasses
import re
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from jaxserve.api_types import SamplingParams
from jaxserve.errors import ContextLengthError, InvalidRequestError
from jaxserve.server.errors import HttpError
from jaxserve.server.generation.conversation import Conversation, PreparedAnswer, count_prompt, prepare_answer
from jaxserve.server.generation.engine_requests import engine_requests
from jaxserve.server.generation.message_list import template_abilities
from jaxserve.server.generation.prompts import max_output_tokens
from jaxserve.server.generation.responder import respond
from jaxserve.server.generation.sampling_fields import sampling_params
from jaxserve.server.http.exchange import HttpExchange
from jaxserve.server.http.fields import refuse_unsupported_fields
from jaxserve.server.model_tasks import require_generating
from jaxserve.server.response_store import StoredItem
from jaxserve.server.responses_api.bodies import (
    InputTokenCount,
    ResponseObject,
)
from jaxserve.server.responses_api.conversation import conversation, without_oldest
from jaxserve.server.responses_api.events import OutputOptions, ResponsesShape
from jaxserve.server.responses_api.items import kind_of
from jaxserve.server.responses_api.protocol import (
    ENCRYPTED_REASONING,
    TEXT_LOGPROBS,
    ReasoningSettings,
    ResponsesInput,
    ResponsesRequest,
    TextSettings,
)
from jaxserve.server.responses_api.stored import stored_items, stored_response
from jaxserve.server.responses_api.tools import ResponsesTools
from jaxserve.server.server_state import LoadedModel, ServerState

# A client's X-Request-Id becomes part of a path.
_PLAIN_ID = re.compile(r"[\w.\-]{1,200}", re.ASCII)


@dataclass(frozen=True)
class _ReadRequest:
    """A conversation, its tools, the items of its input, and the stored response that it continues, if any."""

    conversation: Conversation
    tools: ResponsesTools
    input: list[StoredItem]
    continued: tuple[str, Sequence[StoredItem]] | None


async def create_response(state: ServerState, exchange: HttpExchange, request: ResponsesRequest) -> None:
    """Answer one request."""
    loaded = require_generating(state)
    asked = await _read(state, loaded, request)
    answer = await _prepare(state, loaded, request, asked.conversation)
    wanted = request.max_output_tokens
    if wanted is not None:
        wanted = min(wanted, loaded.engine.info.max_model_len - len(answer.ids))
    limit = max_output_tokens(len(answer.ids), wanted, None, loaded, param="input")
    include = request.include or []
    logprobs = (request.top_logprobs or 0) if request.top_logprobs or TEXT_LOGPROBS in include else None
    sampling = sampling_params(request, loaded.sampling_defaults.options, max_tokens=limit, logprobs=logprobs)
    response_id = f"resp_{exchange.request_id if _PLAIN_ID.fullmatch(exchange.request_id) else uuid.uuid4().hex}"
    requests = engine_requests(
        loaded,
        response_id,
        [answer.ids],
        [sampling],
        [answer.grammar],
        priority=request.priority,
        cache_salt=request.cache_salt,
        thinking=answer.thinking,
    )
    reasoning = request.reasoning or ReasoningSettings()
    options = OutputOptions(
        summarizes=(reasoning.summary or reasoning.generate_summary) is not None,
        packs_reasoning=ENCRYPTED_REASONING in include,
        logprobs=logprobs is not None,
        names=asked.tools.names,
    )

    begun = _begun(state, request, sampling, response_id)

    def keep(response: ResponseObject) -> None:
        if not begun.store:
            return
        output = [StoredItem(item.id, msgspec.json.encode(item)) for item in response.output]
        body = msgspec.json.encode(response)
        state.responses.put(response_id, body, continued=asked.continued, input=asked.input, output=output)

    streams = bool(request.stream)
    shape = ResponsesShape(
        begun, options, loaded.tokenizer, keep, streams=streams, is_draining=lambda: state.phase == "draining"
    )
    with state.responses.writing(response_id, lambda status: msgspec.json.encode(shape.so_far(status))):
        await respond(state, loaded, exchange, requests, shape, stream=streams, ids=(response_id,), plan=answer.plan)


async def count_input_tokens(state: ServerState, exchange: HttpExchange, request: ResponsesInput) -> None:
    """Answer with the number of tokens of the prompt, however long it is."""
    loaded = state.require_loaded()
    asked = await _read(state, loaded, request)
    await exchange.respond(InputTokenCount(input_tokens=await count_prompt(state, loaded, asked.conversation)))


async def _read(state: ServerState, loaded: LoadedModel, request: ResponsesInput) -> _ReadRequest:
    """Return what a request asks. Raises `InvalidRequestError`, or `HttpError` 404 for a response that is lost."""
    refuse_unsupported_fields(request)
    if request.reasoning is not None:
        refuse_unsupported_fields(request.reasoning, "reasoning.")
    if getattr(request, "stream_options", None) is not None and not getattr(request, "stream", None):
        raise InvalidRequestError("stream_options needs stream to be true", param="stream_options")
    continued, items = None, list[tuple[str, Mapping[str, Any]]]()
    if request.previous_response_id is not None:
        stored = await stored_response(
            state, request.previous_response_id, "previous_response_id", "previous_response_not_found"
        )
        before = [*stored.input, *stored.output]
        continued = request.previous_response_id, before
        items += [("previous_response_id", msgspec.json.decode(item.json)) for item in before]
    new = [await _looked_up(state, item, f"input[{at}]") for at, item in enumerate(_given(request.input))]
    items += [(f"input[{at}]", item) for at, item in enumerate(new)]
    if not items:
        raise InvalidRequestError("input is required: send a text or a list of items", param="input")
    tools = ResponsesTools.of(request.tools)
    special = loaded.tokenizer.special_texts()
    asked = conversation(request, tools, items, await template_abilities(loaded), special)
    kept = [] if getattr(request, "store", None) is False else stored_items(new, continued[1] if continued else ())
    return _ReadRequest(asked, tools, kept, continued)


def _given(input: str | list[dict[str, Any]] | None) -> list[dict[str, Any]]:
    if isinstance(input, str):
        return [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": input}]}]
    return input or []


async def _looked_up(state: ServerState, item: dict[str, Any], where: str) -> dict[str, Any]:
    """Return an item, or that of a stored response which it refers to."""
    if kind_of(item) != "item_reference":
        return item
    name = item.get("id")
    if not isinstance(name, str) or not name:
        raise InvalidRequestError(f"{where}.id is required: it names an item of a stored response", param=f"{where}.id")
    found = await state.stored_item(name)
    if found is None:
        raise HttpError(
            404, f"{where}: Item with id '{name[:100]}' not found; send the item itself", param=f"{where}.id"
        )
    decoded: dict[str, Any] = msgspec.json.decode(found)
    return decoded


async def _prepare(
    state: ServerState, loaded: LoadedModel, request: ResponsesRequest, asked: Conversation
) -> PreparedAnswer:
    """Return the prompt, and how its answers are held and read. With `truncation: auto`, the oldest messages are left
    out until it fits the context with room for an answer."""
    longest = loaded.engine.info.max_model_len
    room = min(request.max_output_tokens or longest, longest // 4) if request.truncation == "auto" else 0
    try:
        answer = await prepare_answer(state, loaded, asked)
        if len(answer.ids) + room <= longest:
            return answer
    except ContextLengthError:
        if request.truncation != "auto":
            raise
    fewest, most = 1, len(asked.messages)  # most leave nothing
    while fewest < most:
        middle = (fewest + most) // 2
        kept = without_oldest(asked.messages, middle)
        if (
            kept is None
            or await count_prompt(state, loaded, dataclasses.replace(asked, messages=kept)) + room <= longest
        ):
            most = middle
        else:
            fewest = middle + 1
    kept = without_oldest(asked.messages, most)
    return await prepare_answer(state, loaded, asked if kept is None else dataclasses.replace(asked, messages=kept))


def _begun(state: ServerState, request: ResponsesRequest, sampling: SamplingParams, response_id: str) -> ResponseObject:
    """Return the response before its first token."""
    return ResponseObject(
        id=response_id,
        created_at=int(time.time()),
        status="in_progress",
        model=state.model_name,
        instructions=request.instructions,
        previous_response_id=request.previous_response_id,
        tools=_raw(request.tools or []),
        tool_choice=_raw(request.tool_choice or "auto"),
        parallel_tool_calls=request.parallel_tool_calls is not False,
        text=_raw(_text_settings(request.text)),
        reasoning=_raw(_reasoning_settings(request.reasoning)),
        max_output_tokens=request.max_output_tokens,
        max_tool_calls=request.max_tool_calls,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_logprobs=request.top_logprobs or 0,
        truncation=request.truncation or "disabled",
        store=request.store is not False and state.config.max_stored_responses > 0,
        metadata=_raw(request.metadata or {}),
        user=_raw(request.user),
        safety_identifier=_raw(request.safety_identifier),
        prompt_cache_key=_raw(request.prompt_cache_key),
    )


def _text_settings(given: TextSettings | None) -> dict[str, Any]:
    found = TextSettings() if given is None else given
    form = {"type": "text"} if found.format is None else found.format
    return {"format": form, "verbosity": found.verbosity or "medium"}


def _reasoning_settings(given: ReasoningSettings | None) -> dict[str, Any]:
    found = given or ReasoningSettings()
    return {"effort": found.effort, "summary": found.summary or found.generate_summary}


def _raw(value: Any) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(value))
