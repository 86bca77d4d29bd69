"""Makes the log of a request that generates or pools."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from jaxserve.api_types import EngineRequest
from jaxserve.server.http.exchange import HttpExchange
from jaxserve.server.request_log import LoggedRequest
from jaxserve.server.server_state import LoadedModel, ServerState


def logged_request(
    state: ServerState,
    loaded: LoadedModel,
    exchange: HttpExchange,
    requests: Sequence[EngineRequest],
    ids: tuple[str, ...],
    *,
    stream: bool,
) -> LoggedRequest | None:
    """Return the log of an HTTP request that computes `requests`, None if requests aren't logged. The first of `ids` is
    that of the response."""
    if state.request_log is None:
        return None
    return LoggedRequest(
        state.request_log,
        requests,
        functools.partial(loaded.tokenizer.decode, skip_special_tokens=False),
        id=ids[0],
        request_id=exchange.request_id,
        route=exchange.scope["endpoint"].path,
        stream=stream,
        arrival=exchange.arrival,
    )
