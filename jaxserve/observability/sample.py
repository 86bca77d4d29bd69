"""Parses the metrics of a running server, for `jaxserve doctor`. Owns which metrics are read; fetches nothing."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from jaxserve.api_types import StageTimes
from jaxserve.errors import JaxserveError
from jaxserve.observability.engine_metrics import PREFIX


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sample:
    """The state of a server `seconds` after the first sample.

    `problem` is the reason why the server has stopped serving; the numbers are then its last ones. `decode_used` and
    `decode_padding` count the rows of the decode programs that ran: those of sequences, and padding. `stages` are the
    times of the pipeline stages, () if there is only one.
    """

    seconds: float
    running: int
    waiting: int
    deferred: int
    max_running: int
    token_usage: float
    full_token_usage: float
    swa_token_usage: float
    new_token_ratio: float
    generation_tokens: int
    retractions: int
    queried_tokens: int
    hit_tokens: int
    decode_steps: int
    coarse_decode_steps: int
    decode_used: int
    decode_padding: int
    num_drafts: int
    draft_tokens: int
    accepted_tokens: int
    compiles_after_ready: int
    stages: tuple[StageTimes, ...] = ()
    problem: str | None = None


@dataclasses.dataclass(frozen=True)
class Settings:
    """The settings of a server; None if the server doesn't report them. Memory is in bytes per device.

    Settings apply to each of the `num_ranks` data-parallel ranks; samples count all ranks.
    """

    schedule_policy: str | None = None
    schedule_conservativeness: float | None = None
    free_bytes: int = 0
    working_bytes: int = 0
    memory_bound: bool = False
    num_ranks: int = 1
    speculative_method: str | None = None
    layer_partition: str | None = None


_MEMORY_METRICS = ("available_gpu_mem_bytes", "working_memory_bytes", "kv_cache_memory_bound")


def read_sample(metrics: str, seconds: float, problem: str | None = None) -> Sample:
    """Return a sample from the text of /metrics. Raises `JaxserveError` if it isn't that of a jaxserve server."""
    values: dict[str, list[tuple[Mapping[str, str], float]]] = {}
    for family in text_string_to_metric_families(metrics):
        for sample in family.samples:
            if sample.name.startswith(PREFIX):
                values.setdefault(sample.name.removeprefix(PREFIX), []).append((sample.labels, sample.value))

    def value(name: str, **labels: str) -> float:
        """Return the value with these labels, whichever others it has."""
        for found, number in values.get(name, ()):
            if labels.items() <= found.items():
                return number
        raise JaxserveError(f"/metrics has no {PREFIX}{name}: this is not a jaxserve of this version")

    coarse = int(value("decode_steps_total", cuda_graph="False"))
    return Sample(
        seconds=seconds,
        running=int(value("num_requests_running")),
        waiting=int(value("num_requests_waiting")),
        deferred=int(value("num_requests_waiting_by_reason", reason="deferred")),
        max_running=int(value("max_running_requests")),
        token_usage=value("token_usage"),
        full_token_usage=value("full_token_usage"),
        swa_token_usage=value("swa_token_usage"),
        new_token_ratio=value("new_token_ratio"),
        generation_tokens=int(value("generation_tokens_total")),
        retractions=int(value("num_retracted_reqs_total")),
        queried_tokens=int(value("prefix_cache_queries_total")),
        hit_tokens=int(value("prefix_cache_hits_total")),
        decode_steps=coarse + int(value("decode_steps_total", cuda_graph="True")),
        coarse_decode_steps=coarse,
        decode_used=int(value("bucket_used_total", kind="decode")),
        decode_padding=int(value("bucket_padding_total", kind="decode")),
        num_drafts=int(value("spec_decode_num_drafts_total")),
        draft_tokens=int(value("spec_decode_num_draft_tokens_total")),
        accepted_tokens=int(value("spec_decode_num_accepted_tokens_total")),
        compiles_after_ready=int(value("compiles_after_ready_total")),
        stages=tuple(
            StageTimes(
                value("stage_compute_seconds_total", stage=str(stage)),
                value("stage_wait_seconds_total", stage=str(stage)),
            )
            for stage in range(len(values.get("stage_compute_seconds_total", ())))
        ),
        problem=problem,
    )


def read_settings(metrics: str, server_info: Mapping[str, Any] | None) -> Settings:
    """Return the settings that /metrics reports, and those of /server_info if it could be read."""
    found = {
        sample.name.removeprefix(PREFIX): sample
        for family in text_string_to_metric_families(metrics)
        for sample in family.samples
        if sample.name.startswith(PREFIX) and sample.name.removeprefix(PREFIX) in ("engine_info", *_MEMORY_METRICS)
    }
    free, working, bound = (found[name].value if name in found else 0 for name in _MEMORY_METRICS)
    config = (server_info or {}).get("engine_config") or {}
    return Settings(
        found["engine_info"].labels["schedule_policy"] if "engine_info" in found else None,
        config.get("schedule_conservativeness"),
        free_bytes=int(free),
        working_bytes=int(working),
        memory_bound=bool(bound),
        num_ranks=(server_info or {}).get("dp_size") or 1,
        speculative_method=config.get("speculative_method"),
        layer_partition=config.get("pp_layer_partition"),
    )
