"""The choice of a sampler: kernels of rows on NVIDIA GPUs, one for the draw on CPUs, else plain XLA."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

from jaxtyping import Array, Bool, Float, Int, UInt32

from pallas_kernels import dispatch
from pallas_kernels.cpu import kernel_or_fallback
from pallas_kernels.sampling import cpu, reference
from pallas_kernels.sampling.parameters import DrawParameters
from pallas_kernels.target import KernelTarget


class RowKernels(NamedTuple):
    """The functions of `pallas_kernels.sampling.triton`, for a device.

    Each row has programs of its own, which skip what it doesn't ask for. So the program around them needs no branch and
    no loop, and stays one graph.
    """

    edit_logits: Callable[..., Any]
    draw_tokens: Callable[..., Any]
    top_logits: Callable[..., Any]


def row_kernels(target: KernelTarget) -> RowKernels | None:
    """Return the kernels of a device that has some for whole rows, else None."""
    if not dispatch.has_triton(target):
        return None
    from pallas_kernels.sampling import triton  # only GPUs need this compiler's front end

    kernels = triton.edit_logits, triton.draw_tokens, triton.top_logits
    return RowKernels(*(functools.partial(kernel, interpret=target.platform == "cpu") for kernel in kernels))


def draw_tokens(
    logits: Float[Array, "rows vocab"],
    keys: UInt32[Array, "rows 2"],
    parameters: DrawParameters,
    live: Bool[Array, " rows"] | None = None,
) -> Int[Array, " rows"]:
    """Compute `reference.draw_tokens`, on a device without kernels for whole rows."""
    return kernel_or_fallback(cpu.draw_tokens, reference.draw_tokens, logits, keys, parameters, live)
