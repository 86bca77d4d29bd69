"""The choice of a backend for the experts of a layer, decided before anything is compiled.

A backend is named as one of `quantized_matmul`: it stores quantized weights as that one does.
"""

from __future__ import annotations

import importlib
from typing import Any, Protocol, cast

from jaxtyping import Array, Float, Float32, Shaped

from pallas_kernels.grouped_matmul.gate import Gate
from pallas_kernels.grouped_matmul.groups import Groups
from pallas_kernels.quantized_matmul import Backend, QuantizedWeight, Scheme
from pallas_kernels.quantized_matmul.backends import BackendName
from pallas_kernels.target import KernelTarget

# Best first; the reference supports everything. On Hopper, mosaic_gpu should be faster by its machine code, but on an
# H100 some quantized experts run into an illegal instruction (`device.py --only experts.correctness`): nothing
# chooses it.
_ON_GPUS: tuple[BackendName, ...] = ("triton",)
_PREFERRED: dict[str, tuple[BackendName, ...]] = {"cuda": _ON_GPUS, "gpu": _ON_GPUS, "tpu": ("mosaic_tpu",)}


class BackendModule(Protocol):
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
        *,
        bias: Float[Array, "experts out_dim"] | None,
        gate: Gate | None,
        of_tokens: bool,
        out_dtype: Any,
        target: KernelTarget,
        interpret: bool,
    ) -> Float[Array, "rows out_or_half"]:
        """See `api.grouped_matmul`.

        If the scheme quantizes inputs, `x` has the type of the numbers and must be multiplied by `factors`.
        """


def backend_module(name: BackendName) -> BackendModule:
    """Return a backend's module; imported when needed, as each imports another compiler's front end."""
    file = "reference" if name == "reference" else f"{name}.backend"
    return cast(BackendModule, importlib.import_module(f"pallas_kernels.grouped_matmul.{file}"))


def choose_backend(out_dim: int, in_dim: int, scheme: Scheme | None, target: KernelTarget) -> Backend:
    """Return the backend that multiplies by experts `[out_dim, in_dim]` of one shard."""
    for name in _PREFERRED.get(target.platform, ()):
        if backend_module(name).refusal(out_dim, in_dim, scheme, target) is None:
            return Backend(name, target)
    return Backend("reference", target)
