"""The TPU backend: weights of 16 and 32 bits, and integers of 4 and 8 bits, unpacked in vector memory.

This module decides what is supported and with which block sizes the kernel runs, and prepares its operands.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Shaped

from pallas_kernels.dispatch import Backend
from pallas_kernels.grouped_matmul.epilogue import Epilogue
from pallas_kernels.grouped_matmul.groups import Groups
from pallas_kernels.grouped_matmul.mosaic_tpu.kernel import GroupedOperands, product
from pallas_kernels.grouped_matmul.mosaic_tpu.work import work_list
from pallas_kernels.quantized_matmul import QuantizedWeight, Scheme
from pallas_kernels.quantized_matmul.mosaic_tpu import backend as quantized
from pallas_kernels.quantized_matmul.mosaic_tpu.kernel import LANES, TileSizes
from pallas_kernels.quantized_matmul.terms import TERMS, bfloat16_terms
from pallas_kernels.target import KernelTarget

# Fewer rows cost as much as these: the units of products take them while they load their next weights.
_FEW_ROWS, _MOST_ROWS = 64, 512
# The most inputs of a tile of rows; they lie in vector memory three times.
_TILE_INPUTS = 2**22
# Bytes of a tile of weights, which lies there twice: enough for the memory's speed, and little to wait for at first.
_TILE_BYTES = 2**22


def refusal(out_dim: int, in_dim: int, scheme: Scheme | None, target: KernelTarget) -> str | None:
    """See `backends.ExpertsModule`."""
    if scheme is not None:
        return quantized.refusal(out_dim, in_dim, scheme, target)
    return None


def multiply(
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
    """See `backends.ExpertsModule`."""
    assert factors is None, "mosaic_tpu multiplies by inputs that aren't quantized"
    if of_tokens:
        x = x[groups.tokens]
    terms = TERMS[jnp.dtype(x.dtype)] if isinstance(weight, QuantizedWeight) else 1
    if terms == 1:
        return _multiply(x, weight, groups, epilogue, out_dtype, backend)
    parts = bfloat16_terms(x, terms).reshape(terms, *x.shape)
    sums = jnp.stack([_multiply(part, weight, groups, Epilogue(), jnp.float32, backend) for part in parts])
    return epilogue.apply(sums.sum(axis=0), groups)


def _multiply(
    x: Float[Array, "rows in_dim"],
    weight: Float[Array, "experts out_dim in_dim"] | QuantizedWeight,
    groups: Groups,
    epilogue: Epilogue,
    out_dtype: Any,
    backend: Backend,
) -> Float[Array, "rows out_or_half"]:
    (experts, outputs, inputs), bias, gate = weight.shape, epilogue.bias, epilogue.gate
    parts = 1 if gate is None else 2
    each = outputs // parts

    def by_part(array: Array) -> Array:
        return array.reshape(experts, parts, each, -1)

    bias = None if bias is None else by_part(bias)[..., 0]
    rows = _block_rows(groups.num_rows, experts, inputs)
    numbers = by_part(weight.numbers if isinstance(weight, QuantizedWeight) else weight)
    block_out = _block_out(each, parts * numbers.shape[-1] * numbers.dtype.itemsize)
    if isinstance(weight, QuantizedWeight):
        scheme = weight.scheme

        def by_group(factors: Array) -> Sequence[Array]:
            # XLA keeps such arrays with their long dimension over the lanes, where it can't be divided without a copy.
            swapped = factors.swapaxes(1, 2)
            return jnp.split(swapped, parts, axis=2) if each % block_out else [swapped] * parts

        totals = None
        if weight.zero is not None:
            totals = x.astype(jnp.float32).reshape(len(x), weight.scale.shape[2], -1).sum(axis=2)
        operands = GroupedOperands(
            numbers,
            by_group(weight.scale),
            () if weight.zero is None else by_group(weight.zero),
            tuple(0 if each % block_out else part * each // block_out for part in range(parts)),
            totals,
            bias,
        )
        tiles = TileSizes(rows, block_out, inputs, scheme.group or inputs, scheme.numbers == "int4")
    else:
        assert x.dtype == weight.dtype != jnp.float16, (x.dtype, weight.dtype)  # TPUs have no float16
        operands = GroupedOperands(numbers, bias=bias)
        tiles = TileSizes(rows, block_out, inputs, inputs, packed=False)
    work, limit = work_list(groups, rows), quantized.vmem_limit(backend.target)
    return product(x, operands, work, tiles, gate, out_dtype, vmem_limit=limit, interpret=backend.interpret)


def _block_rows(rows: int, experts: int, inputs: int) -> int:
    """Return the rows of a tile: about the average number of rows of an expert."""
    even = max(_FEW_ROWS, min(_MOST_ROWS, 1 << (rows // experts).bit_length()))
    return quantized.whole_tiles(min(even, _TILE_INPUTS // inputs, rows + 15))


def _block_out(outputs: int, row_bytes: int) -> int:
    """Return the outputs of a tile: all of them, or whole registers of lanes, by which the outputs are divided."""
    if outputs * row_bytes <= _TILE_BYTES:
        return outputs
    most = max(LANES, _TILE_BYTES // row_bytes // LANES * LANES)
    return next((size for size in range(most, 0, -LANES) if outputs % size == 0), most)
