"""`/v1/messages`: answers a conversation as Anthropic's API does; `/v1/messages/count_tokens` counts its prompt."""

from __future__ import annotations

from typing import Any

from jaxserve.errors import ContextLengthError, InvalidRequestError
from jaxserve.server.anthropic.conversation import conversation
from jaxserve.server.anthropic.events import MessageShape
from jaxserve.server.anthropic.protocol import CountTokensRequest, MessagesRequest
from jaxserve.server.anthropic.responses import TokenCount
from jaxserve.server.errors import HttpError
from jaxserve.server.generation.conversation import Conversation, count_prompt, prepare_answer
from jaxserve.server.generation.engine_requests import engine_requests
from jaxserve.server.generation.message_list import template_abilities
from jaxserve.server.generation.responder import respond
from jaxserve.server.generation.sampling_fields import sampling_params
from jaxserve.server.http.exchange import HttpExchange
from jaxserve.server.http.fields import refuse_unsupported_fields
from jaxserve.server.model_tasks import require_generating
from jaxserve.server.server_state import LoadedModel, ServerState


class ThreadUnsupportedError(HttpError):
    """The request asks the server to hold the conversation. By `details`, clients know to send it without `thread`."""

    def __init__(self) -> None:
        super().__init__(
            400, "thread is not supported: leave it out, and send the whole conversation as messages", param="thread"
        )

    def messages_body(self) -> dict[str, Any]:
        body = super().messages_body()
        body["error"]["details"] = {"error_code": "thread_unsupported_request"}
        return body


async def messages(state: ServerState, exchange: HttpExchange, request: MessagesRequest) -> None:
    """Answer one request."""
    loaded = require_generating(state)
    asked = await _conversation(state, loaded, request)
    longest = loaded.engine.info.max_model_len
    try:
        answer = await prepare_answer(state, loaded, asked)
    except ContextLengthError as error:
        raise _too_long(error.num_tokens, longest) from error
    left = longest - len(answer.ids)
    if left < 1:
        raise _too_long(len(answer.ids), longest)
    defaults = loaded.sampling_defaults
    wanted = min(request.max_tokens, defaults.max_tokens or request.max_tokens)
    limit = min(wanted, left)
    try:
        sampling = sampling_params(request, defaults.options, max_tokens=limit, names={"stop": "stop_sequences"})
    except InvalidRequestError as error:
        if error.param != "stop":
            raise
        raise InvalidRequestError(f"stop_sequences: {error}", param="stop_sequences") from error
    response_id = f"msg_{exchange.request_id}"
    requests = engine_requests(
        loaded, response_id, [answer.ids], [sampling], [answer.grammar], thinking=answer.thinking
    )
    thinking = request.thinking
    shape = MessageShape(
        response_id,
        state.model_name,
        fills_context=limit < wanted,
        omits_thinking=getattr(thinking, "display", None) == "omitted",
    )
    await respond(
        state, loaded, exchange, requests, shape, stream=bool(request.stream), ids=(response_id,), plan=answer.plan
    )


def _too_long(num_tokens: int, longest: int) -> ContextLengthError:
    """Return the error in the words by which agents know that they must shorten a conversation."""
    text = f"prompt is too long: {num_tokens} tokens > {longest} maximum"
    return ContextLengthError(text, param="messages", num_tokens=num_tokens)


async def count_tokens(state: ServerState, exchange: HttpExchange, request: CountTokensRequest) -> None:
    """Answer with the number of tokens of the prompt, however long it is."""
    loaded = state.require_loaded()
    asked = await _conversation(state, loaded, request)
    await exchange.respond(TokenCount(await count_prompt(state, loaded, asked)))


async def _conversation(state: ServerState, loaded: LoadedModel, request: CountTokensRequest) -> Conversation:
    if request.thread is not None:
        raise ThreadUnsupportedError
    refuse_unsupported_fields(request)
    for number, change in enumerate(request.context_management.edits or () if request.context_management else ()):
        refuse_unsupported_fields(change, f"context_management.edits[{number}].")
    return conversation(
        request, await template_abilities(loaded), keeps_billing_header=state.config.keep_billing_header
    )
