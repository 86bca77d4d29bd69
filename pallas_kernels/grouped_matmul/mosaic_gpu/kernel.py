"""Grouped products on Hopper GPUs by Mosaic GPU: rows of weights are rows of the tensor cores' tiles, tokens columns.

So a decode step, in which an expert has a few rows, wastes little of a tile, and reads the weight of an expert once.
Programs stay on their cores and take tiles in turn. Each finds the expert of a tile by itself, from where the rows of
experts start. One warpgroup copies blocks of inputs into a ring, the others multiply, each by 64 outputs. With a gate,
half of them multiply by rows of the gate matrix, the others by the same rows of the up matrix.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Float32, Int32, Shaped

from pallas_kernels.grouped_matmul.gate import Gate
from pallas_kernels.grouped_matmul.mosaic_gpu.plan import GroupedPlan
from pallas_kernels.quantized_matmul.mosaic_gpu.products import (
    ACCUMULATOR,
    COLUMNS,
    ROWS,
    Products,
    of_rows,
    store_transposed,
)
from pallas_kernels.quantized_matmul.mosaic_gpu.unpack import TILE_ROWS, Unpacking

# Experts whose rows are counted at a time: their starts are read together.
_COUNTED = 8
# Factors of a part begin at multiples of 128 bytes, as copies do in shared memory.
_ALIGNED = 32
_SWIZZLED_BYTES = 128


class _ExpertTile(NamedTuple):
    """The first row of a tile and the number of its rows, its number among its expert's tiles of outputs, and how many
    tiles the program has taken before."""

    expert: jax.Array
    row: jax.Array
    rows: jax.Array
    output: jax.Array
    before: jax.Array


@dataclasses.dataclass(frozen=True)
class MosaicGpuGroupedMatmul:
    """The static facts of a product. `group` neighbouring inputs of an output share a scale.

    Without `unpacking`, the numbers are what the tensor cores multiply. If `in_place`, a tile's products of all inputs
    are summed in the registers of the tensor cores, and then scaled.
    """

    plan: GroupedPlan
    group: int
    unpacking: Unpacking | None
    in_place: bool
    gate: Gate | None
    interpret: bool

    def multiply(
        self,
        starts: Int32[Array, " experts_plus_1"],
        x: Shaped[Array, "rows in_dim"],
        factors: Float32[Array, "parts rows"] | None,
        row_factors: Float32[Array, " rows"] | None,
        numbers: Shaped[Array, "experts_x_out stored"],
        scale: Float[Array, "experts_x_out groups"] | None,
        zero: Shaped[Array, "experts_x_out groups"] | None,
        bias: Float[Array, " experts_x_out"] | None,
        out_dtype: Any,
    ) -> Float[Array, "rows out_or_half"]:
        """Return the product's rows; `x` has the inputs of each row.

        `factors` multiply the products of each part; if zeros aren't whole numbers, they are the sums of each part's
        inputs. Whole zeros are subtracted from numbers. `row_factors` multiply the sums of each row. They are longer
        than the rows by a tile or more.
        """
        plan, gate, experts = self.plan, self.gate, len(starts) - 1
        unit = min(self.unpacking.inputs if self.unpacking else plan.block, self.group)
        chunk = min(unit, _SWIZZLED_BYTES // x.dtype.itemsize)
        products = Products(plan.tokens, plan.block, chunk, self.group, self.unpacking, self.interpret)
        parts, copies, copied = products.parts, products.copies, products.copied
        matrices = 2 if gate else 1
        # The numbers of outputs of an expert (`outputs`), of one of its matrices (`results`), and of a tile's part of a
        # matrix (`own`).
        outputs = len(numbers) // experts
        results, pairs = outputs // matrices, plan.warpgroups // matrices
        own = pairs * TILE_ROWS
        num_copies = copies * matrices + plan.block // chunk + (0 if factors is None else parts)
        stages, tokens, blocks = plan.stages, plan.tokens, plan.blocks

        def body(*refs: Any) -> None:
            starts_ref, x_ref, factors_ref, row_factors_ref = refs[:4]
            numbers_ref, scale_ref, zero_ref, bias_ref, constant_ref = refs[4:9]
            out_ref, x_ring, stored, factors_ring, ups, whole, arrived, free, ups_written, ups_read = refs[9:]
            # Copies into tiles begin at multiples of a tile's rows, but experts begin anywhere. Tiles as wide as one
            # swizzle lie in shared memory as their rows would, so copies take them for rows.
            x_tiles, x_rows = (x_ring, x_ring) if self.interpret else x_ring
            operands = stored._replace(x=x_tiles)
            program, warpgroup = lax.axis_index("program").astype(jnp.int32), lax.axis_index("warpgroup")
            constant: Any = None if constant_ref is None else constant_ref[0]

            def start_of(expert: jax.Array) -> jax.Array:
                return starts_ref[jnp.minimum(expert, experts)]

            def row_tiles(expert: jax.Array) -> jax.Array:
                return lax.div(start_of(expert + 1) - start_of(expert) + (tokens - 1), jnp.int32(tokens))

            def tiles_of(expert: jax.Array, count: int = 1) -> jax.Array:
                return sum((row_tiles(expert + i) for i in range(count)), jnp.int32(0)) * plan.output_tiles

            def seek(number: jax.Array, expert: jax.Array, first: jax.Array) -> tuple[jax.Array, jax.Array]:
                """Return the expert of tile `number`, and its first tile's number, from those of an earlier tile."""
                for count in (_COUNTED, 1) if experts > 2 * _COUNTED else (1,):

                    def passed(state: Any, count: int = count) -> jax.Array:
                        return (state[2] <= number) & (state[0] + count <= experts)

                    def step(state: Any, count: int = count) -> Any:
                        expert, _, following = state
                        return expert + count, following, following + tiles_of(expert + count, count)

                    expert, first, _ = lax.while_loop(passed, step, (expert, first, first + tiles_of(expert, count)))
                return expert, first

            def for_each_tile(take: Callable[[_ExpertTile], None]) -> jax.Array:
                """Take the program's tiles, and return their number."""

                def step(state: Any) -> Any:
                    before, number, expert, first = state
                    # Tiles of the same outputs are neighbours: the weights that one reads, others find in the cache.
                    count = row_tiles(expert)
                    output = lax.div(number - first, count)
                    row = start_of(expert) + (number - first - output * count) * tokens
                    take(_ExpertTile(expert, row, jnp.minimum(start_of(expert + 1) - row, tokens), output, before))
                    number = number + plan.programs
                    return before + 1, number, *seek(number, expert, first)

                nothing = jnp.int32(0)
                state = nothing, program, *seek(program, nothing, nothing)
                return lax.while_loop(lambda state: state[2] < experts, step, state)[0]

            def load(tile: _ExpertTile) -> None:
                def load_block(block: jax.Array, carry: tuple[()]) -> tuple[()]:
                    position = tile.before * blocks + block
                    slot = lax.rem(position, jnp.int32(stages))
                    pl.when(position >= stages)(lambda: plgpu.barrier_wait(free.at[slot]))
                    for matrix in range(matrices):
                        some = pl.ds(tile.expert * outputs + matrix * results + tile.output * own, own)
                        for copy in range(copies):
                            source = numbers_ref.at[some, pl.ds((block * copies + copy) * copied, copied)]
                            to = operands.numbers.at[slot, copy, pl.ds(matrix * own, own)]
                            plgpu.copy_gmem_to_smem(source, to, arrived.at[slot])
                    some = pl.ds(tile.row, tokens)
                    for i in range(plan.block // chunk):
                        source = x_ref.at[some, pl.ds(block * plan.block + i * chunk, chunk)]
                        plgpu.copy_gmem_to_smem(source, x_rows.at[slot, i], arrived.at[slot])
                    for part in range(parts if factors_ref is not None else 0):
                        to = factors_ring.at[slot, part, pl.ds(0, tokens)]
                        plgpu.copy_gmem_to_smem(factors_ref.at[block * parts + part, some], to, arrived.at[slot])
                    return carry

                lax.fori_loop(0, blocks, load_block, ())

            def sums_in_place(start: jax.Array, scale: Any, zero: Any) -> jax.Array:
                def release(position: jax.Array) -> None:
                    if self.unpacking:
                        # Ordinary reads come before the copy that overwrites the numbers that were read.
                        plgpu.commit_smem()
                    plgpu.barrier_arrive(free.at[lax.rem(position, jnp.int32(stages))])

                def sums(acc: Any) -> jax.Array:
                    def step(block: jax.Array, carry: tuple[()]) -> tuple[()]:
                        slot = lax.rem(start + block, jnp.int32(stages))
                        plgpu.barrier_wait(arrived.at[slot])
                        products.multiply(acc, operands, slot, warpgroup, (0, plan.block), constant, zero)
                        if self.unpacking:
                            plgpu.wgmma_wait(0)
                            release(start + block)
                        else:
                            plgpu.wgmma_wait(1)
                            pl.when(block > 0)(lambda: release(start + block - 1))
                        return carry

                    lax.fori_loop(0, blocks, step, ())
                    return acc[...].astype(jnp.float32)

                dtype = jnp.int32 if x.dtype == jnp.int8 else jnp.float32
                total = pl.run_scoped(sums, ACCUMULATOR((TILE_ROWS, tokens), dtype))
                if not self.unpacking:
                    release(start + (blocks - 1))
                return total if scale is None else total * of_rows(scale, total)

            def sums_of_parts(start: jax.Array, columns: Callable[[jax.Array], Any]) -> jax.Array:
                def step(block: jax.Array, total: jax.Array) -> jax.Array:
                    slot = lax.rem(start + block, jnp.int32(stages))
                    # Scales and zeros arrive during the products.
                    scales, zeros = columns(block)
                    plgpu.barrier_wait(arrived.at[slot])
                    of_parts = None if factors_ref is None else factors_ring.at[slot]
                    total = products.add_scaled(total, operands, slot, warpgroup, constant, scales, zeros, of_parts)
                    plgpu.commit_smem()
                    plgpu.barrier_arrive(free.at[slot])
                    return total

                return lax.fori_loop(0, blocks, step, products.zero_sums())

            matrix = lax.div(warpgroup, jnp.int32(pairs))
            pair = warpgroup - matrix * pairs

            def multiply(tile: _ExpertTile) -> None:
                result = tile.output * own + pair * TILE_ROWS
                first = tile.expert * outputs + matrix * results + result
                # The last tile may have fewer outputs; those of other tiles are left out at the end.
                rows = pl.ds(jnp.minimum(first, len(numbers) - TILE_ROWS), TILE_ROWS)

                def column(ref: Any, *index: Any) -> Any:
                    if ref is None:
                        return None
                    return plgpu.load(ref.at[(rows, *index)], layout=ROWS, optimized=False)

                def columns(block: jax.Array) -> tuple[list[Any], list[Any]]:
                    scales, zeros = [], []
                    for part in range(parts):
                        group = lax.div(block * plan.block + part * products.part, jnp.int32(self.group))
                        # Inputs beyond the last are zero, so any group serves them.
                        group = jnp.minimum(group, scale_ref.shape[1] - 1)
                        scales.append(column(scale_ref, group))
                        zeros.append(column(zero_ref, group))
                    return scales, zeros

                offsets = column(bias_ref)
                row_factor = None
                if row_factors_ref is not None:
                    source = row_factors_ref.at[pl.ds(tile.row, tokens)]
                    row_factor = plgpu.load(source, layout=COLUMNS, optimized=False)
                start = tile.before * blocks
                if self.in_place:
                    total = sums_in_place(start, column(scale_ref, 0), column(zero_ref, 0))
                else:
                    total = sums_of_parts(start, columns)
                if row_factor is not None:
                    total = total * lax.broadcast_in_dim(row_factor, total.shape, [1])
                if offsets is not None:
                    total = total + of_rows(offsets, total)
                if gate is None:
                    pl.when(result < results)(lambda: write(total, tile, pair, result))
                    return

                @pl.when(matrix == 1)
                def _hand_over() -> None:
                    pl.when(tile.before > 0)(lambda: plgpu.barrier_wait(ups_read.at[pair]))
                    ups[pair] = total
                    plgpu.commit_smem()
                    plgpu.barrier_arrive(ups_written.at[pair])

                @pl.when(matrix == 0)
                def _join() -> None:
                    plgpu.barrier_wait(ups_written.at[pair])
                    up = plgpu.load(ups.at[pair], layout=plgpu.Layout.WGMMA)
                    plgpu.barrier_arrive(ups_read.at[pair])
                    pl.when(result < results)(lambda: write(gate.join(total, up), tile, pair, result))

            def write(total: jax.Array, tile: _ExpertTile, pair: jax.Array, result: jax.Array) -> None:
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                if self.interpret:
                    whole[pair] = total.astype(out_dtype).T
                else:
                    store_transposed(whole.at[pair], total.astype(out_dtype))
                plgpu.commit_smem()
                # The rows that follow belong to other tiles: copies of powers of two add up to the tile's rows.
                for size in (1 << i for i in reversed(range(tokens.bit_length()))):

                    @pl.when((tile.rows & size) != 0)
                    def _copy(size: int = size) -> None:
                        done = tile.rows & -(2 * size)
                        target = out_ref.at[pl.ds(tile.row + done, size), pl.ds(result, TILE_ROWS)]
                        plgpu.copy_smem_to_gmem(whole.at[pair, pl.ds(done, size)], target)

            @pl.when(warpgroup == plan.warpgroups)
            def _load() -> None:
                loaded = for_each_tile(load) * blocks

                def drain(position: jax.Array, carry: tuple[()]) -> tuple[()]:
                    plgpu.barrier_wait(free.at[lax.rem(position, jnp.int32(stages))])
                    return carry

                # Warpgroups may not arrive at barriers of a program that has ended.
                lax.fori_loop(jnp.maximum(loaded - stages, 0), loaded, drain, ())

            @pl.when(warpgroup < plan.warpgroups)
            def _multiply() -> None:
                count = for_each_tile(multiply)
                plgpu.wait_smem_to_gmem(0)
                if gate is not None:
                    pl.when((matrix == 1) & (count > 0))(lambda: plgpu.barrier_wait(ups_read.at[pair]))

        constant = jnp.asarray(self.unpacking.constant) if self.unpacking else None
        operand_types = products.operands(stages, plan.warpgroups, x.dtype, numbers.dtype)
        x_type = operand_types.x
        if not self.interpret:
            swizzle = plgpu.SMEM(x_type.shape, x.dtype, transforms=x_type.transforms[1:])
            x_type = plgpu.RefUnion(x_type, swizzle)
        kernel = plgpu.kernel(
            body,
            out_type=jax.ShapeDtypeStruct((len(x), results), out_dtype),
            scratch_types=(
                x_type,
                operand_types._replace(x=None),
                None
                if factors is None
                else plgpu.SMEM((stages, parts, -(-tokens // _ALIGNED) * _ALIGNED), jnp.float32),
                products.smem(pairs, TILE_ROWS, tokens, dtype=jnp.float32) if gate else None,
                plgpu.SMEM((pairs, tokens, TILE_ROWS), out_dtype),
                plgpu.Barrier(num_arrivals=num_copies, num_barriers=stages),
                plgpu.Barrier(num_arrivals=plan.warpgroups, num_barriers=stages),
                plgpu.Barrier(num_barriers=pairs) if gate else None,
                plgpu.Barrier(num_barriers=pairs) if gate else None,
            ),
            grid=(plan.programs,),
            grid_names=("program",),
            num_threads=plan.warpgroups + 1,
            thread_name="warpgroup",
            kernel_name="grouped_matmul",
            compiler_params=plgpu.CompilerParams(
                approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Warpgroup
            ),
            interpret=plgpu.InterpretGPUParams(detect_races=True) if self.interpret else None,
        )
        out: jax.Array = kernel(starts, x, factors, row_factors, numbers, scale, zero, bias, constant)
        return out
