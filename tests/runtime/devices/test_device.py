"""The facts about a device are the same whether it is attached or described by a target."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from jaxserve.config.schema import EngineConfig
from jaxserve.runtime.devices import device as devices
from jaxserve.runtime.devices.device import facts_of_device, facts_of_target, reserve_memory
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


@pytest.mark.parametrize(
    ("fraction", "before", "arena"),
    [(None, {}, "0.92"), (0.99, {}, "1.00"), (0.5, {"XLA_CLIENT_MEM_FRACTION": "0.7"}, "0.7")],
)
def test_the_arena_of_a_gpu_holds_the_planned_memory(
    fraction: float | None, before: dict[str, str], arena: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = dict(before)
    monkeypatch.setattr(devices.os, "environ", environment)
    reserve_memory(EngineConfig(mem_fraction_static=fraction))
    assert environment["XLA_CLIENT_MEM_FRACTION"] == arena
