"""The Triton kernel: a tile of outputs of one expert times a tile of its rows.

A grid has as many tiles of rows as there can be, whatever the numbers of rows of experts. A program finds its expert
and its rows from these numbers; a program without rows multiplies nothing and writes nothing. It gathers its rows of
`x`, so rows are never copied into the order of experts. With a gate it computes the same outputs of gate and up, and
joins them in float32.
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
from jaxtyping import Array, Float, Int32

from pallas_kernels.grouped_matmul.gate import Gate
from pallas_kernels.quantized_matmul.triton.kernel import Operands, Ref, sum_steps
from pallas_kernels.quantized_matmul.triton.words import Words


@dataclasses.dataclass(frozen=True)
class GroupedBlocks:
    """The sizes of a tile, and how a program runs. With a gate, half of the outputs are those of gate, half of up."""

    block_out: int
    block_rows: int
    num_warps: int
    num_stages: int


class ExpertOperands(NamedTuple):
    """The arrays that the kernel reads besides `Operands`: `starts` `[experts + 1]`, `tokens` `[rows]`, `bias`
    `[experts, out]`.

    In `Operands`, outputs of all experts are one dimension. With `tokens`, rows of `x`, `factors` and `totals` are
    tokens.
    """

    starts: Any
    tokens: Any
    bias: Any


def most_tiles(rows: int, experts: int, block_rows: int) -> int:
    """Return the most tiles of rows that there can be: each expert with rows has a tile that may not be full."""
    return (rows + min(rows, experts) * (block_rows - 1)) // block_rows


def grouped_product(
    operands: Operands,
    experts: ExpertOperands,
    words: Words,
    gate: Gate | None,
    rows: int,
    blocks: GroupedBlocks,
    out_dtype: Any,
    *,
    interpret: bool,
) -> Float[Array, "rows out_or_half"]:
    """Return the rows of all experts."""
    count, halves = len(experts.starts) - 1, 2 if gate else 1
    out = len(operands.words) // count // halves
    return pl.pallas_call(
        functools.partial(_kernel, words=words, gate=gate, blocks=blocks),
        # Tiles of rows come first: programs that run at the same time read the same weights.
        grid=(most_tiles(rows, count, blocks.block_rows), pl.cdiv(out, blocks.block_out // halves)),
        out_shape=jax.ShapeDtypeStruct((rows, out), out_dtype),
        compiler_params=plgpu.CompilerParams(num_warps=blocks.num_warps, num_stages=blocks.num_stages),
        interpret=interpret,
        name="grouped_matmul",
    )(operands, experts)


def _kernel(
    of: Operands, experts: ExpertOperands, out: Ref, *, words: Words, gate: Gate | None, blocks: GroupedBlocks
) -> None:
    expert, m, end = _find_tile(experts.starts, pl.program_id(0), blocks.block_rows)
    width, halves = out.shape[1], 2 if gate else 1
    block = blocks.block_out // halves
    first, lane = pl.program_id(1) * block, lax.iota(jnp.int32, blocks.block_out)
    # Rows and outputs that only fill a tile repeat the last one, and are not stored.
    rows = jnp.maximum(jnp.minimum(m, end - 1), 0)
    rows = rows if experts.tokens is None else plgpu.load(experts.tokens.at[rows])
    outputs = expert * halves + lax.div(lane, block)
    outputs = outputs * width + jnp.minimum(first + lax.rem(lane, block), width - 1)
    steps = jnp.minimum(end, 1) * (of.x.shape[1] // words.step)
    sums = sum_steps(of, words, outputs, rows, 0, steps)
    if experts.bias is not None:
        sums += plgpu.load(experts.bias.at[outputs]).astype(jnp.float32)[:, None]
    if gate:
        sums = gate.join(*jnp.split(sums, 2))
    n = first + lax.iota(jnp.int32, block)
    plgpu.store(out.at[m[:, None], n[None, :]], sums.T.astype(out.dtype), mask=(m < end)[:, None] & (n < width)[None])


def _find_tile(
    starts: Ref, tile: Any, block_rows: int
) -> tuple[Int32[Array, ""], Int32[Array, " block_rows"], Int32[Array, ""]]:
    """Return the expert and the rows of a tile, and where the rows of the expert end.

    A tile after the last one belongs to the last expert, and its rows end at 0: it has none.
    """
    count = starts.shape[0] - 1
    lane = lax.iota(jnp.int32, pl.next_power_of_2(count))
    first, end = (plgpu.load(starts.at[jnp.minimum(lane + i, count)]) for i in range(2))
    tiles = lax.div(end - first + block_rows - 1, block_rows)
    expert = (jnp.cumsum(tiles) <= tile).astype(jnp.int32).sum()
    before = jnp.where(lane < expert, tiles, 0).sum()
    own_first, own_end = (jnp.where(lane == expert, x, 0).sum() for x in (first, end))
    row = own_first + (tile - before) * block_rows + lax.iota(jnp.int32, block_rows)
    return jnp.minimum(expert, count - 1), row, own_end
