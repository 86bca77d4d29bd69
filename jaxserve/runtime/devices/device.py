"""The facts about a device that a deployment needs, for an attached device or one that a target file describes."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Sequence
from typing import Any

import psutil

from jaxserve.accelerators import nvidia_memory_bytes
from jaxserve.config.data_parallel import parallelism
from jaxserve.config.schema import EngineConfig
from jaxserve.errors import ConfigError
from jaxserve.runtime.devices.target import DeviceTarget, load_target
from pallas_kernels.paged_attention import KernelTarget, target_of

_ARENA = "XLA_CLIENT_MEM_FRACTION"
_ARENA_BEFORE_0_11 = "XLA_PYTHON_CLIENT_MEM_FRACTION"
_ARENA_MARGIN = 0.04
_XLA_DEFAULT_ARENA = 0.75
_ALLOCATOR = "XLA_PYTHON_CLIENT_ALLOCATOR"


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

    A share that the environment sets is left as it is. Must be called before jax gets its devices.
    """
    if not _arena_setting()[1]:
        os.environ[_ARENA] = f"{min(config.memory_fraction + _ARENA_MARGIN, 1.0):.2f}"


def _arena_setting() -> tuple[str, str]:
    """Return the variable that sets XLA's share of a GPU's memory, and the share, "" if it is not set."""
    name = _ARENA_BEFORE_0_11 if os.environ.get(_ARENA_BEFORE_0_11) else _ARENA
    return name, os.environ.get(name, "")


def facts_of_device(device: Any) -> DeviceFacts:
    """Return the facts about an attached device. A CPU's memory is what is free now, as other programs use it too.

    Raises `ConfigError` if the memory of a device can't be read.
    """
    if device.platform == "cpu":
        return DeviceFacts(target_of(device), psutil.virtual_memory().available)
    limit = (device.memory_stats() or {}).get("bytes_limit", 0)
    if device.platform == "tpu":
        return DeviceFacts(target_of(device), limit)
    if limit:
        return DeviceFacts(target_of(device), int(limit / float(_arena_setting()[1] or _XLA_DEFAULT_ARENA)))
    return DeviceFacts(target_of(device), _memory_without_limit(device.device_kind))


@functools.cache
def _memory_without_limit(kind: str) -> int:
    """Return the memory of a GPU for which XLA reports no limit, as its allocator takes memory when it needs some."""
    memory = nvidia_memory_bytes(kind)
    if memory is None:
        allocator = os.environ.get(_ALLOCATOR, "")
        because = f" with {_ALLOCATOR}={allocator}" if allocator else ""
        raise ConfigError(
            f"the memory of {kind} can't be read: jax reports no limit{because}, and nvidia-smi doesn't name this GPU; "
            f"unset {_ALLOCATOR}, or put nvidia-smi on the PATH"
        )
    return memory


def facts_of_devices(devices: Sequence[Any], config: EngineConfig) -> DeviceFacts:
    """Return the facts about each of the attached devices of this process, which are of one kind.

    On a CPU, the devices of the configuration share its memory. Raises `ConfigError` if the environment lets XLA use
    less of a GPU's memory than the deployment plans, or if the memory can't be read.
    """
    (name, share), planned = _arena_setting(), config.memory_fraction
    facts = facts_of_device(devices[0])
    if facts.platform == "cpu":
        divided = parallelism(config)
        used = divided.num_devices * divided.replicas // config.nnodes
        return dataclasses.replace(facts, memory_bytes=facts.memory_bytes // used, max_devices=len(devices))
    if config.kv_cache_memory_bytes is None and facts.platform != "tpu" and share and float(share) < planned:
        raise ConfigError(
            f"{name}={share} lets XLA use less of a GPU than --mem-fraction-static {planned:g} plans: "
            f"unset it, or set --mem-fraction-static to at most {share}"
        )
    return dataclasses.replace(facts, max_devices=len(devices))


def free_bytes(device: Any) -> int:
    """Return how much memory of an attached device is free; on a GPU, memory outside XLA's arena counts as free."""
    if device.platform == "cpu":
        return psutil.virtual_memory().available
    return facts_of_device(device).memory_bytes - int((device.memory_stats() or {}).get("bytes_in_use", 0))


def facts_of_target(name: str, nnodes: int = 1, stages: int = 1) -> DeviceFacts:
    """Return the facts about a device of hosts that aren't here. Raises `ConfigError` for an unknown target.

    `max_devices` is that of a model of this many pipeline stages.
    """
    target: DeviceTarget = load_target(name)
    return DeviceFacts(target_of(target), target.memory_bytes, target.max_devices(nnodes, stages))
