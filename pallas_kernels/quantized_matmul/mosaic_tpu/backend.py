"""The TPU backend: integers of 4 and 8 bits with groups, unpacked in vector memory.

This module decides what is supported and with which block sizes the kernel runs, and prepares its operands.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Shaped

from pallas_kernels.dispatch import Backend
from pallas_kernels.quantized_matmul.layout import QuantizedWeight
from pallas_kernels.quantized_matmul.mosaic_tpu.kernel import LANES, TileSizes, product
from pallas_kernels.quantized_matmul.scheme import Scheme
from pallas_kernels.quantized_matmul.terms import TERMS, bfloat16_terms
from pallas_kernels.quantized_matmul.tuning import tuned_blocks
from pallas_kernels.target import KernelTarget

_GROUPS = (16, 32, 64)
_ROWS, _OUT = 256, 256
# The most inputs of a tile of rows; they lie in vector memory three times.
_TILE_INPUTS = 2**22
# Inputs of 8 bits beyond the last 128 are multiplied together.
_LEAST_INPUTS = 32
# The number of bfloat16 rows in a tile of registers.
_PACKED_ROWS = 16
# Vector memory of a core, by device; v5e and v6e have the default.
_VMEM_BYTES = {"TPU7x": 64 * 2**20}
_DEFAULT_VMEM_BYTES = 128 * 2**20


def refusal(out_dim: int, in_dim: int, scheme: Scheme, target: KernelTarget) -> str | None:
    """See `backends.ProductModule`."""
    if scheme.numbers in ("fp4", "fp8") or scheme.activations is not None:
        return "mosaic_tpu multiplies integers of 4 and 8 bits by inputs that aren't quantized"
    if scheme.group is not None and scheme.group % LANES and scheme.group not in _GROUPS:
        return f"mosaic_tpu takes groups of 16, 32, 64 or multiples of {LANES} inputs, not of {scheme.group}"
    if in_dim % (unit := _LEAST_INPUTS if scheme.bits == 8 else 2 * LANES):
        return f"mosaic_tpu takes multiples of {unit} inputs of {scheme.numbers}, not {in_dim}"
    return None


def multiply(
    x: Shaped[Array, "tokens in_dim"],
    factors: Float32[Array, "tokens groups"] | None,
    weight: QuantizedWeight,
    *,
    out_dtype: Any,
    backend: Backend,
) -> Float[Array, "tokens out_dim"]:
    """See `backends.ProductModule`."""
    tokens, inputs = x.shape
    scheme, packed = weight.scheme, weight.scheme.numbers == "int4"
    numbers = weight.numbers.reshape(-1, weight.numbers.shape[-1])
    # XLA keeps such an array with its long dimension over the lanes.
    scale = weight.scale.reshape(len(numbers), -1).T
    sizes = {"block_rows": min(_ROWS, whole_tiles(_TILE_INPUTS // inputs)), "block_out": _OUT}
    sizes |= tuned_blocks(backend.target, "mosaic_tpu", tokens, len(numbers), inputs, scheme) or {}
    terms = TERMS[jnp.dtype(x.dtype)]
    x = bfloat16_terms(x, terms)
    rows = len(x)
    block_rows = min(sizes["block_rows"], whole_tiles(rows + _PACKED_ROWS - 1))
    x = jnp.pad(x, ((0, -rows % block_rows), (0, 0)))
    offsets = None
    if weight.zero is not None:
        zero = weight.zero.reshape(len(numbers), -1).T
        offsets = zero, x.astype(jnp.float32).reshape(len(x), len(scale), -1).sum(axis=2)
    out = product(
        x,
        numbers,
        scale,
        offsets,
        TileSizes(block_rows, sizes["block_out"], inputs, scheme.group or inputs, packed),
        out_dtype if terms == 1 else jnp.float32,
        vmem_limit=vmem_limit(backend.target),
        interpret=backend.interpret,
    )
    return out[:rows].reshape(terms, tokens, -1).sum(axis=0)


def vmem_limit(target: KernelTarget) -> int:
    """Return how many bytes of vector memory a kernel may take."""
    return _VMEM_BYTES.get(target.kind, _DEFAULT_VMEM_BYTES) * 3 // 4


def whole_tiles(rows: int) -> int:
    """Return the rows in whole tiles of registers, at least one."""
    return max(_PACKED_ROWS, rows - rows % _PACKED_ROWS)


def candidates(kind: str) -> list[dict[str, int]]:
    """Return the block sizes to time for the tuned table."""
    rows = [{}] if kind == "decode" else [{"block_rows": size} for size in (128, 256, 512)]
    return [{**one, "block_out": size} for one in rows for size in (128, 256, 512)]
