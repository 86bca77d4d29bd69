"""The choice of a backend, decided once before anything is compiled."""

from __future__ import annotations

from typing import Any, Protocol

from jaxtyping import Array

from pallas_kernels.dispatch import Backend, BackendTable
from pallas_kernels.gated_delta.layout import DeltaStates
from pallas_kernels.gated_delta.problem import DeltaProblem
from pallas_kernels.target import KernelTarget


class DeltaModule(Protocol):
    """The functions that every backend's module has."""

    def refusal(self, problem: DeltaProblem, target: KernelTarget) -> str | None:
        """Return why the backend doesn't support this problem on this target, or None."""

    def gated_delta(self, *arguments: Any) -> tuple[Array, DeltaStates]:
        """Compute `api.gated_delta`."""


BACKENDS = BackendTable[DeltaModule](
    "gated_delta",
    names=("reference", "cpu", "triton", "mosaic_tpu"),
    preferred={"cuda": ("triton",), "gpu": ("triton",), "tpu": ("mosaic_tpu",), "cpu": ("cpu",)},
)


def choose_backend(target: KernelTarget, problem: DeltaProblem) -> Backend:
    """Return the backend for a deployment."""
    return BACKENDS.choose(target, (problem,))
