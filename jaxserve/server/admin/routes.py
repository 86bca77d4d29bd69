"""Routes for whoever runs the server: probes, information, metrics. They answer in every phase of its life."""

from __future__ import annotations

import asyncio
import uuid
from typing import Any

import msgspec

import jaxserve
from jaxserve.api_types import EngineRequest, EngineStats, FinishReason, SamplingParams
from jaxserve.errors import JaxserveError, QueueFullError
from jaxserve.observability.metrics import CONTENT_TYPE
from jaxserve.server.errors import UnavailableError, failure_of
from jaxserve.server.http.bodies import Exchange
from jaxserve.server.server_state import Loaded, Serving

# A scrape or a look must not hang with a hung engine.
_STATS_TIMEOUT = 2.0
# A flush waits for the step that runs, which may be a long one.
_FLUSH_TIMEOUT = 30.0
# SGLang's limit; a token that waits behind long prompts may take seconds.
_GENERATE_TIMEOUT = 20.0
# How often to look whether an engine that takes no more requests generates for others.
_LOOK_SECONDS = 0.1


async def health(serving: Serving, exchange: Exchange) -> None:
    """200 while the engine makes progress (also while it drains), else 503 with the reason."""
    reason = serving.unhealthy
    if reason is not None:
        await exchange.respond({"status": "unhealthy", "reason": reason}, status=503)
    else:
        phase = serving.phase
        status = "ok" if phase == "ready" else phase
        await exchange.respond({"status": status}, status=503 if phase == "starting" else 200)


async def health_generate(serving: Serving, exchange: Exchange) -> None:
    """200 once the engine has generated a token: for this request, or, where that has to wait, for another."""
    loaded = serving.require()
    before = loaded.engine.stats.generation_tokens
    try:
        async with asyncio.timeout(_GENERATE_TIMEOUT):
            await _one_token(loaded)
    except TimeoutError as error:
        if loaded.engine.stats.generation_tokens == before:
            raise UnavailableError(f"The engine has generated no token within {_GENERATE_TIMEOUT:g} s") from error
    await exchange.respond({"status": "ok"})


async def _one_token(loaded: Loaded) -> None:
    """Returns when the engine has generated a token, of this or of another request."""
    name = f"health-{uuid.uuid4().hex}"
    prompt = [loaded.tokenizer.bos_id or 0]
    sampling = SamplingParams(max_tokens=1, temperature=0.0)
    request = EngineRequest(request_id=name, group_id=name, prompt_ids=prompt, sampling=sampling)
    before = loaded.engine.stats.generation_tokens
    try:
        async for event in loaded.engine.submit(request):
            if event.finish_reason is FinishReason.ERROR:
                raise failure_of(event.error or "", engine_dead=loaded.engine.on_death.done())
    except QueueFullError:
        while loaded.engine.stats.generation_tokens == before:
            await asyncio.sleep(_LOOK_SECONDS)
    finally:
        loaded.engine.abort([name])


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
    """All there is to know of the server: versions, settings, the engine, its statistics and their integrity.

    Its first keys are SGLang's, by which gateways and benchmarks learn what a worker is.
    """
    config = msgspec.to_builtins(serving.config)
    if serving.config.api_key is not None:
        config["api_key"] = "***"
    parallel = serving.engine_config
    info: dict[str, Any] = {
        "version": jaxserve.__version__,
        "model": serving.model_name,
        **_paths(serving),
        "served_model_name": serving.model_name,
        "weight_version": "default",
        "is_embedding": False,
        "disaggregation_mode": "null",
        "tp_size": parallel.tp_size,
        "dp_size": parallel.dp_size,
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
        info["context_length"] = engine.info.max_model_len
        info["max_total_tokens"] = engine.info.max_total_num_tokens
        info["max_running_requests"] = engine.info.max_running_requests
        info["internal_states"] = [{"last_gen_throughput": serving.metrics.generation_throughput}]
        info["replicas"] = engine.replicas
        info["stats"] = fresh or engine.stats
        info["stats_are_fresh"] = fresh is not None
    await exchange.respond(info)


async def model_info(serving: Serving, exchange: Exchange) -> None:
    """What is served, under SGLang's keys."""
    understands = {"has_image_understanding": False, "has_audio_understanding": False}
    own = {"is_generation": True, "preferred_sampling_params": None, "weight_version": "default", **understands}
    await exchange.respond({**_paths(serving), "served_model_name": serving.model_name, **own})


def _paths(serving: Serving) -> dict[str, str]:
    """The tokenizer comes with the model, always."""
    model = serving.engine_config.model
    return {"model_path": model, "tokenizer_path": model}


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
