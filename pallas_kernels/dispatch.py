"""How a room chooses what computes its operation on a device."""

from __future__ import annotations

from pallas_kernels.target import KernelTarget


def has_triton(target: KernelTarget) -> bool:
    """Return whether Triton compiles for a device: for NVIDIA GPUs from Ampere on."""
    return target.capability is not None and target.capability >= (8, 0)
