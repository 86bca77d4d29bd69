"""Facts about kinds of devices that need not be attached: memory, speed, and how to call their compiler.

Reads the files `targets/*.yaml`, each of which describes one kind and names the sources of its facts. It never imports
jax; `topology.py` makes meshes of these devices.
"""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from jaxserve.config.nearest import nearest
from jaxserve.errors import ConfigError

TARGETS = Path(__file__).parent / "targets"


@dataclasses.dataclass(frozen=True)
class DeviceTarget:
    """A kind of device, as described by one file of `targets/`.

    `device_kind` and `compute_capability` are jax's names for it. `extra` is the extra of jaxserve that installs its
    compiler, `environment` the variables that the compiler needs to start without a device, `topologies` the arguments
    of `get_topology_desc` by number of devices, `target_config` XLA's description of a GPU. `devices_per_host` is the
    most that a host has; if it is None, every topology counts as one host.
    For one device, `memory_bytes` is the memory that programs can use, `memory_bandwidth` is in bytes per second, and
    `peak_flops` is the dense rate by operand type; the hardware has no units for a type that is missing.
    """

    name: str
    platform: str
    device_kind: str
    extra: str
    memory_bytes: int
    memory_bandwidth: int
    peak_flops: Mapping[str, float]
    environment: Mapping[str, str]
    topologies: Mapping[int, Mapping[str, Any]]
    compute_capability: str | None = None
    target_config: str | None = None
    devices_per_host: int | None = None

    def max_devices(self, nnodes: int, stages: int = 1) -> int:
        """Return the most devices that `nnodes` hosts have, and that there are topologies of, one for each stage."""
        most = max(self.topologies)
        return min(stages * most, nnodes * (self.devices_per_host or most))

    def topology(self, count: int) -> Mapping[str, Any]:
        """Return the smallest topology of at least `count` devices. Raises `ConfigError` if none is large enough."""
        for size in sorted(self.topologies):
            if size >= count:
                return self.topologies[size]
        raise ConfigError(
            f"target {self.name!r} has no topology of {count} devices: {max(self.topologies)} are the most; "
            "lower --tp-size, or divide the layers with --pp-size"
        )


def target_names() -> list[str]:
    """Return the names of all targets."""
    return sorted(path.stem for path in TARGETS.glob("*.yaml"))


@functools.cache
def load_target(name: str) -> DeviceTarget:
    """Read a target. Raises `ConfigError` for an unknown name."""
    if name not in target_names():
        hint = nearest(name, target_names()) or f"; there are: {', '.join(target_names())}"
        raise ConfigError(f"target {name!r} is not known{hint}")
    facts: dict[str, Any] = yaml.safe_load((TARGETS / f"{name}.yaml").read_text(encoding="utf-8"))
    for key in ("peak_flops", "environment", "topologies"):
        facts[key] = types.MappingProxyType(facts[key])
    return DeviceTarget(name=name, **facts)
