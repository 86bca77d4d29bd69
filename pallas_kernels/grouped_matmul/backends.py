"""The choice of a backend for the experts of a layer, decided before anything is compiled.

A backend has the name of one in `quantized_matmul`: both store quantized weights alike.
"""

from __future__ import annotations

from typing import Any, Protocol

from jaxtyping import Array, Float, Float32, Shaped

from pallas_kernels.dispatch import Backend, BackendTable
from pallas_kernels.grouped_matmul.epilogue import Epilogue
from pallas_kernels.grouped_matmul.groups import Groups
from pallas_kernels.quantized_matmul import QuantizedWeight, Scheme
from pallas_kernels.target import KernelTarget


class ExpertsModule(Protocol):
    """The functions that every backend's module has."""

    def refusal(self, out_dim: int, in_dim: int, scheme: Scheme | None, target: KernelTarget) -> str | None:
        """Return why the backend doesn't multiply by experts `[out_dim, in_dim]` of one shard on this target, or None.

        Without a `scheme`, weights have 16 or 32 bits. With a gate, `out_dim` are the outputs of gate and up together.
        """

    def multiply(
        self,
        x: Shaped[Array, "tokens_or_rows in_dim"],
        factors: Float32[Array, "tokens_or_rows groups"] | None,
        weight: Float[Array, "experts out_dim in_dim"] | QuantizedWeight,
        groups: Groups,
        epilogue: Epilogue,
        *,
        of_tokens: bool,
        out_dtype: Any,
        backend: Backend,
    ) -> Float[Array, "rows out_or_half"]:
        """See `api.grouped_matmul`.

        If the scheme quantizes inputs, `x` has the type of the numbers and must be multiplied by `factors`.
        """


# On Hopper, mosaic_gpu's machine code suggests that it is faster. But on an H100 some quantized experts run into an
# illegal instruction (`device.py --only experts.correctness`), so nothing chooses it.
BACKENDS = BackendTable[ExpertsModule](
    "grouped_matmul",
    names=("reference", "triton", "mosaic_gpu", "mosaic_tpu"),
    preferred={"cuda": ("triton",), "gpu": ("triton",), "tpu": ("mosaic_tpu",)},
)
