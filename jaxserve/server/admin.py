"""Routes for whoever runs the server: probes, information, metrics. They answer in every phase of its life."""

from __future__ import annotations

from typing import Any

import msgspec

import jaxserve
from jaxserve.api_types import EngineStats
from jaxserve.errors import JaxserveError
from jaxserve.observability.metrics import CONTENT_TYPE
from jaxserve.server.errors import UnavailableError
from jaxserve.server.http import Exchange
from jaxserve.server.serving import Loaded, Serving

# A scrape or a look must not hang with a hung engine.
_STATS_TIMEOUT = 2.0
# A flush waits for the step that runs, which may be a long one.
_FLUSH_TIMEOUT = 30.0


async def health(serving: Serving, exchange: Exchange) -> None:
    """200 while the engine makes progress (also while it drains), else 503 with the reason."""
    reason = serving.unhealthy
    if reason is not None:
        await exchange.respond({"status": "unhealthy", "reason": reason}, status=503)
    else:
        phase = serving.phase
        status = "ok" if phase == "ready" else phase
        await exchange.respond({"status": status}, status=503 if phase == "starting" else 200)


async def ready(serving: Serving, exchange: Exchange) -> None:
    """200 while new requests are taken, else 503."""
    phase = serving.phase if serving.unhealthy is None else "unhealthy"
    await exchange.respond({"status": phase}, status=200 if phase == "ready" else 503)


async def version(serving: Serving, exchange: Exchange) -> None:
    """The version of jaxserve."""
    await exchange.respond({"version": jaxserve.__version__})


async def metrics(serving: Serving, exchange: Exchange) -> None:
    """Prometheus' text format, with the engine's state of this moment."""
    if serving.loaded is not None:
        await _fresh_stats(serving.loaded)
    body = serving.metrics.render()
    await exchange.respond_text(body.decode(), CONTENT_TYPE)


async def server_info(serving: Serving, exchange: Exchange) -> None:
    """All there is to know of the server: versions, settings, the engine, its statistics and their integrity."""
    config = msgspec.to_builtins(serving.config)
    if serving.config.api_key is not None:
        config["api_key"] = "***"
    info: dict[str, Any] = {
        "version": jaxserve.__version__,
        "model": serving.model_name,
        "phase": serving.phase,
        "unhealthy": serving.unhealthy,
        "open_requests": serving.num_open,
        "server_config": config,
        "engine_config": serving.engine_config,
        "engine": None,
        "replicas": [],
        "stats": None,
        "stats_are_fresh": False,
    }
    loaded = serving.loaded
    if loaded is not None:
        engine = loaded.engine
        info["engine"] = msgspec.to_builtins(engine.info) | {
            "max_total_num_tokens": engine.info.max_total_num_tokens,
        }
        fresh = await _fresh_stats(loaded)
        info["replicas"] = engine.replicas
        info["stats"] = fresh or engine.stats
        info["stats_are_fresh"] = fresh is not None
    await exchange.respond(info)


async def flush_cache(serving: Serving, exchange: Exchange) -> None:
    """Empties the prefix cache; requests that run keep what they use, and nobody after them finds it."""
    try:
        num_pages = await serving.require().engine.flush_cache(_FLUSH_TIMEOUT)
    except TimeoutError as error:
        raise UnavailableError(f"The engine has not answered within {_FLUSH_TIMEOUT:g} s") from error
    await exchange.respond_text(f"Cache flushed: {num_pages} pages given back.\n")


async def _fresh_stats(loaded: Loaded) -> EngineStats | None:
    """The engine's statistics of now (its integrity check included), None when it doesn't answer in time."""
    try:
        return await loaded.engine.refresh_stats(_STATS_TIMEOUT)
    except (JaxserveError, TimeoutError):
        return None
