"""The settings of /metrics: which labels all series get, and the bounds of histograms by the names of ours, vLLM's and
SGLang's."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from jaxserve.errors import ConfigError

METRICS_PREFIXES = ("vllm", "sglang")

# vLLM gives bounds to groups of histograms.
_GROUPS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "time_to_first_token": ("time_to_first_token_seconds",),
        "inter_token_latency": ("inter_token_latency_seconds", "request_time_per_output_token_seconds"),
        "request_latency": (
            "e2e_request_latency_seconds",
            "request_queue_time_seconds",
            "request_prefill_time_seconds",
            "request_decode_time_seconds",
            "request_inference_time_seconds",
        ),
        "request_tokens": (
            "request_prompt_tokens",
            "request_prefill_kv_computed_tokens",
            "request_generation_tokens",
            "request_max_num_generation_tokens",
            "request_params_max_tokens",
        ),
    }
)
HISTOGRAMS = frozenset(
    {*(name for names in _GROUPS.values() for name in names), "request_params_n", "http_request_duration_seconds"}
)
"""The names of the histograms that have bounds of their own, without prefix."""

# Names that vLLM and SGLang have for these.
_SECOND_NAMES = {
    "time_per_output_token_seconds": "inter_token_latency_seconds",
    "queue_time_seconds": "request_queue_time_seconds",
    "prompt_tokens_histogram": "request_prompt_tokens",
    "uncached_prompt_tokens_histogram": "request_prefill_kv_computed_tokens",
    "generation_tokens_histogram": "request_generation_tokens",
}
_MOST_BOUNDS = 200
_LABEL = re.compile(r"(?!__)[a-zA-Z_][a-zA-Z0-9_]*")

SERIES_LABELS = frozenset(
    {
        *("model_name", "le", "engine", "engine_type", "tp_rank", "pp_rank", "moe_ep_rank", "dp_rank", "reason"),
        *("finished_reason", "handler", "endpoint", "method", "status", "status_code", "source", "cache_source"),
        *("mode", "pool", "cuda_graph", "kind", "expert", "layer", "stage", "position", "sleep_state", "cache_dtype"),
        *("schedule_policy", "page_size", "num_pages", "chunked_prefill_size", "max_model_len", "device", "dtype"),
        *("attention_backend", "block_size", "num_gpu_blocks", "num_cpu_blocks", "kv_cache_size_tokens"),
        *("kv_cache_max_concurrency", "enable_prefix_caching", "gpu_memory_utilization"),
    }
)
"""The labels that series have already."""


def check_metric_settings(
    prefixes: tuple[str, ...], labels: Mapping[str, Any] | None, buckets: Mapping[str, Any] | None
) -> None:
    """Raise `ConfigError` for an engine, a label or a histogram that the server can't have."""
    for prefix in prefixes:
        if prefix not in METRICS_PREFIXES:
            raise ConfigError(f"metrics_prefix must be one of {', '.join(METRICS_PREFIXES)}, got {prefix!r}")
    for label, value in (labels or {}).items():
        if not _LABEL.fullmatch(label):
            raise ConfigError(f"extra_metric_labels: {label!r} is no label; write one like pod_name")
        if label in SERIES_LABELS:
            raise ConfigError(f"extra_metric_labels: series have the label {label} already; choose another name")
        if not isinstance(value, str):
            raise ConfigError(f"extra_metric_labels: {label} must be a string, got {value!r}")
    histogram_bounds(buckets)


def histogram_bounds(buckets: Mapping[str, Any] | None) -> dict[str, tuple[float, ...]]:
    """Return the bounds of `custom_histogram_buckets` by the names of our histograms, without prefix.

    A histogram's own name counts more than that of its group. Raises `ConfigError` for an unknown name, and unless
    bounds are finite and ascend.
    """
    bounds: dict[str, tuple[float, ...]] = {}
    for name, values in sorted((buckets or {}).items(), key=lambda item: item[0] not in _GROUPS):
        ours = _SECOND_NAMES.get(name, name)
        if name not in _GROUPS and ours not in HISTOGRAMS:
            known = ", ".join(sorted({*_GROUPS, *HISTOGRAMS, *_SECOND_NAMES}))
            raise ConfigError(f"custom_histogram_buckets: no bounds can be set for {name!r}; choose from {known}")
        bounds.update(dict.fromkeys(_GROUPS.get(name, (ours,)), _bounds(name, values)))
    return bounds


def _bounds(name: str, values: Any) -> tuple[float, ...]:
    if not isinstance(values, list | tuple) or not 1 <= len(values) <= _MOST_BOUNDS:
        raise ConfigError(
            f"custom_histogram_buckets: {name} must be a list of 1 to {_MOST_BOUNDS} numbers, got {values!r}"
        )
    for value in values:
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise ConfigError(f"custom_histogram_buckets: {name} must have finite numbers, got {value!r}")
    bounds = tuple(map(float, values))
    for lower, upper in itertools.pairwise(bounds):
        if lower >= upper:
            raise ConfigError(f"custom_histogram_buckets: {name} must ascend, but {upper:g} follows {lower:g}")
    return bounds
