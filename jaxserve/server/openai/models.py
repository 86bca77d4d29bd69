"""`/v1/models`: lists the one served model."""

from __future__ import annotations

from jaxserve.server.errors import unknown_model
from jaxserve.server.http.exchange import HttpExchange
from jaxserve.server.openai.responses import ModelCard, ModelList
from jaxserve.server.server_state import ServerState


async def list_models(state: ServerState, exchange: HttpExchange) -> None:
    """Answer with the list of models."""
    await exchange.respond(ModelList(data=[_card(state)]))


async def get_model(state: ServerState, exchange: HttpExchange) -> None:
    """Answer with one model's card, or 404 for a model that is not served."""
    name = exchange.scope["path_params"]["model"].rstrip("/")
    if not name:
        await list_models(state, exchange)
        return
    if name != state.model_name.rstrip("/"):
        raise unknown_model(name, state.model_name)
    await exchange.respond(_card(state))


def _card(state: ServerState) -> ModelCard:
    loaded = state.loaded
    return ModelCard(
        id=state.model_name,
        created=state.created,
        max_model_len=None if loaded is None else loaded.max_model_len,
    )
