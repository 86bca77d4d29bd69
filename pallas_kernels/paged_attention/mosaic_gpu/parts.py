"""The parts that both Mosaic GPU kernels share: static facts, tiles in shared memory, page loads, the softmax's step.

It is also the only place with options of lowering and interpretation, so that differences between versions of jax are
handled here; 0.11.2 and 0.12 don't differ.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Float

from pallas_kernels.paged_attention.layout import PagedKV

# jax's annotations hide the first and declare the others abstract.
_Accumulator: Any = plgpu.WGMMAAccumulatorRef
_TilingTransform: Any = plgpu.TilingTransform
_SwizzleTransform: Any = plgpu.SwizzleTransform

MASKED = -1e30
LOG2E = math.log2(math.e)

TILE = plgpu.Layout.WGMMA
ROWS = plgpu.Layout.WGMMA.reduce(1)

# Rows of one tensor core instruction, and of the smallest slice that the layouts of shared memory allow.
TILE_ROWS = 64
PIECE = 8

# Registers of a thread, summed over the warpgroups, and those of a thread that only starts copies, or also converts.
_REGISTERS, _REGISTER_STEP = 512, 8
_LOADER_REGISTERS, _CONVERTER_REGISTERS = 40, 96

# With wider heads, a warpgroup has no registers for weights besides the sums, and no shared memory for many blocks.
WIDE = 128
_CLEARED_COLUMNS = 64


class Ring(NamedTuple):
    """A ring buffer of blocks of keys, or of values, in shared memory.

    `blocks`, `[slots, block, head_dim]`, are read by the tensor cores. The barriers `arrived` and `free` say that a
    slot was filled, or read. For a pool of fp8, `stored`, `[stages, block, head_dim]`, has unconverted blocks, and
    `copied` their barriers.
    """

    blocks: Any
    arrived: Any
    free: Any
    stored: Any = None
    copied: Any = None


@dataclasses.dataclass(frozen=True)
class MosaicGpuAttention:
    """The static facts of a call. `block` tokens of a row are read at a time, `stages` blocks are in flight, and
    `warpgroups` compute attention.

    With `converts`, the pool holds fp8 and the loading warpgroup converts it to bfloat16. With `p_smem`, the softmax
    weights go through shared memory: a GPU can multiply them from registers, the interpreter can't.
    """

    kv_heads: int
    group: int
    head_dim: int
    page_size: int
    scale: float
    window: int | None
    soft_cap: float | None
    block: int
    stages: int
    warpgroups: int
    p_smem: bool
    converts: bool
    interpret: bool

    @property
    def copies(self) -> int:
        """Copies of a block: one a page, or a single one if a page is as large as a block or larger."""
        return max(1, self.block // self.page_size)

    @property
    def slots(self) -> int:
        """Slots of blocks that the tensor cores read: of all stages, or of converted blocks."""
        return converted_slots(self.head_dim) if self.converts else self.stages

    def slot(self, count: jax.Array) -> jax.Array:
        """Return the slot of the block that comes after `count` others."""
        return lax.rem(count, jnp.int32(self.slots))

    def smem(self, *shape: int, dtype: Any = jnp.bfloat16) -> Any:
        """Return shared memory for an operand of the tensor cores, which need the same swizzle for all operands."""
        swizzle = plgpu.find_swizzle(self.head_dim * 16)
        tiling = _TilingTransform((PIECE, swizzle // jnp.dtype(dtype).itemsize))
        return plgpu.SMEM(shape, dtype, transforms=(tiling, _SwizzleTransform(swizzle)))

    def ring(self, kv_dtype: Any) -> Ring:
        """Return the scratch types of a ring."""
        copied = plgpu.Barrier(num_arrivals=self.copies, num_barriers=self.stages)
        blocks = self.smem(self.slots, self.block, self.head_dim)
        free = plgpu.Barrier(num_arrivals=self.warpgroups, num_barriers=self.slots)
        if not self.converts:
            return Ring(blocks, copied, free)
        stored = plgpu.SMEM((self.stages, self.block, self.head_dim), kv_dtype)
        return Ring(blocks, plgpu.Barrier(num_barriers=self.slots), free, stored, copied)

    def kernel(self, body: Callable[..., None], name: str, **options: Any) -> Callable[..., Any]:
        """Return the kernel of a body, with warpgroup semantics, which Mosaic GPU is moving to."""
        parameters = plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Warpgroup)
        interpret = plgpu.InterpretGPUParams(detect_races=True) if self.interpret else None
        return plgpu.kernel(body, compiler_params=parameters, interpret=interpret, kernel_name=name, **options)


def converted_slots(head_dim: int) -> int:
    """Return how many converted blocks shared memory holds for a pool of fp8."""
    return 2 if head_dim <= WIDE else 1


def ceil_div(x: jax.Array, y: int | jax.Array) -> jax.Array:
    """Divide nonnegative integers, rounding up."""
    y = jnp.asarray(y, jnp.int32)
    return lax.div(x + y - 1, y)


def load_block(
    attention: MosaicGpuAttention,
    pool: Any,
    head: jax.Array,
    entry: Callable[[jax.Array], jax.Array],
    block: jax.Array,
    to: Any,
    arrived: Any,
) -> None:
    """Start the copies of block number `block` of a row; `entry(n)` returns the pool's entry of the row's n-th page."""
    size = min(attention.page_size, attention.block)
    for i in range(attention.copies):
        if attention.page_size > attention.block:
            start = block * attention.block
            page = lax.div(start, jnp.int32(attention.page_size))
            offset = pl.multiple_of(lax.rem(start, jnp.int32(attention.page_size)), attention.block)
            source = pool.at[head, entry(page), pl.ds(offset, size)]
        else:
            source = pool.at[head, entry(block * attention.copies + i)]
        plgpu.copy_gmem_to_smem(source, to.at[pl.ds(i * size, size)], arrived)


def set_register_budget(attention: MosaicGpuAttention, *, attends: bool) -> None:
    """Move registers from the loading warpgroup to the attending ones; a single attending one has the most already."""
    if attention.warpgroups == 1:
        return
    loader = _CONVERTER_REGISTERS if attention.converts else _LOADER_REGISTERS
    if attends:
        left = (_REGISTERS - loader) // attention.warpgroups
        plgpu.set_max_registers(left // _REGISTER_STEP * _REGISTER_STEP, action="increase")
    else:
        plgpu.set_max_registers(loader, action="decrease")


def fill_rings(
    attention: MosaicGpuAttention,
    rings: Sequence[tuple[Any, Ring]],
    head: jax.Array,
    entry: Callable[[jax.Array], jax.Array],
    low: jax.Array,
    high: jax.Array,
) -> None:
    """Copy blocks `low` to `high` of each pool into its ring, as slots become free: the loading warpgroup's part.

    Returns when the last blocks were read.
    """
    set_register_budget(attention, attends=False)
    stages = attention.stages

    def load(i: jax.Array, carry: tuple[()]) -> tuple[()]:
        slot = lax.rem(i - low, jnp.int32(stages))
        for pool, ring in rings:

            @pl.when(i - low >= stages)
            def _(ring: Ring = ring) -> None:
                plgpu.barrier_wait(ring.free.at[slot])

            load_block(attention, pool, head, entry, i, ring.blocks.at[slot], ring.arrived.at[slot])
        return carry

    lax.fori_loop(low, high, load, ())
    drain_rings(attention, rings, low, high)


def drain_rings(
    attention: MosaicGpuAttention, rings: Sequence[tuple[Any, Ring]], low: jax.Array, high: jax.Array
) -> None:
    """Wait until the last blocks were read."""

    def drain(i: jax.Array, carry: tuple[()]) -> tuple[()]:
        for _, ring in rings:
            plgpu.barrier_wait(ring.free.at[attention.slot(i - low)])
        return carry

    lax.fori_loop(jnp.maximum(low, high - attention.slots), high, drain, ())


def clear_outside(values: Any, start: jax.Array, low: jax.Array | int, high: jax.Array) -> None:
    """Zero the rows of a block in shared memory whose positions lie outside `[low, high)`: they may hold NaN."""
    rows, columns = values.shape
    # Wide heads are cleared a part at a time, as the sums leave few registers.
    width = math.gcd(columns, _CLEARED_COLUMNS) if columns > WIDE else columns
    for first, column in itertools.product(range(0, rows, TILE_ROWS), range(0, columns, width)):
        part = values.at[pl.ds(first, TILE_ROWS), pl.ds(column, width)]
        position = plgpu.broadcasted_iota(jnp.int32, (TILE_ROWS, width), 0, layout=TILE) + (start + first)
        part[...] = jnp.where((position >= low) & (position < high), part[...], jnp.zeros((), part.dtype))
    plgpu.commit_smem()


def start_softmax(head_dim: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return a softmax over no tokens: unnormalized output, largest logit (times log2 e) and sum of exponentials."""
    out = plgpu.layout_cast(jnp.zeros((TILE_ROWS, head_dim), jnp.float32), TILE)
    peak = plgpu.layout_cast(jnp.full((TILE_ROWS,), MASKED, jnp.float32), ROWS)
    total = plgpu.layout_cast(jnp.zeros((TILE_ROWS,), jnp.float32), ROWS)
    return out, peak, total


