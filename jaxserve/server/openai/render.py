"""`/v1/completions/render` and `/v1/chat/completions/render`: the ids of prompts, without generating, as in vLLM.

Gateways ask for them to route by prefix. A request that the route without `/render` refuses is refused with the same
error.
"""

from __future__ import annotations

import msgspec

from jaxserve.api_types import EngineRequest, SamplingParams
from jaxserve.server.generation.request_templates import with_template_of
from jaxserve.server.http.exchange import HttpExchange
from jaxserve.server.openai import chat, completions
from jaxserve.server.openai.protocol import ChatRequest, CompletionRequest, OpenAIFields
from jaxserve.server.server_state import ServerState


class RenderedRequest(msgspec.Struct, kw_only=True):
    """What would be computed for a prompt; `request_id` is the id that the response would have."""

    request_id: str
    token_ids: list[int]
    sampling_params: SamplingParams
    model: str
    stream: bool
    cache_salt: str | None
    priority: int


async def render_completions(state: ServerState, exchange: HttpExchange, request: CompletionRequest) -> None:
    """Answer with a list of all prompts."""
    requests, _ = await completions.prepare(state, state.require_loaded(), exchange, request)
    response_id = request.response_id("cmpl", exchange.request_id)
    prompts = [_rendered(state, request, response_id, one) for one in requests if one.sample == 0]
    if len(prompts) > 1:
        for number, prompt in enumerate(prompts):
            prompt.request_id = f"{response_id}-{number}"
    await exchange.respond(prompts)


async def render_chat(state: ServerState, exchange: HttpExchange, request: ChatRequest) -> None:
    """Answer with the one prompt."""
    loaded = await with_template_of(state, state.require_loaded(), request.chat_template)
    requests, _ = await chat.prepare(state, loaded, exchange, request)
    response_id = request.response_id("chatcmpl", exchange.request_id)
    await exchange.respond(_rendered(state, request, response_id, requests[0]))


def _rendered(state: ServerState, request: OpenAIFields, response_id: str, computed: EngineRequest) -> RenderedRequest:
    return RenderedRequest(
        request_id=response_id,
        token_ids=computed.prompt_ids,
        sampling_params=computed.sampling,
        model=state.model_name,
        stream=bool(request.stream),
        cache_salt=request.cache_salt,
        priority=state.engine_config.default_priority_value if request.priority is None else request.priority,
    )
