"""Routes for operators: probes, information, metrics, cache flush. They answer in every phase of the server."""

from __future__ import annotations

import asyncio
import uuid
from typing import Any
from urllib.parse import parse_qs

import msgspec

import jaxserve
from jaxserve.api_types import EngineRequest, EngineStats, FinishReason, SamplingParams
from jaxserve.config.data_parallel import parallelism
from jaxserve.config.server_schema import SECRETS
from jaxserve.errors import InvalidRequestError, JaxserveError, QueueFullError
from jaxserve.observability.acceptance import acceptance
from jaxserve.observability.exposition import CONTENT_TYPE
from jaxserve.server.errors import UnavailableError, request_error
from jaxserve.server.http.exchange import HttpExchange
from jaxserve.server.server_state import LoadedModel, ServerState

# Statistics must not wait for an engine that hangs.
_STATS_TIMEOUT = 2.0
# A flush waits for the running step, which may be long.
_FLUSH_TIMEOUT = 30.0
# SGLang's limit; behind long prompts, a token may take seconds.
_GENERATE_TIMEOUT = 20.0
# How often to check whether an engine with a full queue generates tokens for other requests.
_POLL_SECONDS = 0.1


async def health(state: ServerState, exchange: HttpExchange) -> None:
    """Answer 200 while the engine makes progress (also while draining), else 503 with the reason."""
    reason = state.unhealthy_reason
    if reason is not None:
        await exchange.respond({"status": "unhealthy", "reason": reason}, status=503)
    else:
        phase = state.phase
        status = "ok" if phase == "ready" else phase
        await exchange.respond({"status": status}, status=503 if phase == "starting" else 200)


async def health_generate(state: ServerState, exchange: HttpExchange) -> None:
    """Answer 200 once the engine has generated a token: for this request or, if this one has to wait, for another. A
    model that generates nothing computes a prompt instead."""
    loaded = state.require_loaded()
    before = _num_computed(loaded)
    try:
        async with asyncio.timeout(_GENERATE_TIMEOUT):
            await _compute_one(loaded)
    except TimeoutError as error:
        if _num_computed(loaded) == before:
            what = "generated no token" if loaded.task.generates else "computed no prompt"
            raise UnavailableError(f"The engine has {what} within {_GENERATE_TIMEOUT:g} s") from error
    await exchange.respond({"status": "ok"})


def _num_computed(loaded: LoadedModel) -> int:
    """Return how many tokens the engine has generated or, for a model that generates none, computed of prompts."""
    stats = loaded.engine.stats
    return stats.generation_tokens if loaded.task.generates else stats.prompt_tokens


async def _compute_one(loaded: LoadedModel) -> None:
    """Return when the engine has generated a token, or computed a prompt, for this request or another one."""
    name = f"health-{uuid.uuid4().hex}"
    pools = not loaded.task.generates
    request = EngineRequest(
        request_id=name,
        group_id=name,
        prompt_ids=[loaded.tokenizer.bos_id or 0],
        sampling=SamplingParams(max_tokens=0 if pools else 1, temperature=0.0),
        pooled=pools,
    )
    before = _num_computed(loaded)
    try:
        async for event in loaded.engine.submit(request):
            if event.finish_reason is FinishReason.ERROR:
                raise request_error(event.error or "", engine_dead=loaded.engine.on_death.done())
    except QueueFullError:
        while _num_computed(loaded) == before:
            await asyncio.sleep(_POLL_SECONDS)
    finally:
        loaded.engine.abort([name])


async def ready(state: ServerState, exchange: HttpExchange) -> None:
    """Answer 200 while the server accepts new requests, else 503."""
    phase = state.phase if state.unhealthy_reason is None else "unhealthy"
    await exchange.respond({"status": phase}, status=200 if phase == "ready" else 503)


async def version(state: ServerState, exchange: HttpExchange) -> None:
    """Answer with the version of jaxserve."""
    await exchange.respond({"version": jaxserve.__version__})


async def metrics(state: ServerState, exchange: HttpExchange) -> None:
    """Answer in Prometheus' text format, with the engine's current statistics."""
    if state.loaded is not None:
        await _refresh_stats(state.loaded)
    body = state.metrics.render()
    await exchange.respond_text(body.decode(), CONTENT_TYPE)


async def load(state: ServerState, exchange: HttpExchange) -> None:
    """Answer with the number of requests with a body that are not answered completely, as vLLM does."""
    await exchange.respond({"server_load": sum(process.open_requests for process in await state.api_processes())})


