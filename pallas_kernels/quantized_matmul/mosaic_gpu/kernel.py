"""The product on Hopper GPUs by Mosaic GPU: rows of the weight are rows of the tensor cores' tiles, tokens are columns.

So a decode step of a few rows wastes nothing of a tile, and reads each weight once. Each core runs one program, which
takes an equal share of all blocks of inputs of all tiles: one warpgroup copies blocks into a ring, the others multiply,
each by rows of its own. A group's products are summed unscaled, which is exact up to the rounding of sums, and then
scaled in registers.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Float32, Shaped

from pallas_kernels.quantized_matmul.mosaic_gpu.plan import BLOCK, ProductPlan
from pallas_kernels.quantized_matmul.mosaic_gpu.products import ROWS, Products, scalars
from pallas_kernels.quantized_matmul.mosaic_gpu.unpack import TILE_ROWS, Unpacking

# Factors of a part begin at multiples of 128 bytes, as copies do in shared memory.
_ALIGNED = 32


@dataclasses.dataclass(frozen=True)
class MosaicGpuMatmul:
    """The static facts of a product. Without `unpacking`, the numbers are what the tensor cores multiply.

    `group` neighbouring inputs of an output share a scale.
    """

    plan: ProductPlan
    group: int
    unpacking: Unpacking | None
    interpret: bool

    def multiply(
        self,
        x: Shaped[Array, "tokens in_dim"],
        factors: Float32[Array, "parts tokens"] | None,
        numbers: Shaped[Array, "out_dim stored"],
        scale: Float[Array, "out_dim groups"],
        zero: Shaped[Array, "out_dim groups"] | None,
        out_dtype: Any,
    ) -> Float[Array, "parts tokens out_dim"]:
        """Return parts of the sums, each tile's as `plan.part_counts` says. Only whole sums may be rounded to bfloat16.

        `tokens` is a multiple of the plan's. `factors` multiply the products of each part; if zeros aren't whole
        numbers, they are the sums of each part's inputs. Whole zeros are subtracted from numbers.
        """
        plan = self.plan
        products = Products(plan.tokens, BLOCK, BLOCK, self.group, self.unpacking, self.interpret)
        parts, copies, copied = products.parts, products.copies, products.copied
        num_copies = copies + 1 + (0 if factors is None else parts)
        # A program's part of the outputs of its cluster.
        outputs = plan.outputs // plan.cluster
        warpgroups = outputs // TILE_ROWS
        rounds = out_dtype != jnp.float32
        now = pl.ds(0, plan.tokens)

        def body(*refs: Any) -> None:
            x_ref, factors_ref, numbers_ref, scale_ref, zero_ref, constant_ref = refs[:6]
            out_ref, operands, factors_ring, rounded, arrived, free = refs[6:]
            core, warpgroup = lax.axis_index("core").astype(jnp.int32), lax.axis_index("warpgroup")
            begin, end = plan.first_block(core), plan.first_block(core + 1)
            own = lax.axis_index("cluster").astype(jnp.int32) * outputs
            constant: Any = None if constant_ref is None else constant_ref[0]

            def slot_of(i: jax.Array) -> jax.Array:
                return lax.rem(i - begin, jnp.int32(plan.stages))

            def load(i: jax.Array) -> None:
                slot = slot_of(i)
                output, token, block = plan.place(i)
                pl.when(i - begin >= plan.stages)(lambda: plgpu.barrier_wait(free.at[slot]))
                some = pl.ds(output + own, outputs)
                for copy in range(copies):
                    source = numbers_ref.at[some, pl.ds((block * copies + copy) * copied, copied)]
                    plgpu.copy_gmem_to_smem(source, operands.numbers.at[slot, copy], arrived.at[slot])
                some = pl.ds(token, plan.tokens)
                source = x_ref.at[some, pl.ds(block * BLOCK, BLOCK)]
                axes = None if plan.cluster == 1 or self.interpret else "cluster"
                plgpu.copy_gmem_to_smem(source, operands.x.at[slot, 0], arrived.at[slot], collective_axes=axes)
                for part in range(parts if factors_ref is not None else 0):
                    source, to = factors_ref.at[block * parts + part, some], factors_ring.at[slot, part, now]
                    plgpu.copy_gmem_to_smem(source, to, arrived.at[slot])

            def load_ahead(i: jax.Array) -> None:
                pl.when((warpgroup == 0) & (i < end))(functools.partial(load, i))

            def take_tile(tile: jax.Array, carry: tuple[()]) -> tuple[()]:
                low = jnp.maximum(begin, tile * plan.blocks)
                high = jnp.minimum(end, (tile + 1) * plan.blocks)
                output, token, _ = plan.place(low)
                rows = pl.ds(output + own + warpgroup * TILE_ROWS, TILE_ROWS)

                def column(ref: Any, block: jax.Array, part: int) -> jax.Array:
                    group = lax.div(block * BLOCK + part * products.part, jnp.int32(self.group))
                    return plgpu.load(ref.at[rows, group], layout=ROWS, optimized=False)

                def step(i: jax.Array, total: jax.Array) -> jax.Array:
                    slot, (_, _, block) = slot_of(i), plan.place(i)
                    # Scales arrive during the products.
                    scales = [column(scale_ref, block, part) for part in range(parts)]
                    zeros = [None if zero_ref is None else column(zero_ref, block, part) for part in range(parts)]
                    plgpu.barrier_wait(arrived.at[slot])
                    factors = None if factors_ref is None else factors_ring.at[slot]
                    total = products.add_scaled(total, operands, slot, warpgroup, constant, scales, zeros, factors)
                    # Ordinary reads come before the copy that overwrites the numbers that were read.
                    plgpu.commit_smem()
                    plgpu.barrier_arrive(free.at[slot])
                    # This loads into the slot of the block before, which the other warpgroups have read by now.
                    load_ahead(i + (plan.stages - 1))
                    return total

                total = lax.fori_loop(low, high, step, products.zero_sums())
                target = out_ref.at[core - plan.first_core(tile), pl.ds(token, plan.tokens), rows]
                if rounds:
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                    rounded.at[warpgroup].transpose((1, 0))[...] = total.astype(out_dtype)
                    plgpu.commit_smem()
                    plgpu.copy_smem_to_gmem(rounded.at[warpgroup], target)
                else:
                    sums = total if self.interpret else scalars(total)
                    target.transpose((1, 0))[...] = sums
                return carry

            for i in range(plan.stages - 1):
                load_ahead(begin + i)
            lax.fori_loop(lax.div(begin, jnp.int32(plan.blocks)), plan.tiles_until(end), take_tile, ())

            plgpu.wait_smem_to_gmem(0)

            # The other program of a cluster may not end before this one has arrived at its barriers.
            @pl.when(warpgroup == 0)
            def _drain() -> None:
                def drain(i: jax.Array, carry: tuple[()]) -> tuple[()]:
                    plgpu.barrier_wait(free.at[slot_of(i)])
                    return carry

                lax.fori_loop(jnp.maximum(begin, end - plan.stages), end, drain, ())

        stages = plan.stages
        constant = jnp.asarray(self.unpacking.constant) if self.unpacking else None
        kernel = plgpu.kernel(
            body,
            out_type=jax.ShapeDtypeStruct((plan.parts, len(x), len(numbers)), out_dtype),
            scratch_types=(
                products.operands(stages, warpgroups, x.dtype, numbers.dtype),
                None if factors is None else plgpu.SMEM((stages, parts, max(plan.tokens, _ALIGNED)), jnp.float32),
                products.smem(warpgroups, plan.tokens, TILE_ROWS, dtype=out_dtype) if rounds else None,
                plgpu.Barrier(num_arrivals=num_copies, num_barriers=stages),
                plgpu.ClusterBarrier(collective_axes=("cluster",), num_arrivals=warpgroups, num_barriers=stages)
                if plan.cluster > 1
                else plgpu.Barrier(num_arrivals=warpgroups, num_barriers=stages),
            ),
            grid=(plan.cores,),
            grid_names=("core",),
            cluster=(plan.cluster,),
            cluster_names=("cluster",),
            num_threads=warpgroups,
            thread_name="warpgroup",
            kernel_name="quantized_matmul",
            compiler_params=plgpu.CompilerParams(
                approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Warpgroup
            ),
            interpret=plgpu.InterpretGPUParams(detect_races=True) if self.interpret else None,
        )
        out: jax.Array = kernel(x, factors, numbers, scale, zero, constant)
        return out
