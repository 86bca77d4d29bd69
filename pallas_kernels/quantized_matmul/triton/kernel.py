"""The Triton kernel: a tile of outputs times a tile of rows, over a part of the inputs.

The numbers of a group are multiplied unscaled, less their zero if that is a whole number, which is exact in the type of
the inputs, and the sum of the group is scaled in float32. With other zeros it is `scale * (sum - zero * total)`, where
`total` is the sum of the group's inputs.

Several numbers are stored in a word. The kernel takes the first ones of all words of a step, then the second ones, and
so on, each as an operand of a product of its own; numbers are stored so that those of an operand are those of
neighbouring inputs (`Words.arrangement`). So no number moves from one thread to another.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Float32, Int, Shaped

from pallas_kernels.quantized_matmul.scheme import NumberType

# A reference into device memory; jax has no public type for it.
Ref = Any

# The fewest terms of a product of 16 bits on tensor cores.
MIN_TERMS = 16

_NO_ZERO = np.float32(0)


@dataclasses.dataclass(frozen=True)
class Blocks:
    """The sizes of a tile, the parts that the inputs are split into, and how a program runs."""

    block_out: int
    block_rows: int
    splits: int
    num_warps: int
    num_stages: int


@dataclasses.dataclass(frozen=True)
class Words:
    """How numbers are read: `values_a_word` in each word, and `step` inputs at a time.

    `convert` returns the values at each place of the words in the type of the inputs, less a zero for each output.
    """

    dtype: np.dtype
    values_a_word: int
    step: int
    convert: Callable[[Shaped[Array, "out words"], Any, Any], list[Shaped[Array, "out words"]]]

    @property
    def arrangement(self) -> tuple[int, ...]:
        """The input that each number of a step belongs to, in stored order; empty if they are in order.

        Numbers at the same place of neighbouring words belong to neighbouring inputs.
        """
        if self.values_a_word == 1:
            return ()
        return tuple(np.arange(self.step).reshape(self.values_a_word, -1).T.ravel().tolist())


class Operands(NamedTuple):
    """What the kernel reads: `words` are views of the numbers.

    `x` `[rows, inputs]`, `words` `[out, words]`, `scale` and `zero` `[out, groups]`, `factors` and `totals`
    `[groups, rows]`; with `totals`, zeros aren't whole numbers. Without `scale`, the sums of all inputs are returned as
    they are.
    """

    x: Any
    words: Any
    scale: Any = None
    zero: Any = None
    factors: Any = None
    totals: Any = None


class _Group(NamedTuple):
    """What a group's sums are scaled by: of each output, and of each row."""

    scale: Array | None
    zero: Array | None
    factor: Array | None
    total: Array | None


@dataclasses.dataclass(frozen=True)
class _Facts:
    words: Words
    steps: int
    steps_a_group: int
    blocks: Blocks


