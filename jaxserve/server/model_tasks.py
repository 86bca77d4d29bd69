"""Which routes the loaded model can answer. The others are refused with what it can do, and how to start the server."""

from __future__ import annotations

from jaxserve.errors import InvalidRequestError
from jaxserve.model_source.pooling import PooledTask, PooledUse
from jaxserve.server.server_state import LoadedModel, ServerState

_GENERATING = "/v1/completions, /v1/chat/completions, /v1/messages, /v1/responses and /generate"
_PAIRS = "/v1/rerank, /v1/score"
_ALWAYS = "/pooling and /encode"
_ADVICE: dict[PooledUse, str] = {
    "embed": "for embeddings start it with --convert embed",
    "classify": "labels need a model that has a head for them",
    "score": "pairs need a reranker, or a model of embeddings",
}


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


def require_pooled(state: ServerState, use: PooledUse | None = None) -> tuple[LoadedModel, PooledTask]:
    """Return the loaded model and what it pools.

    Raises `InvalidRequestError` if it pools nothing, or can't be asked for `use`, and what `require_loaded` does.
    """
    loaded = state.require_loaded()
    task = loaded.task.pooled
    if task is None:
        raise InvalidRequestError(
            f"this server generates text ({_GENERATING}): start it with --runner pooling, or with --runner generate "
            "--convert embed for both"
        )
    if use is not None and use not in task.uses:
        by_token = use == "embed" and "token_embed" in task.uses
        advice = "for one vector of a text start it with --pooling cls or mean" if by_token else _ADVICE[use]
        raise InvalidRequestError(f"{_abilities(task)}; {advice}")
    return loaded, task


def _abilities(task: PooledTask) -> str:
    """Return what the model makes, and the routes that answer with it."""
    if "token_embed" in task.uses:
        return f"this model makes a vector of each token of a text, on {_PAIRS}, {_ALWAYS}"
    if task.kind == "embed":
        return f"this model makes embeddings, on /v1/embeddings, {_PAIRS}, {_ALWAYS}"
    if task.scores_pairs:
        return f"this model scores documents, on {_PAIRS}, /classify, {_ALWAYS}"
    return f"this model labels texts, on /classify, {_ALWAYS}"
