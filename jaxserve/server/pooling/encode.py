"""`/encode`: SGLang's own route for vectors. The response to a list is a list."""

from __future__ import annotations

import time
from typing import Any

from jaxserve.errors import InvalidRequestError
from jaxserve.server.generation.engine_requests import numbered, prompt_rids
from jaxserve.server.http.exchange import HttpExchange
from jaxserve.server.http.fields import refuse_unsupported_fields
from jaxserve.server.model_tasks import require_pooled
from jaxserve.server.pooling.bodies import EncodeMeta, EncodeOutput
from jaxserve.server.pooling.inputs import default_truncation, encode_input
from jaxserve.server.pooling.protocol import EncodeRequest
from jaxserve.server.pooling.running import run_prompts
from jaxserve.server.server_state import ServerState
from jaxserve.text.pooled_texts import TextLimits
from jaxserve.text.pooled_vectors import check_dimensions, embedding, label_values


async def encode(state: ServerState, exchange: HttpExchange, request: EncodeRequest) -> None:
    """Answer one request."""
    loaded, task = require_pooled(state)
    refuse_unsupported_fields(request)
    given, param = (request.text, "text") if request.input_ids is None else (request.input_ids, "input_ids")
    if given is None or (request.text is not None and request.input_ids is not None):
        raise InvalidRequestError("Give one of text and input_ids", param="text")
    if task.kind == "classify" and request.dimensions is not None:
        raise InvalidRequestError("dimensions is of embeddings, and this model labels texts", param="dimensions")
    check_dimensions(request.dimensions, task)
    limits = TextLimits.of(loaded.engine.info.max_model_len, task, default_truncation(state))
    prompts = await encode_input(state, loaded, task, given, limits, param=param)
    is_list = isinstance(given, list) and not isinstance(given[0], int)
    response_id = request.rid if isinstance(request.rid, str) else exchange.request_id
    names = prompt_rids(request.rid, len(prompts)) or numbered(response_id, len(prompts))
    results = await run_prompts(
        state,
        loaded,
        exchange,
        prompts,
        ids=(response_id,),
        parts={name: (index,) for index, name in enumerate(names)},
        priority=request.priority,
    )
    latency = time.perf_counter() - exchange.arrival
    outputs = []
    for name, (vector, usage) in zip(names, results, strict=True):
        if task.kind == "embed":
            numbers: list[Any] = embedding(vector, task, dimensions=request.dimensions).tolist()
        else:
            numbers = label_values(vector, task.activation)
        meta = EncodeMeta(name, {"type": "stop"}, usage.prompt_tokens, 0, usage.cached_tokens, latency)
        outputs.append(EncodeOutput(numbers, meta))
    await exchange.respond(outputs if is_list else outputs[0])
