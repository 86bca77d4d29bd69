"""The facts about a device that a deployment needs, for an attached device or one that a target file describes."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from typing import Any

import psutil

from jaxserve.config.schema import DEFAULT_MEM_FRACTION, EngineConfig
from jaxserve.runtime.devices.target import DeviceTarget, load_target
from pallas_kernels.paged_attention import KernelTarget, target_of

_ARENA = "XLA_CLIENT_MEM_FRACTION"
_ARENA_BEFORE_0_11 = "XLA_PYTHON_CLIENT_MEM_FRACTION"
_ARENA_MARGIN = 0.04
_XLA_DEFAULT_ARENA = 0.75


@dataclasses.dataclass(frozen=True)
class DeviceFacts:
    """Facts about one device. `memory_bytes` is its whole memory; `--mem-fraction-static` says how much may be used.

    `max_devices` is the number of devices that a model can be spread over.
    """

    kernels: KernelTarget
    memory_bytes: int
    max_devices: int = 1

    @property
    def platform(self) -> str:
        """The name of the platform: `cpu`, `gpu` or `cuda`, or `tpu`."""
        return self.kernels.platform


def reserve_memory(config: EngineConfig) -> None:
    """Set the share of a GPU's memory that XLA allocates when it starts, to hold all that the deployment plans.

    Must be called before jax gets its devices.
    """
    fraction = config.mem_fraction_static or DEFAULT_MEM_FRACTION
    if _ARENA_BEFORE_0_11 not in os.environ:
        os.environ.setdefault(_ARENA, f"{min(fraction + _ARENA_MARGIN, 1.0):.2f}")


def facts_of_device(device: Any) -> DeviceFacts:
    """Return the facts about an attached device. A CPU's memory is what is free now, as other programs use it too."""
    if device.platform == "cpu":
        return DeviceFacts(target_of(device), psutil.virtual_memory().available)
    limit = (device.memory_stats() or {}).get("bytes_limit", 0)
    if device.platform != "tpu":
        limit = int(limit / float(os.environ.get(_ARENA) or os.environ.get(_ARENA_BEFORE_0_11) or _XLA_DEFAULT_ARENA))
    return DeviceFacts(target_of(device), limit)


def facts_of_devices(devices: Sequence[Any], used: int) -> DeviceFacts:
    """Return the facts about each of several attached devices of a kind; on a CPU, `used` of them share its memory."""
    facts = facts_of_device(devices[0])
    parts = used if facts.platform == "cpu" else 1
    return dataclasses.replace(facts, memory_bytes=facts.memory_bytes // parts, max_devices=len(devices))


def free_bytes(device: Any) -> int:
    """Return how much memory of an attached device is free; on a GPU, memory outside XLA's arena counts as free."""
    if device.platform == "cpu":
        return psutil.virtual_memory().available
    return facts_of_device(device).memory_bytes - int((device.memory_stats() or {}).get("bytes_in_use", 0))


def facts_of_target(name: str) -> DeviceFacts:
    """Return the facts about a device that isn't attached. Raises `ConfigError` for an unknown target."""
    target: DeviceTarget = load_target(name)
    return DeviceFacts(target_of(target), target.memory_bytes, max(target.topologies))
