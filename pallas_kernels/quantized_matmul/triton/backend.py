"""The Triton backend: NVIDIA GPUs from Ampere on, by Pallas' Triton lowering.

It reads the numbers of every scheme as they are stored; numbers that the GPU doesn't multiply are converted in
registers. This module decides what is supported and with which block sizes the kernel runs, and prepares its operands.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Float32, Shaped

from pallas_kernels.dispatch import Backend
from pallas_kernels.quantized_matmul.layout import FP8, QuantizedWeight
from pallas_kernels.quantized_matmul.scheme import Scheme
from pallas_kernels.quantized_matmul.terms import TERMS, bfloat16_terms
from pallas_kernels.quantized_matmul.triton.kernel import Blocks, Operands, product
from pallas_kernels.quantized_matmul.triton.words import MIN_TERMS, Words, whole_words, words_of
from pallas_kernels.quantized_matmul.tuning import kind_of, tuned_blocks
from pallas_kernels.quantized_matmul.xla import scale_sums
from pallas_kernels.target import KernelTarget
from pallas_kernels.tuning import Kind

# The fewest inputs of a scale that always suffice: enough terms for a product, at each place of a byte.
_LEAST_GROUP = {"int4": 2 * MIN_TERMS, "int8": MIN_TERMS, "fp4": 2 * MIN_TERMS, "fp8": 2 * MIN_TERMS}
_ADDRESSABLE = 2**31

# Streaming multiprocessors, if the target doesn't say how many, and the programs that one runs at once.
_CORES = 108
_PROGRAMS_A_CORE = 4
# A core runs one large tile at a time: with fewer, many cores would wait for the last ones.
_LARGE_TILES_A_CORE = 2
_INPUTS_A_SPLIT = 512


def refusal(out_dim: int, in_dim: int, scheme: Scheme, target: KernelTarget) -> str | None:
    """See `backends.ProductModule`."""
    if find_words(in_dim, scheme, target) is None:
        least = _LEAST_GROUP[scheme.numbers]
        return f"triton takes groups of {scheme.numbers} in multiples of {least}, not of {scheme.group or in_dim}"
    if out_dim * in_dim >= _ADDRESSABLE:
        return f"triton addresses less than {_ADDRESSABLE} numbers, not {out_dim} x {in_dim}"
    return None


def arrangement(in_dim: int, scheme: Scheme, target: KernelTarget) -> tuple[int, ...]:
    """See `QuantizedWeight`."""
    words = find_words(in_dim, scheme, target)
    assert words is not None, scheme
    return words.arrangement


def multiply(
    x: Shaped[Array, "tokens in_dim"],
    factors: Float32[Array, "tokens groups"] | None,
    weight: QuantizedWeight,
    *,
    out_dtype: Any,
    backend: Backend,
) -> Float[Array, "tokens out_dim"]:
    """See `backends.ProductModule`."""
    target = backend.target
    scheme, groups = weight.scheme, weight.scale.shape[-1]
    terms = 1
    if x.dtype == jnp.float32:
        terms = TERMS[jnp.dtype(x.dtype)]
        x = bfloat16_terms(x, terms)
    elif factors is not None and not multiplies_fp8(scheme, target):
        x = x.astype(jnp.bfloat16)
    rows, inputs = x.shape
    words = find_words(inputs, scheme, target)
    assert words is not None, scheme
    assert weight.arrangement == words.arrangement, weight.arrangement
    numbers = weight.numbers.reshape(-1, inputs * scheme.bits // 8)
    blocks = blocks_for(rows, len(numbers), inputs, scheme, target)
    operands = Operands(x=x, words=as_words(numbers, words))
    if groups > 1:
        operands = operands._replace(
            scale=weight.scale.reshape(len(numbers), -1), factors=None if factors is None else factors.T
        )
        if weight.zero is not None:
            operands = operands._replace(zero=weight.zero.reshape(len(numbers), -1))
            if weight.zero.dtype != jnp.int16:
                operands = operands._replace(totals=x.astype(jnp.float32).reshape(rows, groups, -1).sum(axis=2).T)
    rounds = groups > 1 and terms == blocks.splits == 1
    out = product(operands, words, blocks, out_dtype if rounds else jnp.float32, interpret=backend.interpret)
    out = out if groups > 1 else scale_sums(out, x, factors, weight)
    return out.reshape(terms, rows // terms, -1).sum(axis=0)


def find_words(in_dim: int, scheme: Scheme, target: KernelTarget) -> Words | None:
    """Return how a kernel reads the numbers of a weight, or None if it can't."""
    if scheme.activations is not None and multiplies_fp8(scheme, target):
        return whole_words(FP8, in_dim, scheme.group)
    return words_of(scheme.numbers, in_dim, scheme.group, interpret=target.platform == "cpu")


