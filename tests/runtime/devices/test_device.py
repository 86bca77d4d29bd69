"""The facts about a device are the same whether it is attached or described by a target."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from jaxserve.config.schema import EngineConfig
from jaxserve.errors import ConfigError
from jaxserve.runtime.devices import device as devices
from jaxserve.runtime.devices.device import (
    facts_of_device,
    facts_of_devices,
    facts_of_target,
    free_bytes,
    reserve_memory,
)
from jaxserve.runtime.devices.target import load_target


def _attached(platform: str, limit: int, **facts: Any) -> Any:
    return SimpleNamespace(
        platform=platform, device_kind="some", memory_stats=lambda: {"bytes_limit": limit}, **facts
    )  # fmt: skip


def test_a_described_gpu_has_the_facts_of_an_attached_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_CLIENT_MEM_FRACTION", "0.92")
    facts = facts_of_target("nvidia-h200")
    total = load_target("nvidia-h200").memory_bytes
    real = facts_of_device(_attached("cuda", int(total * 0.92), compute_capability="9.0"))
    assert facts.memory_bytes == pytest.approx(real.memory_bytes, rel=1e-6)
    assert facts.kernels.capability == real.kernels.capability == (9, 0)
    assert (facts.max_devices, real.max_devices) == (8, 1)


def test_a_tpu_has_the_memory_it_reports() -> None:
    assert facts_of_device(_attached("tpu", 2**34)).memory_bytes == 2**34


def test_a_cpu_has_the_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=123))
    assert facts_of_device(_attached("cpu", 0)).memory_bytes == 123


@pytest.mark.parametrize("stats", [None, {}, {"bytes_in_use": 5}])
def test_the_memory_of_a_gpu_without_a_limit_is_that_of_nvidia_smi(
    stats: dict[str, int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XLA_PYTHON_CLIENT_ALLOCATOR", "platform")
    monkeypatch.setattr(devices, "nvidia_memory_bytes", {"NVIDIA L4": 23 * 2**30}.get)
    gpu = SimpleNamespace(
        platform="gpu", device_kind="NVIDIA L4", compute_capability="8.9", memory_stats=lambda: stats
    )  # fmt: skip
    devices._memory_without_limit.cache_clear()
    assert facts_of_device(gpu).memory_bytes == 23 * 2**30
    assert free_bytes(gpu) == 23 * 2**30 - (5 if stats else 0)
    gpu.device_kind = "NVIDIA L40"
    with pytest.raises(ConfigError, match=r"NVIDIA L40 can't be read.* with XLA_PYTHON_CLIENT_ALLOCATOR=platform"):
        facts_of_device(gpu)


@pytest.mark.parametrize("name", ["XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"])
def test_an_arena_smaller_than_the_plan_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices.os, "environ", {name: "0.5"})
    gpu = _attached("gpu", 2**30, compute_capability="9.0")
    with pytest.raises(ConfigError, match=rf"{name}=0.5 lets XLA use less .* --mem-fraction-static 0.88 plans"):
        facts_of_devices([gpu], EngineConfig())
    for settings in ({"mem_fraction_static": 0.5}, {"kv_cache_memory_bytes": 2**20}):
        assert facts_of_devices([gpu], EngineConfig(**settings)).memory_bytes == 2**31
    assert facts_of_devices([_attached("tpu", 2**30)], EngineConfig()).memory_bytes == 2**30


def test_devices_of_a_cpu_share_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=120))
    facts = facts_of_devices([_attached("cpu", 0)] * 8, EngineConfig(tp_size=2, dp_size=3, dp_mode="mesh"))
    assert (facts.memory_bytes, facts.max_devices) == (20, 8)
    staged = EngineConfig(tp_size=2, pp_size=3, nnodes=3, dist_init_addr="10.0.0.1:5000")
    assert facts_of_devices([_attached("cpu", 0)] * 2, staged).memory_bytes == 60, "of the devices of this process"


def test_stages_have_devices_of_all_hosts() -> None:
    assert facts_of_target("nvidia-h200", 4, 4).max_devices == 32


@pytest.mark.parametrize(
    ("settings", "before", "arena"),
    [
        ({}, {}, "0.92"),
        ({}, {"XLA_CLIENT_MEM_FRACTION": ""}, "0.92"),
        ({"mem_fraction_static": 0.99}, {}, "1.00"),
        ({"mem_fraction_static": 0.5}, {"XLA_CLIENT_MEM_FRACTION": "0.7"}, "0.7"),
        ({"kv_cache_memory_bytes": 2**30}, {}, "0.99"),
    ],
)
def test_the_arena_of_a_gpu_holds_the_planned_memory(
    settings: dict[str, Any], before: dict[str, str], arena: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = dict(before)
    monkeypatch.setattr(devices.os, "environ", environment)
    reserve_memory(EngineConfig(**settings))
    assert environment["XLA_CLIENT_MEM_FRACTION"] == arena
