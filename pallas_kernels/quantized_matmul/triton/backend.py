"""The Triton backend: NVIDIA GPUs from Ampere on, by Pallas' Triton lowering.

Numbers of every scheme, as they are stored; those that the GPU doesn't multiply are converted in registers. This module
decides what is supported and with which block sizes the kernel runs, and prepares its operands.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float32, Shaped

from pallas_kernels.quantized_matmul.layout import FP8, QuantizedWeight
from pallas_kernels.quantized_matmul.scheme import Scheme
from pallas_kernels.quantized_matmul.triton.kernel import (
    Blocks,
    Operands,
    Words,
    arrange,
    fp8_words,
    int4_words,
    plain_words,
    product,
)
from pallas_kernels.quantized_matmul.xla import scale_sums
from pallas_kernels.target import KernelTarget

_MAX_STEP = 128
# The fewest inputs of one scale: enough terms for a product, in each of the places that numbers have in a word.
_MIN_STEP = {"int4": 32, "int8": 16, "fp8": 64}
_ADDRESSABLE = 2**31

# Streaming multiprocessors if the target doesn't say it, and how many programs one runs at once.
_CORES = 108
_PROGRAMS_A_CORE = 4
_MIN_STEPS = 4


def refusal(out_dim: int, in_dim: int, scheme: Scheme, target: KernelTarget) -> str | None:
    """See `backends.BackendModule`."""
    if target.platform not in ("cuda", "gpu", "cpu"):
        return f"triton compiles for NVIDIA GPUs, not for {target.platform}"
    if target.platform != "cpu" and (target.capability or (0, 0)) < (8, 0):
        return (
            f"triton needs an NVIDIA GPU of compute capability 8.0 (Ampere) or newer, not {target.kind or 'this one'}"
        )
    if (step := _step(in_dim, scheme)) < (least := _MIN_STEP[scheme.numbers]):
        return (
            f"triton takes groups of {scheme.numbers} in multiples of {least}, and all {in_dim} inputs as one only if "
            f"they are one: these divide by {step}"
        )
    if out_dim * in_dim >= _ADDRESSABLE:
        return f"triton addresses less than {_ADDRESSABLE} numbers, not {out_dim} x {in_dim}"
    return None


def multiply(
    x: Shaped[Array, "tokens in_dim"],
    factors: Float32[Array, "tokens groups"] | None,
    weight: QuantizedWeight,
    *,
    target: KernelTarget,
    interpret: bool,
) -> Float32[Array, "tokens out_dim"]:
    """See `backends.BackendModule`."""
    rows, inputs = x.shape
    scheme, grouped = weight.scheme, weight.scale.shape[-1] > 1
    if factors is not None and not _multiplies_fp8(scheme, target):
        x = x.astype(jnp.bfloat16)
    words = _words(scheme, x, _step(inputs, scheme))
    numbers = weight.numbers.reshape(-1, inputs * scheme.bits // 8)
    blocks = blocks_for(rows, len(numbers), inputs, scheme, target)
    totals = None
    if grouped and weight.zero is not None:
        totals = x.astype(jnp.float32).reshape(rows, weight.scale.shape[-1], -1).sum(axis=2).T
    operands = Operands(
        x=arrange(x, words),
        words=_as_words(numbers, words),
        scale=weight.scale.reshape(len(numbers), -1) if grouped else None,
        zero=weight.zero.reshape(len(numbers), -1) if grouped and weight.zero is not None else None,
        factors=factors.T if grouped and factors is not None else None,
        totals=totals,
    )
    out = product(operands, words, blocks, interpret=interpret)
    return out if grouped else scale_sums(out, x, factors, weight)


def _step(inputs: int, scheme: Scheme) -> int:
    """Return how many inputs are multiplied at a time: a power of two that divides a group."""
    size = scheme.group or inputs
    return min(size & -size, _MAX_STEP)


def _multiplies_fp8(scheme: Scheme, target: KernelTarget) -> bool:
    return scheme.numbers == "fp8" and (target.platform == "cpu" or (target.capability or (0, 0)) >= (8, 9))


def _words(scheme: Scheme, x: Shaped[Array, "tokens in_dim"], step: int) -> Words:
    if scheme.numbers == "int4":
        return int4_words(step)
    if scheme.numbers == "int8" or x.dtype == FP8:
        return plain_words(jnp.int8 if scheme.numbers == "int8" else FP8, step)
    return fp8_words(step)


def _as_words(numbers: Shaped[Array, "out stored"], words: Words) -> Shaped[Array, "out words"]:
    """Return a view of the same bytes, for which XLA computes nothing."""
    if (size := words.dtype.itemsize) > 1:
        numbers = numbers.reshape(len(numbers), -1, size)
    return lax.bitcast_convert_type(numbers, words.dtype)


def blocks_for(rows: int, out_dim: int, inputs: int, scheme: Scheme, target: KernelTarget) -> Blocks:
    """Return the block sizes of a product."""
    block_rows = min(max(16, pl.next_power_of_2(rows)), 128)
    block_out, num_warps, num_stages = (64, 4, 4) if block_rows <= 64 else (128, 8, 3)
    tiles = pl.cdiv(rows, block_rows) * pl.cdiv(out_dim, block_out)
    wanted = (target.cores or _CORES) * _PROGRAMS_A_CORE // tiles
    # A part has some steps, and writing and reading all parts costs at most a quarter of reading the weight.
    most = min(inputs // _step(inputs, scheme) // _MIN_STEPS, inputs * scheme.bits // (256 * rows))
    return Blocks(block_out, block_rows, max(1, min(wanted, most)), num_warps, num_stages)
