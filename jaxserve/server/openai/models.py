"""`/v1/models`: the one model that is served."""

from __future__ import annotations

from jaxserve.server.errors import unknown_model
from jaxserve.server.http.bodies import Exchange
from jaxserve.server.openai.responses import ModelCard, ModelList
from jaxserve.server.server_state import Serving


async def list_models(serving: Serving, exchange: Exchange) -> None:
    """Answers with every model's card."""
    await exchange.respond(ModelList(data=[_card(serving)]))


async def get_model(serving: Serving, exchange: Exchange) -> None:
    """Answers with one card, 404 for a model that isn't served."""
    name = exchange.scope["path_params"]["model"]
    if name != serving.model_name:
        raise unknown_model(name, serving.model_name)
    await exchange.respond(_card(serving))


def _card(serving: Serving) -> ModelCard:
    loaded = serving.loaded
    return ModelCard(
        id=serving.model_name,
        created=serving.created,
        max_model_len=None if loaded is None else loaded.engine.info.max_model_len,
    )
