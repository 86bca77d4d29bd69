"""`/classify`, vLLM's route: labels of texts."""

from __future__ import annotations

import time

from jaxserve.server.http.exchange import HttpExchange
from jaxserve.server.http.fields import refuse_unsupported_fields
from jaxserve.server.model_tasks import require_pooled
from jaxserve.server.pooling.bodies import ClassifyObject, ClassifyResponse
from jaxserve.server.pooling.inputs import read_texts
from jaxserve.server.pooling.protocol import ClassifyRequest
from jaxserve.server.pooling.running import run_prompts, total_usage
from jaxserve.server.server_state import ServerState
from jaxserve.text.pooled_vectors import best_label, label_values


async def classify(state: ServerState, exchange: HttpExchange, request: ClassifyRequest) -> None:
    """Answer one request."""
    loaded, task = require_pooled(state, "classify")
    refuse_unsupported_fields(request)
    response_id = request.response_id("classify", exchange.request_id)
    results = await run_prompts(
        state,
        loaded,
        exchange,
        await read_texts(state, loaded, task, request),
        ids=(response_id, *request.client_ids),
        priority=request.priority,
        cache_salt=request.cache_salt,
    )
    activation = "none" if request.use_activation is False else task.activation
    data = []
    for index, result in enumerate(results):
        values = label_values(result.vector, activation)
        data.append(ClassifyObject(index, best_label(values, task), values, len(values)))
    await exchange.respond(
        ClassifyResponse(
            id=response_id,
            created=int(time.time()),
            model=state.model_name,
            data=data,
            usage=total_usage(results),
        )
    )