def query_key_products(queries: Any, keys: Any) -> jax.Array:
    """Multiply queries by keys, `[64, block]`."""

    def multiply(acc: Any) -> jax.Array:
        plgpu.wgmma(acc, queries, keys.transpose((1, 0)))
        return acc[...]

    return pl.run_scoped(multiply, _Accumulator((TILE_ROWS, keys.shape[0]), jnp.float32))


def scales_of(kv: PagedKV, layer: int | jax.Array) -> Float[jax.Array, "2 kv_heads"] | None:
    """Return the factors of a layer's stored keys and values, or None if the pool has none."""
    return None if kv.scales is None else kv.scales[:, layer]


def scale_of(scales: Any, which: int, head: jax.Array) -> jax.Array | None:
    """Return, inside a kernel, the factor of a head's stored keys (0) or values (1)."""
    return None if scales is None else scales[which, head]


def logits_base_2(attention: MosaicGpuAttention, z: jax.Array, key_scale: jax.Array | None) -> jax.Array:
    """Scale and cap products, times log2 e. tanh is computed by an exponential: the approximate tanh is too coarse."""
    scale: Any = attention.scale if key_scale is None else key_scale * attention.scale
    if attention.soft_cap is None:
        return z * (scale * LOG2E)
    e = jnp.exp2(z * (2 * scale * LOG2E / attention.soft_cap))
    return (1.0 - 2.0 / (e + 1.0)) * (attention.soft_cap * LOG2E)