async def server_info(state: ServerState, exchange: HttpExchange) -> None:
    """Answer with the version, settings, engine and its statistics, including their integrity check.

    The first keys are SGLang's, which gateways and benchmarks read.
    """
    hidden = {name: "***" for name in SECRETS if getattr(state.config, name, None) is not None}
    divided = parallelism(state.engine_config)
    processes = await state.api_processes()
    info: dict[str, Any] = {
        "version": jaxserve.__version__,
        "model_id": state.model_name,
        **_paths(state),
        "served_model_name": state.model_name,
        "weight_version": state.config.weight_version,
        "is_embedding": not _generates(state),
        "disaggregation_mode": "null",
        "tp_size": divided.tensor,
        "dp_size": divided.data * divided.replicas,
        "pp_size": divided.stages,
        "ep_size": divided.expert_parts,
        "load_balance_method": "auto",
        "phase": state.phase,
        "unhealthy": state.unhealthy_reason,
        "open_requests": sum(process.open_requests for process in processes),
        "api_processes": processes,
        "server_config": msgspec.to_builtins(state.config) | hidden,
        "engine_config": state.engine_config.masked(),
        "engine": None,
        "replicas": [],
        "stats": None,
        "stats_are_fresh": False,
    }
    loaded = state.loaded
    if loaded is not None:
        engine = loaded.engine
        info["engine"] = msgspec.to_builtins(engine.info) | {
            "max_total_num_tokens": engine.info.max_total_num_tokens,
        }
        if (kv_events := state.engine_config.kv_events_config) is not None:
            info["kv_events"] = kv_events.for_routers(engine.info.page_size, info["dp_size"])
        fresh = await _refresh_stats(loaded)
        info["context_length"] = loaded.max_model_len
        info["max_total_tokens"] = engine.info.max_total_num_tokens
        info["max_running_requests"] = engine.info.max_running_requests
        info["replicas"] = engine.replicas
        stats = info["stats"] = fresh or engine.stats
        drafts = {"avg_spec_accept_length": acceptance(stats).length} if stats.accepted_by_position else {}
        info["internal_states"] = [{"last_gen_throughput": state.metrics.generation_throughput} | drafts]
        info["stats_are_fresh"] = fresh is not None
    await exchange.respond(info)


async def model_info(state: ServerState, exchange: HttpExchange) -> None:
    """Answer with facts about the served model, under SGLang's keys."""
    understands = {"has_image_understanding": False, "has_audio_understanding": False}
    own = {
        "is_generation": _generates(state),
        "preferred_sampling_params": None,
        "weight_version": state.config.weight_version,
        **understands,
    }
    await exchange.respond({**_paths(state), "served_model_name": state.model_name, **own})


def _generates(state: ServerState) -> bool:
    """Return whether the model generates text; before it is loaded, whether that was asked for or is likely."""
    return state.engine_config.runner != "pooling" if state.loaded is None else state.loaded.task.generates


def _paths(state: ServerState) -> dict[str, str]:
    """Return the paths of model and tokenizer."""
    config = state.engine_config
    return {"model_path": config.model, "tokenizer_path": config.tokenizer_path or config.model}


async def flush_cache(state: ServerState, exchange: HttpExchange) -> None:
    """Empty the prefix cache. Running requests keep their pages, but later requests can't reuse them."""
    await exchange.respond_text(f"Cache flushed: {await _flush(state)} pages given back.\n")


async def reset_prefix_cache(state: ServerState, exchange: HttpExchange) -> None:
    """Empty the prefix cache and answer as vLLM does. Copies in host memory go, too, whatever `reset_external` says."""
    query = parse_qs(exchange.scope["query_string"].decode("latin-1"))
    if query.get("reset_running_requests", ["false"])[-1].lower() not in ("false", "0"):
        raise InvalidRequestError(
            "reset_running_requests is not supported: running requests keep their pages; leave it out, or abort them "
            "with /abort_request",
            param="reset_running_requests",
        )
    await _flush(state)
    await exchange.respond({"success": True})


async def _flush(state: ServerState) -> int:
    try:
        return await state.require_loaded().engine.flush_cache(_FLUSH_TIMEOUT)
    except TimeoutError as error:
        raise UnavailableError(f"The engine has not answered within {_FLUSH_TIMEOUT:g} s") from error


async def _refresh_stats(loaded: LoadedModel) -> EngineStats | None:
    """Return the engine's current statistics with its integrity check, or None if it doesn't answer in time."""
    try:
        return await loaded.engine.refresh_stats(_STATS_TIMEOUT)
    except (JaxserveError, TimeoutError):
        return None
