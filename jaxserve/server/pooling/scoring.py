"""Compares queries with documents: `/v1/rerank` (Cohere's, Jina's and vLLM's route) and `/v1/score` (vLLM's).

A reranker reads a query and a document as one text. A model of embeddings makes a vector of each, and their similarity
is the score.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from jaxserve.errors import InvalidRequestError
from jaxserve.model_source.pooling import PooledTask
from jaxserve.server.http.exchange import HttpExchange
from jaxserve.server.http.fields import refuse_unsupported_fields
from jaxserve.server.model_tasks import require_pooled
from jaxserve.server.pooling.bodies import (
    ApiVersion,
    BilledUnits,
    PooledUsage,
    RerankMeta,
    RerankResponse,
    RerankResult,
    RerankTokens,
    ScoreObject,
    ScoreResponse,
)
from jaxserve.server.pooling.inputs import read_pairs, read_sides
from jaxserve.server.pooling.protocol import PairFields, RerankRequest, ScoreRequest
from jaxserve.server.pooling.running import run_prompts, total_usage
from jaxserve.server.server_state import LoadedModel, ServerState
from jaxserve.text.pooled_vectors import relevance, similarity

# Cohere bills a query with up to this many documents as one search.
_DOCUMENTS_OF_SEARCH = 100


class _PairSide(NamedTuple):
    """The texts of one side, and the name of their field."""

    name: str
    texts: Sequence[str]


async def rerank(state: ServerState, exchange: HttpExchange, request: RerankRequest) -> None:
    """Answer one request."""
    loaded, task = require_pooled(state, "score")
    refuse_unsupported_fields(request)
    given = [request.documents] if isinstance(request.documents, str) else request.documents
    texts = [_document_text(document, number, request.rank_fields) for number, document in enumerate(given)]
    response_id = request.response_id("rerank", exchange.request_id)
    sides = _PairSide("query", [request.query]), _PairSide("documents", texts)
    scores, usage = await _scores(state, loaded, task, exchange, request, response_id, *sides)
    best = sorted(range(len(given)), key=lambda number: -scores[number])[: request.top_n or None]
    results = [RerankResult(number, scores[number]) for number in best]
    if request.return_documents is not False:
        for result in results:
            document = given[result.index]
            result.document = {"text": document} if isinstance(document, str) else document
    searches = -(-len(given) // _DOCUMENTS_OF_SEARCH)
    await exchange.respond(
        RerankResponse(
            id=response_id,
            model=state.model_name,
            usage=usage,
            results=results,
            meta=RerankMeta(ApiVersion(), BilledUnits(searches), RerankTokens(usage.prompt_tokens)),
        )
    )


async def score(state: ServerState, exchange: HttpExchange, request: ScoreRequest) -> None:
    """Answer one request."""
    loaded, task = require_pooled(state, "score")
    refuse_unsupported_fields(request)
    first, second = request.sides()
    response_id = request.response_id("score", exchange.request_id)
    sides = _PairSide(*first), _PairSide(*second)
    scores, usage = await _scores(state, loaded, task, exchange, request, response_id, *sides)
    await exchange.respond(
        ScoreResponse(
            id=response_id,
            created=int(time.time()),
            model=state.model_name,
            data=[ScoreObject(index, value) for index, value in enumerate(scores)],
            usage=usage,
        )
    )


async def _scores(
    state: ServerState,
    loaded: LoadedModel,
    task: PooledTask,
    exchange: HttpExchange,
    request: PairFields,
    response_id: str,
    queries: _PairSide,
    documents: _PairSide,
) -> tuple[list[float], PooledUsage]:
    """Return the score of each document with its query, which may be one for all, and the token counts."""
    query_of = [min(number, len(queries.texts) - 1) for number in range(len(documents.texts))]
    second_starts = None
    if task.kind == "embed":
        prompts = await read_sides(state, loaded, task, request, queries, documents)
    else:
        pairs = [(queries.texts[query], text) for query, text in zip(query_of, documents.texts)]
        names = [f"{documents.name}[{number}]" for number in range(len(pairs))]
        encoded = await read_pairs(state, loaded, task, request, pairs, names)
        prompts, second_starts = [pair.ids for pair in encoded], [pair.second_start for pair in encoded]
    results = await run_prompts(
        state,
        loaded,
        exchange,
        prompts,
        ids=(response_id, *request.client_ids),
        second_starts=second_starts,
        priority=request.priority,
        cache_salt=request.cache_salt,
    )
    vectors = [result.vector for result in results]
    if task.kind == "embed":
        left, right = vectors[: len(queries.texts)], vectors[len(queries.texts) :]
        scores = [similarity(left[query], vector, task) for query, vector in zip(query_of, right)]
    else:
        activates = request.use_activation is not False
        scores = [relevance(vector, task, activates=activates) for vector in vectors]
    return scores, total_usage(results)


def _document_text(document: str | dict[str, Any], number: int, rank_fields: Sequence[str] | None) -> str:
    """Return what of a document is compared: a text, or fields of an object, one after the other."""
    param = f"documents[{number}]"
    if isinstance(document, str):
        if rank_fields is not None:
            raise InvalidRequestError(f"rank_fields needs documents that are objects; {param} is a text", param=param)
        return document
    found = [document[name] for name in rank_fields or ("text",) if name in document]
    if not found or not all(isinstance(text, str) and text for text in found):
        names = ", ".join(rank_fields or ("text",))
        raise InvalidRequestError(f"{param} needs a text that isn't empty in {names}", param=param)
    return "\n".join(found)
