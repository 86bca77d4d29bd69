"""The Triton kernel: a tile of outputs times a tile of rows, over a part of the inputs.

The numbers of a group are multiplied unscaled, less their zero if that is a whole number, which is exact in the type of
the inputs, and the sum of the group is scaled in float32. With other zeros it is `scale * (sum - zero * total)`, where
`total` is the sum of the group's inputs. `words.py` tells how numbers become operands of products.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Float32, Int32

from pallas_kernels.quantized_matmul.triton.words import NO_ZERO, Words

# A reference into device memory; jax has no public type for it.
Ref = Any


@dataclasses.dataclass(frozen=True)
class Blocks:
    """The sizes of a tile, the parts that the inputs are split into, and how a program runs."""

    block_out: int
    block_rows: int
    splits: int
    num_warps: int
    num_stages: int


class Operands(NamedTuple):
    """The arrays that the kernel reads: `words` are views of the numbers.

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
    """The numbers by which a group's sums are scaled: those of each output, and those of each row."""

    scale: Array | None
    zero: Array | None
    factor: Array | None
    total: Array | None

    @property
    def subtracted(self) -> Any:
        """The zeros that are subtracted from the numbers of each output."""
        if self.zero is None or self.total is not None:
            return NO_ZERO
        return self.zero.astype(jnp.float32)[:, None]

    def scaled(self, sums: Float32[Array, "out rows"]) -> Float32[Array, "out rows"]:
        """Return the sums of a group's products, scaled."""
        scale, zero, factor, total = (None if x is None else x.astype(jnp.float32) for x in self)
        if total is not None and zero is not None:
            sums -= zero[:, None] * total[None, :]
        if scale is not None:
            sums *= scale[:, None]
        return sums if factor is None else sums * factor[None, :]


def product(
    operands: Operands, words: Words, blocks: Blocks, out_dtype: Any, *, interpret: bool
) -> Float[Array, "rows out"]:
    """Return the product of all operands; each split is rounded to `out_dtype`."""
    (rows, _), out_dim = operands.x.shape, len(operands.words)
    parts = pl.pallas_call(
        functools.partial(_kernel, words=words, blocks=blocks),
        # Rows come first: programs that run at the same time read the same weights, each of which is read once.
        grid=(pl.cdiv(rows, blocks.block_rows), pl.cdiv(out_dim, blocks.block_out), blocks.splits),
        out_shape=jax.ShapeDtypeStruct((blocks.splits, rows, out_dim), out_dtype),
        compiler_params=plgpu.CompilerParams(num_warps=blocks.num_warps, num_stages=blocks.num_stages),
        interpret=interpret,
        name="quantized_matmul",
    )(operands)
    return parts.sum(axis=0)


def _kernel(of: Operands, out: Ref, *, words: Words, blocks: Blocks) -> None:
    rows, out_dim = out.shape[1:]
    m = pl.program_id(0) * blocks.block_rows + lax.iota(jnp.int32, blocks.block_rows)
    n = pl.program_id(1) * blocks.block_out + lax.iota(jnp.int32, blocks.block_out)
    steps = of.x.shape[1] // words.step
    part = pl.cdiv(steps, blocks.splits)
    first = pl.program_id(2) * part
    last = jnp.minimum(first + part, steps)
    # Rows and outputs that only fill a tile repeat the last one, and are not stored.
    sums = sum_steps(of, words, jnp.minimum(n, out_dim - 1), jnp.minimum(m, rows - 1), first, last)
    mask = (m < rows)[:, None] & (n < out_dim)[None, :]
    plgpu.store(out.at[pl.program_id(2), m[:, None], n[None, :]], sums.T.astype(out.dtype), mask=mask)


def sum_steps(
    of: Operands, words: Words, outputs: Int32[Array, " out"], rows: Int32[Array, " rows"], first: Any, last: Any
) -> Float32[Array, "out rows"]:
    """Return the scaled sums of products over the inputs of some steps, of all `outputs` times all `rows`.

    With one group of all inputs, totals are the sums of all steps.
    """
    steps = of.x.shape[1] // words.step
    groups = 1 if of.scale is None else of.scale.shape[1]
    groups_a_step, steps_a_group = max(1, groups // steps), max(1, steps // groups)
    terms, places = words.step // words.values_a_word, words.values_a_word // groups_a_step
    lane = lax.iota(jnp.int32, terms)
    nothing = jnp.zeros((len(outputs), len(rows)), jnp.float32)
    dtype = of.x.dtype
    precision = lax.Precision.HIGHEST if dtype == jnp.float32 else None

    def groups_of(step: Any) -> list[_Group]:
        step, found = jnp.minimum(step, steps - 1), []
        for at in range(groups_a_step):
            group = step * groups_a_step + at if groups_a_step > 1 else lax.div(step, steps_a_group)
            columns = (None if ref is None else plgpu.load(ref.at[outputs, group]) for ref in (of.scale, of.zero))
            lines = (None if ref is None else plgpu.load(ref.at[group, rows]) for ref in (of.factors, of.totals))
            found.append(_Group(*columns, *lines))
        return found

    def multiplied(step: Any, groups: list[_Group]) -> list[Float32[Array, "out rows"]]:
        """Return the sums of each group of a step."""
        stored = plgpu.load(of.words.at[outputs[:, None], (step * terms + lane)[None, :]])
        zeros = [group.subtracted for group in groups for _ in range(places)]
        sums = [nothing] * groups_a_step
        for place, values in enumerate(words.convert(stored, jnp.bfloat16 if precision else dtype, zeros)):
            x = plgpu.load(of.x.at[rows[:, None], (step * words.step + place * terms + lane)[None, :]])
            sums[place // places] += jnp.dot(
                values.astype(dtype), x.T, precision=precision, preferred_element_type=jnp.float32
            )
        return sums

    def one_step(step: Any, carry: Any) -> Any:
        # Triton copies only operands of products ahead of time, so scales are loaded here, a step ahead.
        sums, groups = carry
        following = groups_of(step + 1)
        for group, part in zip(groups, multiplied(step, groups), strict=True):
            sums += group.scaled(part)
        return sums, following

    groups_now = groups_of(first)
    if groups > 1:
        return lax.fori_loop(first, last, one_step, (nothing, groups_now))[0]
    sums = lax.fori_loop(first, last, lambda step, sums: sums + multiplied(step, groups_now)[0], nothing)
    return groups_now[0].scaled(sums)