def softmax_weights(
    z: jax.Array, out: jax.Array, peak: jax.Array, total: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Return a block's weights, and the running softmax rescaled to the new peak (Milakov, Gimelshein 2018)."""
    new_peak = jnp.maximum(peak, z.max(axis=1))
    keep = jnp.exp2(peak - new_peak)
    weights = jnp.exp2(z - lax.broadcast_in_dim(new_peak, z.shape, [0]))
    out = out * lax.broadcast_in_dim(keep, out.shape, [0])
    return weights, out, new_peak, total * keep + weights.sum(axis=1)


def add_values(attention: MosaicGpuAttention, out: jax.Array, weights: Any, values: Any) -> jax.Array:
    """Return `out` plus weights times values; the weights are in registers or in shared memory."""
    if not attention.interpret:
        return pl.run_state(lambda acc: plgpu.wgmma(acc, weights, values))(_Accumulator.init(out))

    def multiply(acc: Any) -> jax.Array:
        plgpu.wgmma(acc, weights, values)
        return acc[...]

    # The interpreter has no accumulator with an initial value.
    return out + pl.run_scoped(multiply, _Accumulator(out.shape, jnp.float32))


def normalize(
    value_scale: jax.Array | None, out: jax.Array, peak: jax.Array, total: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return the output and the log-sum-exp to base 2. Rows that saw no token become zeros."""
    safe = jnp.where(total == 0.0, 1.0, total)
    out = out / lax.broadcast_in_dim(safe, out.shape, [0])
    return out if value_scale is None else out * value_scale, peak + jnp.log(safe) * LOG2E
