"""The device that kernels are compiled for."""

from __future__ import annotations

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class KernelTarget:
    """The device that kernels are compiled for, attached or not. `capability` is CUDA's compute capability: (9, 0).

    `blocks` are block sizes that replace tuned ones: (`decode` or `prefill`, name, size) each. `cores` are a GPU's
    streaming multiprocessors.
    """

    platform: str
    kind: str = ""
    capability: tuple[int, int] | None = None
    blocks: frozenset[tuple[str, str, int]] = frozenset()
    cores: int | None = None

    @property
    def multiplies_fp8(self) -> bool:
        """Whether it is an NVIDIA GPU whose tensor cores multiply fp8: from Ada on."""
        return self.capability is not None and self.capability >= (8, 9)


CPU = KernelTarget("cpu")


def target_of(device: Any) -> KernelTarget:
    """Return the target of a jax device, attached or of a topology description."""
    capability = getattr(device, "compute_capability", None)
    if capability is None:
        return KernelTarget(device.platform, device.device_kind)
    major, _, minor = str(capability).partition(".")
    cores = getattr(device, "core_count", None)
    return KernelTarget(device.platform, device.device_kind, (int(major), int(minor)), cores=cores)
