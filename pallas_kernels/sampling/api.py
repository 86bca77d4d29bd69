"""The choice of a sampler: kernels of rows on NVIDIA GPUs, one for the draw on CPUs, else plain XLA."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from jaxtyping import Array, Bool, Float, Int, UInt32

from pallas_kernels import dispatch
from pallas_kernels.sampling import cpu, reference
from pallas_kernels.sampling.parameters import DrawParameters
from pallas_kernels.target import KernelTarget


class RowKernels(NamedTuple):
    """The functions of `pallas_kernels.sampling.triton`, for a device.

    Each row has programs of its own, which skip work that the row doesn't ask for. So the program around them needs no
    branch and no loop, and stays one graph.
    """

    edit_logits: Callable[..., Any]
    draw_tokens: Callable[..., Any]
    top_logits: Callable[..., Any]


def row_kernels(target: KernelTarget) -> RowKernels | None:
    """Return the kernels of a device that has some for whole rows, else None."""
    kernels = (dispatch.triton_kernel("sampling", name, target) for name in RowKernels._fields)
    return RowKernels(*(kernel for kernel in kernels if kernel is not None)) if dispatch.has_triton(target) else None


def draw_tokens(
    logits: Float[Array, "rows vocab"],
    keys: UInt32[Array, "rows 2"],
    parameters: DrawParameters,
    live: Bool[Array, " rows"] | None = None,
) -> Int[Array, " rows"]:
    """Compute `reference.draw_tokens`, on a device without kernels for whole rows."""
    return dispatch.on_cpu(cpu.draw_tokens, reference.draw_tokens, logits, keys, parameters, live)
