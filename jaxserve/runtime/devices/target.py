"""Facts of kinds of devices that need not be attached: memory, speed, and how their compiler is called.

Owns the reading of `targets/*.yaml` beside it; one file is one kind, and says where its facts are from. It never
imports jax: `topology.py` makes meshes of these.
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
class Target:
    """A kind of device, as one file of `targets/` has it.

    `device_kind` and `compute_capability` are what jax calls it. `extra` is the extra of jaxserve that brings its
    compiler, `environment` what that needs to start without a device, `topologies` the arguments of
    `get_topology_desc` by number of devices, `target_config` XLA's description of a GPU.
    Of one device: `memory_bytes` that programs can have, `memory_bandwidth` in bytes a second, and `peak_flops`, dense,
    by the type that is multiplied; a type that is missing has no units of its own in the hardware.
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

    def topology(self, count: int) -> Mapping[str, Any]:
        """The smallest topology that holds `count` devices. Raises `ConfigError` where none does."""
        for size in sorted(self.topologies):
            if size >= count:
                return self.topologies[size]
        raise ConfigError(
            f"target {self.name!r} has no topology of {count} devices: {max(self.topologies)} are the most; "
            f"lower --tp-size"
        )


def target_names() -> list[str]:
    """The targets there are facts of."""
    return sorted(path.stem for path in TARGETS.glob("*.yaml"))


@functools.cache
def load_target(name: str) -> Target:
    """Read a target. Raises `ConfigError` for a name that has no file."""
    if name not in target_names():
        hint = nearest(name, target_names()) or f"; there are: {', '.join(target_names())}"
        raise ConfigError(f"target {name!r} is not known{hint}")
    facts: dict[str, Any] = yaml.safe_load((TARGETS / f"{name}.yaml").read_text(encoding="utf-8"))
    for key in ("peak_flops", "environment", "topologies"):
        facts[key] = types.MappingProxyType(facts[key])
    return Target(name=name, **facts)
