"""Which routes the loaded model can answer. The others are refused with what it can do, and how to start the server."""

from __future__ import annotations

from typing import Literal

from jaxserve.errors import InvalidRequestError
from jaxserve.model_source.pooling import PooledTask
from jaxserve.server.server_state import LoadedModel, ServerState

PooledUse = Literal["embed", "classify", "score", "any"]

_GENERATING = "/v1/completions, /v1/chat/completions, /v1/messages, /v1/responses and /generate"
_PAIRS = "/v1/rerank, /v1/score"
_ALWAYS = "/pooling and /encode"


def require_generating(state: ServerState) -> LoadedModel:
    """Return the loaded model. Raises `InvalidRequestError` if it only pools, and what `require_loaded` does."""
    loaded = state.require_loaded()
    if not loaded.task.generates:
        assert loaded.task.pooled is not None
        raise InvalidRequestError(
            f"this server doesn't generate text: {_abilities(loaded.task.pooled)}; start it with --runner generate if "
            "the model has a head for tokens"
        )
    return loaded


def require_pooled(state: ServerState, use: PooledUse) -> tuple[LoadedModel, PooledTask]:
    """Return the loaded model and what it pools. Raises `InvalidRequestError` unless that serves this `use`, and what
    `require_loaded` does."""
    loaded = state.require_loaded()
    task = loaded.task.pooled
    if task is None:
        raise InvalidRequestError(
            f"this server generates text ({_GENERATING}): start it with --runner pooling, or with --runner generate "
            "--convert embed for both"
        )
    if use == "embed" and task.kind != "embed":
        raise InvalidRequestError(f"{_abilities(task)}; for embeddings start it with --convert embed")
    if use == "classify" and task.kind != "classify":
        raise InvalidRequestError(f"{_abilities(task)}; labels need a model that has a head for them")
    if use == "score" and task.kind == "classify" and not task.scores_pairs:
        raise InvalidRequestError(f"{_abilities(task)}; pairs need a reranker, or a model of embeddings")
    return loaded, task


def _abilities(task: PooledTask) -> str:
    """Return what the model makes, and the routes that answer with it."""
    if task.kind == "embed":
        return f"this model makes embeddings, on /v1/embeddings, {_PAIRS}, {_ALWAYS}"
    if task.scores_pairs:
        return f"this model scores documents, on {_PAIRS}, /classify, {_ALWAYS}"
    return f"this model labels texts, on /classify, {_ALWAYS}"
