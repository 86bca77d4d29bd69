"""The choice of a backend, decided once before anything is compiled."""

from __future__ import annotations

from typing import Any, Protocol

from jaxtyping import Array

from pallas_kernels.dispatch import Backend, BackendTable
from pallas_kernels.packed_attention.arguments import PackedProblem
from pallas_kernels.target import KernelTarget

REFERENCE = Backend(reason="the default of this function")


class PackedModule(Protocol):
    """The functions that every backend's module has."""

    def refusal(self, problem: PackedProblem, target: KernelTarget) -> str | None:
        """Return why the backend doesn't support this problem on this target, or None."""

    def packed_attention(self, *arguments: Any) -> Array:
        """Compute `api.packed_attention`."""


BACKENDS = BackendTable[PackedModule](
    "packed_attention",
    names=("reference", "cpu", "triton", "mosaic_tpu"),
    preferred={"cuda": ("triton",), "gpu": ("triton",), "tpu": ("mosaic_tpu",), "cpu": ("cpu",)},
)


def choose_packed_backend(target: KernelTarget, problem: PackedProblem, requested: str = "auto") -> Backend:
    """Return the backend for a deployment. Raises ValueError, with the reason, if the requested one doesn't fit."""
    if requested == "auto":
        return BACKENDS.choose(target, (problem,))
    return BACKENDS.check_requested(requested, target, (problem,))