def multiplies_fp8(scheme: Scheme, target: KernelTarget) -> bool:
    """Return whether numbers and quantized inputs are multiplied as they are: tensor cores take fp8 from Ada on."""
    return scheme.numbers == "fp8" and (target.platform == "cpu" or target.multiplies_fp8)


def as_words(numbers: Shaped[Array, "out stored"], words: Words) -> Shaped[Array, "out words"]:
    """Return a view of the same bytes, for which XLA computes nothing."""
    if numbers.dtype == words.dtype:
        return numbers
    if (size := words.dtype.itemsize) > 1:
        numbers = numbers.reshape(len(numbers), -1, size)
    return lax.bitcast_convert_type(numbers, words.dtype)


def blocks_for(rows: int, out_dim: int, inputs: int, scheme: Scheme, target: KernelTarget) -> Blocks:
    """Return tuned block sizes or those of the rule, with as many splits as fill the device."""
    cores = target.cores or _CORES
    sizes = tuned_blocks(target, "triton", rows, out_dim, inputs, scheme) or _sizes(rows, out_dim, scheme, cores)
    sizes = {"block_rows": _small_rows(rows), **sizes}
    # A split has enough inputs, and writing and reading all parts costs at most a quarter of reading the weight.
    most = min(inputs // _INPUTS_A_SPLIT, inputs * scheme.bits // (256 * rows))
    splits = min(cores * _PROGRAMS_A_CORE // _tiles(rows, out_dim, sizes), most)
    return Blocks(splits=max(1, splits), **sizes)


def _sizes(rows: int, out_dim: int, scheme: Scheme, cores: int) -> dict[str, int]:
    """Return the largest tiles that compile without spilling registers, or small ones if those don't fill the device.

    A core runs several small tiles, whose copies from memory hide each other's latency.
    """
    # The sums of groups take most registers; zeros and the conversion of 8 bits take others.
    plain = scheme.numbers == "int4" and not scheme.zeros
    large = {"block_out": 128, "block_rows": 128 if plain else 64, "num_warps": 8, "num_stages": 3}
    if kind_of(rows) == "prefill" and _tiles(rows, out_dim, large) >= _LARGE_TILES_A_CORE * cores:
        return large
    return {"block_out": 64, "block_rows": _small_rows(rows), "num_warps": 4, "num_stages": 4}


def _small_rows(rows: int) -> int:
    return min(max(16, pl.next_power_of_2(rows)), 64)


def _tiles(rows: int, out_dim: int, sizes: dict[str, int]) -> int:
    return pl.cdiv(rows, sizes["block_rows"]) * pl.cdiv(out_dim, sizes["block_out"])


def candidates(kind: Kind) -> list[dict[str, int]]:
    """Return the block sizes to time for the tuned table. Tuning skips sizes that don't compile."""
    block_rows: list[dict[str, int]] = [{}] if kind == "decode" else [{"block_rows": 64}, {"block_rows": 128}]
    return [
        {"block_out": block_out, **rows, "num_warps": num_warps, "num_stages": num_stages}
        for block_out in (64, 128)
        for rows in block_rows
        for num_warps in (4, 8)
        for num_stages in (2, 3, 4, 6)
    ]
