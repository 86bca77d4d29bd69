"""`/v1/embeddings`, OpenAI's route, and `/pooling`, vLLM's: vectors of texts."""

from __future__ import annotations

import base64
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np

from jaxserve.errors import InvalidRequestError
from jaxserve.model_source.pooling import PooledTask
from jaxserve.server.generation.prompts import run_off_event_loop
from jaxserve.server.http.exchange import HttpExchange
from jaxserve.server.http.fields import refuse_unsupported_fields
from jaxserve.server.model_tasks import require_pooled
from jaxserve.server.pooling.bodies import EmbeddingObject, EmbeddingResponse, PoolingObject, PoolingResponse
from jaxserve.server.pooling.inputs import read_texts
from jaxserve.server.pooling.protocol import EmbeddingRequest, PoolingRequest, VectorFields
from jaxserve.server.pooling.running import PooledResult, run_prompts, total_usage
from jaxserve.server.server_state import LoadedModel, ServerState
from jaxserve.text.pooled_vectors import check_dimensions, embedding, label_values

type _Item = Callable[[int, Any], msgspec.Struct]


async def embeddings(state: ServerState, exchange: HttpExchange, request: EmbeddingRequest) -> None:
    """Answer one request."""
    loaded, task = require_pooled(state, "embed")
    response_id = request.response_id("embd", exchange.request_id)
    results = await _results(state, loaded, task, exchange, request, response_id)
    response = EmbeddingResponse(
        id=response_id, created=int(time.time()), model=state.model_name, data=[], usage=total_usage(results)
    )
    await _respond(state, task, exchange, request, results, response, EmbeddingObject)


async def pooling(state: ServerState, exchange: HttpExchange, request: PoolingRequest) -> None:
    """Answer one request."""
    loaded, task = require_pooled(state)
    if request.task not in (None, task.uses[0]):
        raise InvalidRequestError(f"task: this model does {task.uses[0]}, not {request.task}", param="task")
    response_id = request.response_id("pool", exchange.request_id)
    results = await _results(state, loaded, task, exchange, request, response_id)
    response = PoolingResponse(
        id=response_id, created=int(time.time()), model=state.model_name, data=[], usage=total_usage(results)
    )
    await _respond(state, task, exchange, request, results, response, PoolingObject)


async def _results(
    state: ServerState,
    loaded: LoadedModel,
    task: PooledTask,
    exchange: HttpExchange,
    request: VectorFields,
    response_id: str,
) -> list[PooledResult]:
    refuse_unsupported_fields(request)
    if task.kind == "classify":
        for name in ("dimensions", "prompt_name", "normalize"):
            if getattr(request, name) is not None:
                raise InvalidRequestError(f"{name} is of embeddings, and this model labels texts", param=name)
    check_dimensions(request.dimensions, task)
    request.normalizes()
    return await run_prompts(
        state,
        loaded,
        exchange,
        await read_texts(state, loaded, task, request, request.prompt_name),
        ids=(response_id, *request.client_ids),
        priority=request.priority,
        cache_salt=request.cache_salt,
    )


async def _respond(
    state: ServerState,
    task: PooledTask,
    exchange: HttpExchange,
    request: VectorFields,
    results: Sequence[PooledResult],
    response: EmbeddingResponse | PoolingResponse,
    item: _Item,
) -> None:
    """Send the response with an item for each result. Large ones are written while other requests run."""

    def written() -> bytes:
        items = [
            msgspec.Raw(msgspec.json.encode(item(number, _numbers(result, task, request))))
            for number, result in enumerate(results)
        ]
        return msgspec.json.encode(msgspec.structs.asdict(response) | {"data": items})

    size = sum(result.vector.size for result in results)
    await exchange.respond(msgspec.Raw(await run_off_event_loop(state, size, written)))


def _numbers(result: PooledResult, task: PooledTask, request: VectorFields) -> list[Any] | str:
    if task.kind == "embed":
        vector = embedding(result.vector, task, dimensions=request.dimensions, normalize=request.normalizes())
    else:
        activation = "none" if request.use_activation is False else task.activation
        vector = np.asarray(label_values(result.vector, activation), np.float32)
    if request.encoding_format == "base64":
        return base64.b64encode(vector.astype("<f4").tobytes()).decode()
    numbers: list[Any] = vector.tolist()
    return numbers