def words_of(numbers: NumberType, step: int) -> Words:
    """Return how to read numbers to multiply them in 16 bits: in the longest words with enough terms at each place."""
    a_byte = 2 if numbers == "int4" else 1
    size = next((size for size in (4, 2) if step // (a_byte * size) >= MIN_TERMS), 1)
    convert = {"int4": _from_int4, "int8": _from_int8, "fp8": _from_fp8}[numbers]
    return Words(np.dtype(f"int{8 * size}"), a_byte * size, step, convert)


def whole_words(dtype: Any, step: int) -> Words:
    """Return how to read numbers to multiply them as they are."""
    return Words(np.dtype(dtype), 1, step, lambda words, *_: [words])


def _from_int4(words: Int[Array, "out words"], dtype: Any, zero: Any) -> list[Float[Array, "out words"]]:
    """Convert: with the exponent of 128, or of 1024 in float16, the last bits of a number count whole numbers.

    In two's complement, a nibble whose highest bit is inverted is 8 more than its number.
    """
    bits, excess = (0x4308, 136.0) if dtype == jnp.bfloat16 else (0x6408, 1032.0)
    halves = _halves(words, 4, 0xF, lambda nibble, both: nibble ^ bits * both, dtype)
    return [half - (zero + excess).astype(dtype) for half in halves]


def _from_int8(words: Int[Array, "out words"], dtype: Any, zero: Any) -> list[Float[Array, "out words"]]:
    """Convert as int4, but in float16, as a bfloat16 has too few bits."""
    halves = _halves(words, 8, 0xFF, lambda byte, both: byte ^ 0x6480 * both, jnp.float16)
    exact = _exact(dtype)
    return [(half.astype(exact) - (zero + 1152.0).astype(exact)).astype(dtype) for half in halves]


def _from_fp8(words: Int[Array, "out words"], dtype: Any, _: Any) -> list[Float[Array, "out words"]]:
    """Convert: float16 has the same fields, longer, and another bias of its exponent.

    A bfloat16 with the same fields would be subnormal where the number is, and some devices take such ones for zero.
    """
    halves = _halves(
        words, 8, 0xFF, lambda byte, both: ((byte & 0x7F * both) << 7) | ((byte & 0x80 * both) << 8), jnp.float16
    )
    return [(half.astype(_exact(dtype)) * 256.0).astype(dtype) for half in halves]


def _exact(dtype: Any) -> Any:
    """Return a type that holds the values of float16 on their way to `dtype`."""
    return dtype if dtype == jnp.float16 else jnp.float32


def _halves(
    words: Int[Array, "out words"], width: int, mask: int, fields: Callable[[Array, int], Array], dtype: Any
) -> list[Float[Array, "out words"]]:
    """Return the numbers at each place of the words, `width` bits each, in a type of 16 bits.

    `fields` makes the bits of the type from those of a number; `both` repeats a constant for both halves of a word of
    32 bits, as two numbers are converted at once.
    """
    size, both = words.dtype.itemsize, 0x10001 if words.dtype.itemsize == 4 else 1
    words = words.astype(jnp.int16) if size == 1 else words
    places = [fields((words >> shift) & mask * both, both) for shift in range(0, 8 * min(size, 2), width)]
    halves = [place.astype(jnp.int16) for place in places]
    halves += [(place >> 16).astype(jnp.int16) for place in places if size == 4]
    return [lax.bitcast_convert_type(half, dtype) for half in halves]


def product(
    operands: Operands, words: Words, blocks: Blocks, out_dtype: Any, *, interpret: bool
) -> Float[Array, "rows out"]:
    """Return the product of all operands; each split is rounded to `out_dtype`."""
    (rows, inputs), out_dim = operands.x.shape, len(operands.words)
    steps = inputs // words.step
    groups = 1 if operands.scale is None else operands.scale.shape[1]
    parts = pl.pallas_call(
        functools.partial(_kernel, facts=_Facts(words, steps, steps // groups, blocks)),
        # Rows come first: programs that run at the same time read the same weights, each of which is read once.
        grid=(pl.cdiv(rows, blocks.block_rows), pl.cdiv(out_dim, blocks.block_out), blocks.splits),
        out_shape=jax.ShapeDtypeStruct((blocks.splits, rows, out_dim), out_dtype),
        compiler_params=plgpu.CompilerParams(num_warps=blocks.num_warps, num_stages=blocks.num_stages),
        interpret=interpret,
        name="quantized_matmul",
    )(operands)
    return parts.sum(axis=0)


def _kernel(of: Operands, out: Ref, *, facts: _Facts) -> None:
    blocks, words = facts.blocks, facts.words
    terms = words.step // words.values_a_word
    rows, out_dim = out.shape[1:]
    m = pl.program_id(0) * blocks.block_rows + lax.iota(jnp.int32, blocks.block_rows)
    n = pl.program_id(1) * blocks.block_out + lax.iota(jnp.int32, blocks.block_out)
    # Rows and outputs that only fill a tile repeat the last one, and are not stored.
    row, output = jnp.minimum(m, rows - 1), jnp.minimum(n, out_dim - 1)
    lane = lax.iota(jnp.int32, terms)

    def multiplied(step: Array, zero: Any = _NO_ZERO) -> Float32[Array, "out rows"]:
        stored = plgpu.load(of.words.at[output[:, None], (step * terms + lane)[None, :]])
        sums = jnp.zeros((blocks.block_out, blocks.block_rows), jnp.float32)
        for place, values in enumerate(words.convert(stored, of.x.dtype, zero)):
            x = plgpu.load(of.x.at[row[:, None], (step * words.step + place * terms + lane)[None, :]])
            sums += jnp.dot(values, x.T, preferred_element_type=jnp.float32)
        return sums

    def group_of(step: Array) -> _Group:
        group = lax.div(jnp.minimum(step, facts.steps - 1), facts.steps_a_group)
        columns = (None if ref is None else plgpu.load(ref.at[output, group]) for ref in (of.scale, of.zero))
        lines = (None if ref is None else plgpu.load(ref.at[group, row]) for ref in (of.factors, of.totals))
        return _Group(*columns, *lines)

    def scaled(sums: Float32[Array, "out rows"], group: _Group) -> Float32[Array, "out rows"]:
        scale, zero, factor, total = (None if x is None else x.astype(jnp.float32) for x in group)
        if total is not None and zero is not None:
            sums -= zero[:, None] * total[None, :]
        if scale is not None:
            sums *= scale[:, None]
        return sums if factor is None else sums * factor[None, :]

    def one_step(step: Array, carry: Any) -> Any:
        # Triton copies only operands of products ahead of time, so scales are loaded here, a step ahead.
        sums, group = carry
        following = group_of(step + 1)
        whole = group.zero is not None and group.total is None
        zero = group.zero.astype(jnp.float32)[:, None] if whole else _NO_ZERO
        return sums + scaled(multiplied(step, zero), group), following

    part = pl.cdiv(facts.steps, blocks.splits)
    first = pl.program_id(2) * part
    last = jnp.minimum(first + part, facts.steps)
    sums = jnp.zeros((blocks.block_out, blocks.block_rows), jnp.float32)
    if of.scale is None:
        sums = lax.fori_loop(first, last, lambda step, sums: sums + multiplied(step), sums)
    else:
        sums, _ = lax.fori_loop(first, last, one_step, (sums, group_of(first)))
    mask = (m < rows)[:, None] & (n < out_dim)[None, :]
    plgpu.store(out.at[pl.program_id(2), m[:, None], n[None, :]], sums.T.astype(out.dtype), mask=mask)
