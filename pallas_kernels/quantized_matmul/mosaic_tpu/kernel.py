"""The TPU kernel: a tile of rows times a tile of outputs, over all inputs, 128 at a time, and then the rest.

Numbers are unpacked in vector memory and multiplied unscaled, which is exact in bfloat16; the sum of each group is
scaled in float32. Where several groups share 128 inputs, each has a copy of the rows that is zero in the others.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, BFloat16, Float, Float32, Int8, Int32, Shaped, UInt8

LANES = 128
AT_ONCE = 4

# A reference into a TPU's memory; jax has no public type for it.
Ref = Any


@dataclasses.dataclass(frozen=True)
class TileSizes:
    """The static facts of a call. `group` inputs share a scale; `packed` says that a byte has two numbers."""

    block_rows: int
    block_out: int
    inputs: int
    group: int
    packed: bool

    def groups_of(self, inputs: int) -> int:
        """Return the number of groups of these neighbouring inputs, at most 128."""
        return max(1, inputs // self.group)


def product(
    x: BFloat16[Array, "rows in_dim"],
    numbers: Shaped[Array, "out stored"],
    scale: Float[Array, "groups out"],
    offsets: tuple[Shaped[Array, "groups out"], Float32[Array, "rows groups"]] | None,
    tiles: TileSizes,
    out_dtype: Any,
    *,
    vmem_limit: int,
    interpret: bool,
) -> Float[Array, "rows out"]:
    """Return the product; `offsets` are zeros, and the sums of the inputs of each group. The rows are whole tiles."""

    by_rows = pl.BlockSpec((tiles.block_rows, tiles.inputs), lambda row, out: (row, 0))
    by_outputs = pl.BlockSpec((tiles.block_out, numbers.shape[1]), lambda row, out: (out, 0))
    by_groups = pl.BlockSpec((len(scale), tiles.block_out), lambda row, out: (0, out))
    operands, specs = [x, numbers, scale], [by_rows, by_outputs, by_groups]
    if offsets is not None:
        operands += offsets
        specs += [by_groups, pl.BlockSpec((tiles.block_rows, len(scale)), lambda row, out: (row, 0))]

    def kernel(x: Ref, numbers: Ref, scale: Ref, *refs: Ref) -> None:
        *offsets, out, arranged, scales, sums = refs
        if tiles.packed:
            pl.when(pl.program_id(1) == 0)(lambda: arrange(x, arranged))
        sum_products(arranged if tiles.packed else x, numbers, scale, offsets, scales, sums, tiles)
        out[...] = sums[...].astype(out.dtype)

    out_dim = len(numbers)
    return pl.pallas_call(
        kernel,
        grid=(len(x) // tiles.block_rows, pl.cdiv(out_dim, tiles.block_out)),
        in_specs=specs,
        out_specs=pl.BlockSpec((tiles.block_rows, tiles.block_out), lambda row, out: (row, out)),
        out_shape=jax.ShapeDtypeStruct((len(x), out_dim), out_dtype),
        scratch_shapes=[
            pltpu.VMEM((tiles.block_rows, tiles.inputs), x.dtype),
            pltpu.VMEM((len(scale), tiles.block_out), jnp.float32),
            pltpu.VMEM((tiles.block_rows, tiles.block_out), jnp.float32),
        ],
        compiler_params=pltpu.CompilerParams(vmem_limit_bytes=vmem_limit),
        interpret=pltpu.InterpretParams() if interpret else False,
        name="quantized_matmul_tpu",
    )(*operands)


def arrange(x: Ref, arranged: Ref) -> None:
    """Bring the inputs into the order in which packed numbers are unpacked: of each 128, first those of even index.

    A product does this: it is exact and faster than moving single lanes.
    """
    place, source = (lax.broadcasted_iota(jnp.int32, (LANES, LANES), axis) for axis in (1, 0))
    moves = (source == (place % (LANES // 2)) * 2 + place // (LANES // 2)).astype(x.dtype)

    def one(i: Array, _: None) -> None:
        lanes = pl.ds(pl.multiple_of(i * LANES, LANES), LANES)
        arranged[:, lanes] = jnp.dot(x[:, lanes], moves, preferred_element_type=jnp.float32).astype(x.dtype)

    lax.fori_loop(0, x.shape[1] // LANES, one, None)


def sum_products(
    x: Ref, numbers: Ref, scale: Ref, offsets: Sequence[Ref], scales: Ref, sums: Ref, tiles: TileSizes
) -> None:
    """Write the products of a tile into `sums`; `offsets` are zeros and the sums of inputs, `scales` is for our use."""
    # A single row of a type of 16 bits can't be read at an index.
    scales[...] = scale[...].astype(jnp.float32)
    sums[...] = jnp.zeros(sums.shape, jnp.float32)
    if offsets:
        zero, totals = offsets
        shift = scales[...] * zero[...].astype(jnp.float32)
        sums[...] -= jnp.dot(totals[...], shift, precision=lax.Precision.HIGHEST)

    def add(tile: Array | int, q: Int8[Array, "out lanes"]) -> None:
        rows = x[:, pl.ds(_first_lane(tile), q.shape[1])]
        values = q.astype(jnp.float32).astype(rows.dtype)
        partial = lax.dot_general(
            _by_group(rows, tiles), values, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
        )
        for i in range(tiles.groups_of(q.shape[1])):
            group = tile * LANES // tiles.group + i
            part = partial[i * tiles.block_rows : (i + 1) * tiles.block_rows]
            sums[...] += part * scales[pl.ds(group, 1), :]

    def at(i: Array | int, lanes: int = LANES) -> Array:
        return numbers[:, pl.ds(_first_lane(i), lanes)]

    def step(i: Array, _: None) -> None:
        for one in range(at_once):
            column = i * at_once + one
            if tiles.packed:
                for half, q in enumerate(_unpack(at(column))):
                    add(2 * column + half, q)
            else:
                add(column, at(column))

    # Several columns are computed at once, as each waits long for its products.
    columns = numbers.shape[1] // LANES
    at_once = math.gcd(columns, AT_ONCE)
    lax.fori_loop(0, columns // at_once, step, None)
    if rest := numbers.shape[1] % LANES:
        add(columns, at(columns, rest))


def _first_lane(tile: Array | int) -> Array | int:
    return tile * LANES if isinstance(tile, int) else pl.multiple_of(tile * LANES, LANES)


def _unpack(packed: UInt8[Array, "out lanes"]) -> tuple[Int8[Array, "out lanes"], Int8[Array, "out lanes"]]:
    """Return the numbers of 128 bytes of each output: those of the first 64 bytes, low ones first, then the others.

    Computes with the words in which four outputs lie together.
    """
    words = pltpu.bitcast(packed, jnp.int32)
    swapped = pltpu.roll(words, LANES // 2, 1)
    first_half = lax.broadcasted_iota(jnp.int32, words.shape, 1) < LANES // 2
    places = jnp.where(first_half, words, swapped >> 4), jnp.where(first_half, swapped, words >> 4)
    first, second = (pltpu.bitcast(_sign_extended(place & _every_byte(0x0F)), jnp.int8) for place in places)
    return first, second


def _sign_extended(nibbles: Int32[Array, "words lanes"]) -> Int32[Array, "words lanes"]:
    """Return four numbers of 4 bits as ones of 8: inverts the sign bit and subtracts 8; bit 7 prevents a borrow."""
    return ((nibbles ^ _every_byte(0x88)) - _every_byte(0x08)) ^ _every_byte(0x80)


def _every_byte(byte: int) -> int:
    return int.from_bytes(bytes([byte] * 4), "little", signed=True)


def _by_group(rows: BFloat16[Array, "rows lanes"], tiles: TileSizes) -> BFloat16[Array, "rows_by_group lanes"]:
    """Return the rows once for each group of the lanes, with zeros in the lanes of other groups."""
    groups = tiles.groups_of(rows.shape[1])
    if groups == 1:
        return rows
    lane = lax.broadcasted_iota(jnp.int32, rows.shape, 1)
    group = lax.div((lane % (LANES // 2)) * 2 if tiles.packed else lane, tiles.group)
    return jnp.concatenate([jnp.where(group == i, rows, jnp.zeros_like(rows)) for i in range(groups)])
