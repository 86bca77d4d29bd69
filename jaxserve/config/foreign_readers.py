"""Reads the settings of other engines that count otherwise than ours. `other_engines.tsv` names the readers."""

from __future__ import annotations

import math
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxserve.errors import ConfigError

_GIB = 2**30


def _num_draft_tokens(value: object, place: str) -> dict[str, Any]:
    tokens = _whole(value, place)
    if tokens < 2:
        raise ConfigError(f"{place} counts the token before the drafts too: it must be at least 2, got {tokens}")
    return {"num_speculative_tokens": tokens - 1}


def _attn_dp_size(value: object, place: str) -> dict[str, Any]:
    ranks = _whole(value, place)
    return {} if ranks == 1 else {"dp_size": ranks, "enable_dp_attention": True}


def _kv_offloading_size(value: object, place: str) -> dict[str, Any]:
    size = _number(value, place)
    return {"enable_hierarchical_cache": True, "hicache_size": round(size * _GIB / 1e9, 3)} if size else {}


def _kv_cache_gib(value: object, place: str) -> dict[str, Any]:
    size = _number(value, place)
    return {"kv_cache_memory_bytes": int(size * _GIB)} if size else {}


def _buckets(*histograms: str) -> Callable[[object, str], dict[str, Any]]:
    """Return a reader of the bounds of histograms: numbers, or one of SGLang's rules, `custom` or `tse`."""

    def read(value: object, place: str) -> dict[str, Any]:
        rule, *rest = value if isinstance(value, Sequence) and not isinstance(value, str) else str(value).split()
        if rule == "default":
            return {}
        numbers = rest if rule == "custom" else [rule, *rest]
        bounds = _two_sided(rest, place) if rule == "tse" else sorted({_number(bound, place) for bound in numbers})
        return {"custom_histogram_buckets": dict.fromkeys(histograms, bounds)}

    return read


def _two_sided(rule: Sequence[object], place: str) -> list[float]:
    """Return about `count` bounds around a middle, at distances that are the powers of a base."""
    if len(rule) != 3:
        raise ConfigError(f"{place} tse needs a middle, a base and a count, got {len(rule)} values")
    middle, base, count = (_number(part, place) for part in rule)
    distances = [base**power for power in range(1, math.ceil(count / 2) + 1)]
    return sorted({middle, *(middle + each for each in distances), *(max(0.0, middle - each) for each in distances)})


def _whole(value: object, place: str) -> int:
    number = _number(value, place)
    if number != int(number):
        raise ConfigError(f"{place} must be a whole number, got {value!r}")
    return int(number)


def _number(value: object, place: str) -> float:
    try:
        number = float(str(value))
    except ValueError:
        raise ConfigError(f"{place} must be a number, got {value!r}") from None
    if not 0 <= number < 1e15:
        raise ConfigError(f"{place} must be in [0, 1e15), got {value!r}")
    return number


READERS: Mapping[str, Callable[[object, str], Mapping[str, Any]]] = types.MappingProxyType(
    {
        "num_draft_tokens": _num_draft_tokens,
        "attn_dp_size": _attn_dp_size,
        "kv_offloading_size": _kv_offloading_size,
        "kv_cache_gib": _kv_cache_gib,
        "bucket_time_to_first_token": _buckets("time_to_first_token_seconds"),
        "bucket_inter_token_latency": _buckets("inter_token_latency"),
        "bucket_e2e_request_latency": _buckets("e2e_request_latency_seconds"),
        "prompt_tokens_buckets": _buckets("request_prompt_tokens", "request_prefill_kv_computed_tokens"),
        "generation_tokens_buckets": _buckets("request_generation_tokens"),
    }
)
"""Functions from the value of a flag and where it was written to settings of ours. They raise `ConfigError`."""
