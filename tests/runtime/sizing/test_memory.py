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


def _plan_groups(config: EngineConfig | None = None, *, whole: int = 1000, **options: Any) -> PoolPlan:
    """Plan the pools of a group of whole sequences and of one with a window of 1,024 tokens and 5,000 bytes a token."""
    footprint = dataclasses.replace(FOOTPRINT, kv_per_token=(whole, 5000))
    given = {"windows": (None, 1024), "chunk": 2048, "max_running": 10**6, "whole_sequences": whole > 0} | options
    return _plan(config or EngineConfig(), footprint, **given)


def test_the_pools_of_all_groups_fill_the_memory_and_follow_from_the_first_one() -> None:
    plan = _plan_groups()
    taken = 16 * (plan.pages[0] * 1000 + plan.pages[1] * 5000)
    assert plan.memory_bound
    assert 0 <= 500 * MIB - taken < 16 * 6000
    # 128 pages of a chunk, and 65 for each 256 pages: a request is expected to have half of the 8,192 tokens.
    assert plan.pages[1] == 128 + -(-plan.pages[0] * 65 // 256)
    same = _plan_groups(EngineConfig(max_total_tokens=plan.pages[0] * 16), memory_bytes=2000 * MIB)
    assert same.pages == plan.pages


def test_whole_sequences_that_cost_nothing_never_limit_the_windows() -> None:
    plan = _plan_groups(whole=0)
    taken = 16 * plan.pages[1] * 5000
    assert 0 <= 500 * MIB - taken < 16 * 5000
    live = plan.pages[1] - 128
    assert plan.pages[0] >= live // 65 * 512, "as many requests of any length"
    few = _plan_groups(whole=0, max_running=8)
    assert few.pages == (2 * 8 * 512, 8 * 65 * 5 // 4 + 128)
    assert not few.memory_bound


def test_the_cap_of_a_cpu_holds_for_all_groups_together() -> None:
    plan = _plan_groups(platform="cpu", memory_bytes=2**40)
    assert 0 <= memory.CPU_POOL_BYTES - 16 * (plan.pages[0] * 1000 + plan.pages[1] * 5000) < 16 * 6000


def test_a_ratio_with_which_no_request_can_run_is_refused_with_one_that_lets_it() -> None:
    options: dict[str, Any] = {"max_total_tokens": 8192}
    with pytest.raises(ConfigError, match=r"swa_full_tokens_ratio=0.1 .* 816 tokens, .* needs 1056: .* to 0.129,"):
        _plan_groups(EngineConfig(swa_full_tokens_ratio=0.1, **options))
    assert _plan_groups(EngineConfig(swa_full_tokens_ratio=0.129, **options)).pages == (512, 66)
    assert _plan_groups(EngineConfig(swa_full_tokens_ratio=1.0, max_total_tokens=160)).pages == (10, 10)


def test_a_context_that_is_no_multiple_of_a_page_is_not_cut() -> None:
    assert _plan(EngineConfig(context_length=1000), max_running=1) == PoolPlan((63,), 1000)
    assert _plan(EngineConfig(context_length=8), max_running=1) == PoolPlan((1,), 8)


def test_max_total_tokens_decides_and_the_context_is_fitted() -> None:
    assert _plan(EngineConfig(max_total_tokens=10000)) == PoolPlan((625,), 8192)
    assert _plan(EngineConfig(max_total_tokens=1000)) == PoolPlan((62,), 992)


def test_pages_decide_as_tokens_do() -> None:
    assert _plan(EngineConfig(num_gpu_blocks_override=62)) == _plan(EngineConfig(max_total_tokens=1000))
    assert _plan(EngineConfig(num_gpu_blocks_override=1, page_size=64)).pages == (1,)


@pytest.mark.parametrize("platform", ["cuda", "cpu"])
def test_bytes_decide_whatever_running_requests_can_fill_and_whatever_share_of_memory_is_used(platform: str) -> None:
    options: dict[str, Any] = {"platform": platform, "memory_bytes": 2000 * MIB, "max_running": 1}
    plan = _plan(EngineConfig(kv_cache_memory_bytes=1600 * MIB), **options)
    assert plan.pages == (1600 * MIB // (16 * (MIB // 100)),)
    assert not plan.memory_bound
    assert _plan(EngineConfig(kv_cache_memory_bytes=1600 * MIB), most_pages=(99,), **options).pages == (99,)
    groups = _plan_groups(EngineConfig(kv_cache_memory_bytes=100 * MIB))
    assert 0 <= 100 * MIB - 16 * (groups.pages[0] * 1000 + groups.pages[1] * 5000) < 16 * 6000
    assert _plan_groups(EngineConfig(kv_cache_memory_bytes=1600 * MIB), whole=0, **options).pages[0] == 2 * 512


@pytest.mark.parametrize("name", ["max_total_tokens", "num_gpu_blocks_override", "kv_cache_memory_bytes"])
def test_a_pool_that_memory_can_not_hold_is_refused_with_one_that_it_can(name: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"{name}=2147483647 takes .* of each device, .* at most --\S+ \d+ fits"
    ) as error:
        _plan(EngineConfig(**{name: 2**31 - 1}))
    fitting = int(str(error.value).split()[-2])
    assert (FOOTPRINT.non_pool + _plan(EngineConfig(**{name: fitting})).pages[0] * 16 * (MIB // 100)) <= 1000 * MIB


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
        ({"kv_cache_memory_bytes": 99}, {}, "kv_cache_memory_bytes=99 is less than the 167760 bytes of one page of 16"),
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
