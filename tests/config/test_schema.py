"""Settings of which one says nothing without another, or which contradict each other."""

from __future__ import annotations

import pytest

from jaxserve.config.schema import EngineConfig
from jaxserve.errors import ConfigError

BY_PRIORITY = {"schedule_policy": "priority"}


@pytest.mark.parametrize("name", ["schedule_policy", "retraction_policy", "radix_eviction_policy"])
def test_priorities_of_requests_count_if_a_policy_goes_by_them(name: str) -> None:
    assert not EngineConfig().uses_priorities
    config = EngineConfig(**{name: "priority"}, schedule_low_priority_values_first=True, default_priority_value=3)
    assert config.uses_priorities


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"default_priority_value": 1}, "default_priority_value needs schedule_policy, .* to be priority"),
        ({"schedule_low_priority_values_first": True}, "schedule_low_priority_values_first needs schedule_policy"),
        ({"disable_priority_preemption": True}, "need schedule_policy=priority"),
        ({"retraction_policy": "priority", "priority_scheduling_preemption_threshold": 2}, "need schedule_policy=prio"),
        (
            BY_PRIORITY | {"disable_priority_preemption": True, "priority_scheduling_preemption_threshold": 2},
            "priority_scheduling_preemption_threshold=2 .* disable_priority_preemption .* keep one",
        ),
        ({"priority_scheduling_preemption_threshold": -1}, "preemption_threshold must be at least 0, got -1"),
        (
            {"disable_radix_cache": True, "radix_eviction_policy": "lfu"},
            "radix_eviction_policy=lfu .* disable_radix_cache disables; keep one",
        ),
        ({"prefill_max_requests": 0}, "prefill_max_requests must be at least 1, got 0"),
        (
            {"max_total_tokens": 99, "num_gpu_blocks_override": 9},
            "max_total_tokens and num_gpu_blocks_override .* keep",
        ),
        (
            {"kv_cache_memory_bytes": 99, "max_total_tokens": 9},
            "kv_cache_memory_bytes and max_total_tokens .* keep one",
        ),
        ({"kv_cache_memory_bytes": 99, "mem_fraction_static": 0.5}, "kv_cache_memory_bytes and mem_fraction_static .*"),
    ],
)
def test_settings_that_would_do_nothing_are_refused(given: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig(**given)  # type: ignore[arg-type]


def test_preemption_is_a_matter_of_the_queue() -> None:
    assert EngineConfig(**BY_PRIORITY, disable_priority_preemption=True).disable_priority_preemption  # type: ignore[arg-type]
    assert EngineConfig(max_total_tokens=99, mem_fraction_static=0.5).pool_tokens == 99
    assert EngineConfig(num_gpu_blocks_override=3, page_size=8).pool_tokens == 24


def test_a_pool_of_another_size_replaces_whatever_sets_it() -> None:
    for name in ("max_total_tokens", "num_gpu_blocks_override", "kv_cache_memory_bytes"):
        assert EngineConfig(**{name: 64}).with_pool_tokens(32) == EngineConfig(max_total_tokens=32)  # type: ignore[arg-type]
