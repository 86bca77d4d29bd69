"""What a deployment must know of its device, whether it is attached or only described by a target file."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from typing import Any

import psutil

from jaxserve.config.schema import DEFAULT_MEM_FRACTION, EngineConfig
from jaxserve.runtime.devices.target import Target, load_target
from pallas_kernels.paged_attention import Target as KernelTarget
from pallas_kernels.paged_attention import target_of

_ARENA = "XLA_CLIENT_MEM_FRACTION"
_ARENA_BEFORE_0_11 = "XLA_PYTHON_CLIENT_MEM_FRACTION"
_ARENA_MARGIN = 0.04
_XLA_DEFAULT_ARENA = 0.75


@dataclasses.dataclass(frozen=True)
class DeviceFacts:
    """One device of a deployment: `memory_bytes` in all, of which `--mem-fraction-static` says how much is used.

    `max_devices` is how many there are to spread a model over.
    """

    kernels: KernelTarget
    memory_bytes: int
    max_devices: int = 1

    @property
    def platform(self) -> str:
        """`cpu`, `gpu` or `cuda`, `tpu`."""
        return self.kernels.platform


def reserve_memory(config: EngineConfig) -> None:
    """Before jax has devices: on a GPU, XLA takes an arena of fixed size when it starts, which is made to hold what the
    deployment plans with."""
    fraction = config.mem_fraction_static or DEFAULT_MEM_FRACTION
    if _ARENA_BEFORE_0_11 not in os.environ:
        os.environ.setdefault(_ARENA, f"{min(fraction + _ARENA_MARGIN, 1.0):.2f}")


def facts_of_device(device: Any) -> DeviceFacts:
    """The facts of an attached device. A CPU's memory is what is free now, as others use it too."""
    if device.platform == "cpu":
        return DeviceFacts(target_of(device), psutil.virtual_memory().available)
    limit = (device.memory_stats() or {}).get("bytes_limit", 0)
    if device.platform != "tpu":
        limit = int(limit / float(os.environ.get(_ARENA) or os.environ.get(_ARENA_BEFORE_0_11) or _XLA_DEFAULT_ARENA))
    return DeviceFacts(target_of(device), limit)


def facts_of_devices(devices: Sequence[Any], used: int) -> DeviceFacts:
    """The facts of each of some attached devices of one kind, `used` of which share a CPU's memory."""
    facts = facts_of_device(devices[0])
    parts = used if facts.platform == "cpu" else 1
    return dataclasses.replace(facts, memory_bytes=facts.memory_bytes // parts, max_devices=len(devices))


def free_bytes(device: Any) -> int:
    """Memory of an attached device that nobody holds now; on a GPU, what XLA's arena leaves outside counts too."""
    if device.platform == "cpu":
        return psutil.virtual_memory().available
    return facts_of_device(device).memory_bytes - int((device.memory_stats() or {}).get("bytes_in_use", 0))


def facts_of_target(name: str) -> DeviceFacts:
    """The facts of a device that isn't attached. Raises `ConfigError` for a target that isn't known."""
    target: Target = load_target(name)
    return DeviceFacts(target_of(target), target.memory_bytes, max(target.topologies))
