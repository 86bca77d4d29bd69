"""The size of the KV pool, from a flag or from the free memory, and the context fitted to it."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from jaxserve.config.schema import DEFAULT_MEM_FRACTION, EngineConfig
from jaxserve.errors import ConfigError
from jaxserve.runtime.sizing import memory
from jaxserve.runtime.sizing.memory import Footprint, InsufficientMemoryError, PoolPlan, plan_pool

MIB = 2**20


FOOTPRINT = Footprint(weights=250 * MIB, state=50 * MIB, activations=80 * MIB, kv_per_token=(MIB // 100,))


def _plan(config: EngineConfig, footprint: Footprint = FOOTPRINT, **options: Any) -> PoolPlan:
    facts = {"platform": "cuda", "memory_bytes": 1000 * MIB, "model_context": 8192, "max_running": 256}
    return plan_pool(config, footprint, **(facts | options))


def test_the_pool_takes_the_memory_that_weights_and_activations_leave() -> None:
    assert _plan(EngineConfig()).pages[0] == (500 * MIB // (MIB // 100)) // 16
    assert _plan(EngineConfig(mem_fraction_static=0.5)).pages[0] == (120 * MIB // (MIB // 100)) // 16
    assert _plan(EngineConfig(page_size=64)).pages[0] == (500 * MIB // (MIB // 100)) // 64


def test_the_pool_is_no_larger_than_running_requests_can_fill() -> None:
    assert _plan(EngineConfig(context_length=1000), max_running=2) == PoolPlan((126,), 1000)


def test_memory_bounds_the_pool_only_if_more_of_it_would_be_used() -> None:
    assert _plan(EngineConfig()).memory_bound
    assert not _plan(EngineConfig(context_length=1000), max_running=2).memory_bound
    assert not _plan(EngineConfig(max_total_tokens=10000)).memory_bound
    assert not _plan(EngineConfig(), platform="cpu", memory_bytes=2**40).memory_bound, "a CPU's is capped"
    assert _plan(EngineConfig(), platform="cpu").memory_bound


def test_a_context_that_is_no_multiple_of_a_page_is_not_cut() -> None:
    assert _plan(EngineConfig(context_length=1000), max_running=1) == PoolPlan((63,), 1000)
    assert _plan(EngineConfig(context_length=8), max_running=1) == PoolPlan((1,), 8)


def test_max_total_tokens_decides_and_the_context_is_fitted() -> None:
    assert _plan(EngineConfig(max_total_tokens=10000)) == PoolPlan((625,), 8192)
    assert _plan(EngineConfig(max_total_tokens=1000)) == PoolPlan((62,), 992)


def test_a_cpu_takes_a_capped_share() -> None:
    def pages(available: int) -> int:
        footprint = dataclasses.replace(FOOTPRINT, activations=0, kv_per_token=(1024,))
        options = {"platform": "cpu", "memory_bytes": available, "max_running": 10**6}
        return _plan(EngineConfig(), footprint, **options).pages[0]

    assert pages(2**40) == memory.CPU_POOL_BYTES // 1024 // 16
    assert pages(500 * MIB) == (int(500 * MIB * DEFAULT_MEM_FRACTION) - 300 * MIB) // 1024 // 16


@pytest.mark.parametrize(
    ("config", "options", "message"),
    [
        ({"context_length": 8193}, {}, "context_length=8193 is longer than the model's 8192.*--context-length"),
        ({"max_total_tokens": 15}, {}, "max_total_tokens=15 is less than one page of 16"),
    ],
)
def test_impossible_settings_are_refused(config: dict[str, Any], options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        _plan(EngineConfig(**config), **options)


@pytest.mark.parametrize(
    ("footprint", "memory_bytes"),
    [
        (dataclasses.replace(FOOTPRINT, weights=900 * MIB), 1000 * MIB),
        (dataclasses.replace(FOOTPRINT, activations=600 * MIB), 1000 * MIB),
        (dataclasses.replace(FOOTPRINT, state=600 * MIB), 1000 * MIB),
        (FOOTPRINT, 0),
    ],
)
def test_insufficient_memory_is_an_error_that_lists_what_takes_memory(footprint: Footprint, memory_bytes: int) -> None:
    shown = f"{footprint.weights / 2**30:.2f} GiB of weights, .* {footprint.activations / 2**30:.2f} GiB of activations"
    with pytest.raises(InsufficientMemoryError, match=f"no memory is left for the KV cache: {shown}"):
        _plan(EngineConfig(), footprint, memory_bytes=memory_bytes)
