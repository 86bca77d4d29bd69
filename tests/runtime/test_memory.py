"""Where memory goes: the pool from a flag or from what is free, the context fitted to it, errors that name a flag."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from jaxserve.config.schema import EngineConfig
from jaxserve.errors import ConfigError
from jaxserve.runtime import memory
from jaxserve.runtime.memory import PoolPlan, plan_pool

MIB = 2**20


def _gpu(limit: int = 1000 * MIB) -> Any:
    return SimpleNamespace(platform="cuda", memory_stats=lambda: {"bytes_limit": limit})


def _plan(config: EngineConfig, **options: Any) -> PoolPlan:
    facts = {
        "device": _gpu(),
        "weight_bytes": 300 * MIB,
        "activation_bytes": 80 * MIB,
        "bytes_per_token": MIB // 100,
        "model_context": 8192,
        "max_running": 256,
    }
    return plan_pool(config, **(facts | options))


def test_the_pool_takes_the_share_that_weights_and_activations_leave() -> None:
    assert _plan(EngineConfig()).num_pages == (500 * MIB // (MIB // 100)) // 16
    assert _plan(EngineConfig(mem_fraction_static=0.5)).num_pages == (120 * MIB // (MIB // 100)) // 16
    assert _plan(EngineConfig(page_size=64)).num_pages == (500 * MIB // (MIB // 100)) // 64


def test_the_pool_is_no_larger_than_what_running_requests_can_fill() -> None:
    assert _plan(EngineConfig(context_length=1000), max_running=2) == PoolPlan(126, 1000)


def test_a_context_that_is_no_multiple_of_a_page_is_whole() -> None:
    assert _plan(EngineConfig(context_length=1000), max_running=1) == PoolPlan(63, 1000)
    assert _plan(EngineConfig(context_length=8), max_running=1) == PoolPlan(1, 8)


def test_max_total_tokens_decides_and_the_context_is_fitted(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "jaxserve.runtime"):
        assert _plan(EngineConfig(max_total_tokens=10000)) == PoolPlan(625, 8192)
    assert caplog.text == ""
    with caplog.at_level(logging.INFO, "jaxserve.runtime"):
        assert _plan(EngineConfig(max_total_tokens=1000)) == PoolPlan(62, 992)
    assert "992 tokens instead of 8192" in caplog.text


def test_a_cpu_takes_a_capped_share(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = SimpleNamespace(platform="cpu")

    def pages(available: int) -> int:
        monkeypatch.setattr(memory.psutil, "virtual_memory", lambda: SimpleNamespace(available=available))
        options = {"device": cpu, "activation_bytes": 0, "bytes_per_token": 1024, "max_running": 10**6}
        return _plan(EngineConfig(), **options).num_pages

    assert pages(2**40) == memory.CPU_POOL_BYTES // 1024 // 16
    assert pages(500 * MIB) == (int(500 * MIB * memory.DEFAULT_FRACTION) - 300 * MIB) // 1024 // 16


@pytest.mark.parametrize(
    ("config", "options", "message"),
    [
        ({"context_length": 8193}, {}, "context_length=8193 is longer than the model's 8192.*--context-length"),
        ({"max_total_tokens": 15}, {}, "max_total_tokens=15 is less than one page of 16"),
        ({}, {"weight_bytes": 900 * MIB}, "no memory is left for the KV cache: 0.88 GiB.*--mem-fraction-static"),
        ({}, {"activation_bytes": 600 * MIB}, "no memory is left.*0.59 GiB of activations.*--chunked-prefill-size"),
        ({}, {"device": SimpleNamespace(platform="cuda", memory_stats=lambda: None)}, "no memory is left"),
    ],
)
def test_what_can_not_be_served_is_refused(config: dict[str, Any], options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        _plan(EngineConfig(**config), **options)
