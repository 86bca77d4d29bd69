"""`/v1/loads` and `/get_load`: how busy the engine is, for gateways that balance load. Each engine process is one load.

The numbers are the last reading that each engine sent, with a step or as a sign of life. Nothing here asks an engine:
gateways poll these routes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from statistics import fmean
from urllib.parse import parse_qsl

import msgspec

import jaxserve
from jaxserve.config.data_parallel import parallelism, resolve_dp_mode
from jaxserve.errors import InvalidRequestError
from jaxserve.observability.acceptance import acceptance
from jaxserve.server.errors import unknown_model
from jaxserve.server.http.exchange import HttpExchange
from jaxserve.server.server_state import ServerState

_PARAMETERS = ("dp_rank", "format", "include", "model")
_SECTIONS = ("all", "core", "disagg", "lora", "memory", "queues", "spec")


class QueueFigures(msgspec.Struct):
    """The requests that wait for a slot."""

    waiting: int


class SpeculationFigures(msgspec.Struct):
    """The tokens that a request got from a verified draft on average, and the share of draft tokens accepted."""

    accept_length: float
    accept_rate: float


class Load(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The load of one engine process. Token counts are of the KV cache; `num_total_tokens` adds those of prompts that
    no step computes yet. `utilization` is the larger share of its slots and of its KV cache in use, `cache_hit_rate`
    the share of prompt tokens found in the prefix cache since the start. There are no sections memory, lora and disagg.
    """

    dp_rank: int
    num_running_reqs: int
    num_waiting_reqs: int
    num_total_reqs: int
    num_used_tokens: int
    num_total_tokens: int
    max_total_num_tokens: int
    max_running_requests: int
    token_usage: float
    gen_throughput: float
    cache_hit_rate: float
    utilization: float
    queues: QueueFigures | None = None
    speculative: SpeculationFigures | None = None


class AllLoads(msgspec.Struct, kw_only=True):
    """The sums and means over all loads."""

    total_running_reqs: int
    total_waiting_reqs: int
    total_reqs: int
    avg_token_usage: float
    avg_throughput: float
    avg_utilization: float


class Loads(msgspec.Struct, kw_only=True):
    """The loads of all engine processes, or of the one asked for. Each has `num_accelerators` devices."""

    timestamp: str
    version: str
    accelerator: str
    num_accelerators: int
    dp_rank_count: int
    loads: list[Load]
    aggregate: AllLoads


async def loads(state: ServerState, exchange: HttpExchange) -> None:
    """Answer with the loads, all or that of `dp_rank`, with the sections that `include` lists."""
    asked = _parameters(exchange)
    if asked.get("format", "json") != "json":
        raise InvalidRequestError(
            f"format must be json, got {asked['format']!r}; GET /metrics has Prometheus metrics", param="format"
        )
    if asked.get("model", state.model_name) != state.model_name:
        raise unknown_model(asked["model"], state.model_name)
    sections = {name.strip() for name in asked.get("include", "all").split(",")}
    if unknown := sections.difference(_SECTIONS):
        raise InvalidRequestError(
            f"include names {min(unknown)!r}; the sections are {', '.join(_SECTIONS)}", param="include"
        )
    queues, spec = (not sections.isdisjoint(("all", name)) for name in ("queues", "spec"))
    found = _loads(state, queues=queues, spec=spec)
    if "dp_rank" in asked:
        ranks = {str(load.dp_rank): load for load in found}
        if asked["dp_rank"] not in ranks:
            raise InvalidRequestError(
                f"dp_rank must be an integer in [0, {len(found) - 1}], got {asked['dp_rank']!r}", param="dp_rank"
            )
        found = [ranks[asked["dp_rank"]]]
    divided = parallelism(resolve_dp_mode(state.engine_config))
    await exchange.respond(
        Loads(
            timestamp=datetime.now(UTC).isoformat(),
            version=jaxserve.__version__,
            accelerator=state.require_loaded().engine.info.device,
            num_accelerators=divided.num_devices,
            dp_rank_count=len(found),
            loads=found,
            aggregate=_aggregate(found),
        )
    )


async def get_load(state: ServerState, exchange: HttpExchange) -> None:
    """Answer with the loads under SGLang's older keys."""
    await exchange.respond(
        [
            {
                "dp_rank": load.dp_rank,
                "num_reqs": load.num_total_reqs,
                "num_waiting_reqs": load.num_waiting_reqs,
                "num_tokens": load.num_total_tokens,
            }
            for load in _loads(state)
        ]
    )


def _parameters(exchange: HttpExchange) -> dict[str, str]:
    """Return the parameters of the query. Raises `InvalidRequestError` for one that doesn't exist."""
    asked = dict(parse_qsl(exchange.scope["query_string"].decode("latin-1"), keep_blank_values=True))
    if unknown := asked.keys() - set(_PARAMETERS):
        raise InvalidRequestError(
            f"there is no query parameter {min(unknown)!r}; there are {', '.join(_PARAMETERS)}", param=min(unknown)
        )
    return asked


def _loads(state: ServerState, *, queues: bool = False, spec: bool = False) -> list[Load]:
    """Return the load of each engine process, from its last reading. Raises the 503 of a model that isn't loaded."""
    engine = state.require_loaded().engine
    slots = engine.info.max_running_requests // len(engine.replicas)
    page_size = engine.info.page_size
    found = []
    for number, replica in enumerate(engine.replicas):
        stats = replica.stats
        used = (stats.num_pages - stats.num_free_pages - stats.num_evictable_pages) * page_size
        drafts = acceptance(stats)
        found.append(
            Load(
                dp_rank=number,
                num_running_reqs=stats.num_running,
                num_waiting_reqs=stats.num_waiting,
                num_total_reqs=stats.num_running + stats.num_waiting,
                num_used_tokens=used,
                num_total_tokens=used + stats.num_queued_tokens,
                max_total_num_tokens=(stats.num_pages or engine.info.num_pages) * page_size,
                max_running_requests=slots,
                token_usage=stats.token_usage,
                gen_throughput=state.metrics.replica_throughput(number),
                cache_hit_rate=stats.cache_hit_tokens / max(stats.cache_query_tokens, 1),
                utilization=max(stats.num_running / slots, stats.token_usage),
                queues=QueueFigures(stats.num_waiting) if queues else None,
                speculative=SpeculationFigures(drafts.length, drafts.rate) if spec and drafts.drafts else None,
            )
        )
    return found


def _aggregate(found: Sequence[Load]) -> AllLoads:
    def total(of: Callable[[Load], int]) -> int:
        return sum(map(of, found))

    def mean(of: Callable[[Load], float]) -> float:
        return fmean(map(of, found))

    return AllLoads(
        total_running_reqs=total(lambda load: load.num_running_reqs),
        total_waiting_reqs=total(lambda load: load.num_waiting_reqs),
        total_reqs=total(lambda load: load.num_total_reqs),
        avg_token_usage=mean(lambda load: load.token_usage),
        avg_throughput=mean(lambda load: load.gen_throughput),
        avg_utilization=mean(lambda load: load.utilization),
    )
