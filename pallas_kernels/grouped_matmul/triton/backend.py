"""The Triton backend: NVIDIA GPUs from Ampere on, by Pallas' Triton lowering.

It takes weights of 16 and 32 bits, and numbers of every scheme as `quantized_matmul.triton` stores them. This module
decides what is supported and with which block sizes the kernel runs, and prepares its operands.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Float32, Shaped

from pallas_kernels.dispatch import Backend
from pallas_kernels.grouped_matmul.epilogue import Epilogue
from pallas_kernels.grouped_matmul.groups import Groups
from pallas_kernels.grouped_matmul.triton.kernel import ExpertOperands, GroupedBlocks, grouped_product
from pallas_kernels.grouped_matmul.tuning import Experts, tuned_blocks
from pallas_kernels.quantized_matmul import QuantizedWeight, Scheme
from pallas_kernels.quantized_matmul.triton import backend as products
from pallas_kernels.quantized_matmul.triton.kernel import Operands
from pallas_kernels.quantized_matmul.triton.words import MIN_TERMS, Words, whole_words
from pallas_kernels.target import KernelTarget
from pallas_kernels.tuning import Kind

# Streaming multiprocessors, if the target doesn't say how many.
_CORES = 108
# Small tiles that each of them needs, to have enough copies from memory under way.
_TILES_A_CORE = 2
# The rows of an expert, on average, from which on tiles are large.
_LARGE_ROWS = 48
# More rows of 32 bits would spill registers.
_MOST_ROWS_IN_32_BITS = 32


def refusal(out_dim: int, in_dim: int, scheme: Scheme | None, target: KernelTarget) -> str | None:
    """See `backends.ExpertsModule`."""
    if scheme is not None:
        return products.refusal(out_dim, in_dim, scheme, target)
    if in_dim % MIN_TERMS:
        return f"triton takes experts with inputs in multiples of {MIN_TERMS}, not {in_dim}"
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
    count, out_dim, in_dim = weight.shape
    scheme = None
    if isinstance(weight, QuantizedWeight):
        scheme = weight.scheme
        operands, words = _quantized(x, factors, weight, backend.target)
    else:
        operands, words = _plain(x, weight)
    bias, gate = epilogue.bias, epilogue.gate
    bias = None if bias is None else bias.reshape(-1)
    experts = Experts(count, out_dim, in_dim, gate is not None, scheme)
    blocks = blocks_for(groups.likely_rows, experts, backend.target)
    if operands.x.dtype == jnp.float32:
        blocks = dataclasses.replace(blocks, block_rows=min(blocks.block_rows, _MOST_ROWS_IN_32_BITS))
    return grouped_product(
        operands,
        ExpertOperands(groups.starts, groups.tokens if of_tokens else None, bias),
        words,
        gate,
        groups.num_rows,
        blocks,
        out_dtype,
        interpret=backend.interpret,
    )


def _plain(
    x: Float[Array, "tokens_or_rows in_dim"], weight: Float[Array, "experts out_dim in_dim"]
) -> tuple[Operands, Words]:
    words = whole_words(weight.dtype, weight.shape[-1])
    assert words is not None, weight.shape
    # Numbers are converted to the type of the inputs in registers.
    x = x.astype(jnp.promote_types(x.dtype, weight.dtype))
    return Operands(x=x, words=weight.reshape(-1, weight.shape[-1])), words


def _quantized(
    x: Shaped[Array, "tokens_or_rows in_dim"],
    factors: Float32[Array, "tokens_or_rows groups"] | None,
    weight: QuantizedWeight,
    target: KernelTarget,
) -> tuple[Operands, Words]:
    scheme, groups, in_dim = weight.scheme, weight.scale.shape[-1], x.shape[1]
    words = products.find_words(in_dim, scheme, target)
    assert words is not None, scheme
    assert weight.arrangement == words.arrangement, weight.arrangement
    if factors is not None and not products.multiplies_fp8(scheme, target):
        x = x.astype(jnp.bfloat16)
    numbers = products.as_words(weight.numbers.reshape(-1, weight.numbers.shape[-1]), words)
    if numbers.size >= 2**31 and numbers.nbytes <= 2**32:
        # Pallas computes addresses in signed 32 bits if an array has at most 4 GiB.
        raise ValueError(
            f"triton can't address the experts of a layer in fp8 that take {numbers.nbytes / 2**30:.2f} GiB on a device"
            ", between 2 and 4 GiB: divide them among more devices or fewer (--tp-size, --ep-size)"
        )
    scale, zero = (None if y is None else y.reshape(-1, groups) for y in (weight.scale, weight.zero))
    totals = None
    if zero is not None and zero.dtype != jnp.int16:
        totals = x.astype(jnp.float32).reshape(len(x), groups, -1).sum(axis=2).T
    return Operands(x, numbers, scale, zero, None if factors is None else factors.T, totals), words


def blocks_for(rows: int, experts: Experts, target: KernelTarget) -> GroupedBlocks:
    """Return tuned block sizes or those of the rule."""
    sizes = tuned_blocks(target, "triton", rows, experts) or _sizes(rows, experts, target.cores or _CORES)
    return GroupedBlocks(**{"block_rows": _small_rows(rows, experts), **sizes})


def _sizes(rows: int, experts: Experts, cores: int) -> dict[str, int]:
    """Return the largest tiles that compile without spilling registers, if experts have enough rows for them.

    A core runs several small tiles, whose copies from memory hide each other's latency.
    """
    scheme = experts.scheme
    if rows > _LARGE_ROWS * experts.count:
        block_rows = 128 if scheme is None and rows > 2 * _LARGE_ROWS * experts.count else 64
        # Sums of groups take most registers; zeros and the conversion of 8 bits take others.
        if scheme is not None and scheme.numbers == "int8" and scheme.zeros and (scheme.group or experts.in_dim) < 128:
            block_rows = 32
        return {"block_out": 128, "block_rows": block_rows, "num_warps": 8, "num_stages": 3}
    block_out = 128 if experts.gated else 64
    tiles = min(rows, experts.count) * pl.cdiv(experts.out_dim, block_out)
    return {
        "block_out": block_out if tiles >= _TILES_A_CORE * cores else block_out // 2,
        "num_warps": 4,
        "num_stages": 4,
    }


def _small_rows(rows: int, experts: Experts) -> int:
    """Return the rows of a small tile: it holds the rows of most experts, so that their weights are read once."""
    return min(max(16, pl.next_power_of_2(2 * math.ceil(rows / experts.count))), 64)


def candidates(kind: Kind) -> list[dict[str, int]]:
    """Return the block sizes to time for the tuned table. Tuning skips sizes that don't compile."""
    block_rows: list[dict[str, int]] = [{}] if kind == "decode" else [{"block_rows": 64}, {"block_rows": 128}]
    return [
        {"block_out": block_out, **rows, "num_warps": num_warps, "num_stages": num_stages}
        for block_out in ((32, 64, 128) if kind == "decode" else (64, 128))
        for rows in block_rows
        for num_warps in (4, 8)
        for num_stages in (2, 3, 4, 6)
    ]
