"""What the two Mosaic GPU kernels share: the facts of a problem, tiles in shared memory, page loads, a softmax's step.

Also the one place that knows how the kernels are lowered and interpreted, so that what moves between versions of jax
moves here: 0.11.2 and 0.12 need nothing different.
"""

from __future__ import annotations

import dataclasses
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

# jax's annotations hide the one and take the others for abstract.
_Accumulator: Any = plgpu.WGMMAAccumulatorRef
_TilingTransform: Any = plgpu.TilingTransform
_SwizzleTransform: Any = plgpu.SwizzleTransform

MASKED = -1e30
LOG2E = math.log2(math.e)

TILE = plgpu.Layout.WGMMA
ROWS = plgpu.Layout.WGMMA.reduce(1)

# Rows of one tensor core instruction, and of the smallest piece that the layouts of shared memory can be cut into.
TILE_ROWS = 64
PIECE = 8

# Registers of one thread of each warpgroup together, and those of a thread that only starts copies, or converts too.
_REGISTERS, _REGISTER_STEP = 512, 8
_LOADER_REGISTERS, _CONVERTER_REGISTERS = 40, 96

# Wider heads leave a warpgroup no registers for the weights beside the sums, nor shared memory for many blocks.
WIDE = 128


class Ring(NamedTuple):
    """Blocks of keys, or of values, on their way: those that the tensor cores read, `[slots, block, head_dim]`, and
    barriers of blocks that arrived there and of slots that are free again.

    Of a pool of fp8 also blocks as they are `stored`, `[stages, block, head_dim]`, and barriers of those copied.
    """

    blocks: Any
    arrived: Any
    free: Any
    stored: Any = None
    copied: Any = None


@dataclasses.dataclass(frozen=True)
class Attention:
    """Static facts of a call. `block` tokens of a row are read at a time, `stages` blocks are under way,
    `warpgroups` attend. `converts` says that the pool holds fp8, of which the warpgroup that loads makes bfloat16.

    `p_smem` says that the weights of the values go through shared memory: a GPU can take them from registers, the
    interpreter can't.
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
        """Copies that bring a block: one a page, or one where a page is as large as a block or larger."""
        return max(1, self.block // self.page_size)

    @property
    def slots(self) -> int:
        """Blocks that the tensor cores may find: all that were copied, or those that were converted."""
        return converted_slots(self.head_dim) if self.converts else self.stages

    def slot(self, count: jax.Array) -> jax.Array:
        """Where the tensor cores find a block, of which `count` came before."""
        return lax.rem(count, jnp.int32(self.slots))

    def smem(self, *shape: int, dtype: Any = jnp.bfloat16) -> Any:
        """Shared memory for an operand of the tensor cores; one swizzle for all, as they want it."""
        swizzle = plgpu.find_swizzle(self.head_dim * 16)
        tiling = _TilingTransform((PIECE, swizzle // jnp.dtype(dtype).itemsize))
        return plgpu.SMEM(shape, dtype, transforms=(tiling, _SwizzleTransform(swizzle)))

    def ring(self, kv_dtype: Any) -> Ring:
        """The scratch types of a ring."""
        copied = plgpu.Barrier(num_arrivals=self.copies, num_barriers=self.stages)
        blocks = self.smem(self.slots, self.block, self.head_dim)
        free = plgpu.Barrier(num_arrivals=self.warpgroups, num_barriers=self.slots)
        if not self.converts:
            return Ring(blocks, copied, free)
        stored = plgpu.SMEM((self.stages, self.block, self.head_dim), kv_dtype)
        return Ring(blocks, plgpu.Barrier(num_barriers=self.slots), free, stored, copied)

    def kernel(self, body: Callable[..., None], name: str, **options: Any) -> Callable[..., Any]:
        """The kernel of a body; lowered for whole warpgroups, which is where Mosaic GPU is going."""
        parameters = plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Warpgroup)
        interpret = plgpu.InterpretGPUParams(detect_races=True) if self.interpret else None
        return plgpu.kernel(body, compiler_params=parameters, interpret=interpret, kernel_name=name, **options)


def converted_slots(head_dim: int) -> int:
    """Of a pool of fp8, blocks of bfloat16 that shared memory holds."""
    return 2 if head_dim <= WIDE else 1


def ceil_div(x: jax.Array, y: int | jax.Array) -> jax.Array:
    """Of what is never negative."""
    y = jnp.asarray(y, jnp.int32)
    return lax.div(x + y - 1, y)


def load_block(
    attention: Attention,
    pool: Any,
    head: jax.Array,
    entry: Callable[[jax.Array], jax.Array],
    block: jax.Array,
    to: Any,
    arrived: Any,
) -> None:
    """Start the copies of block number `block` of a row; `entry` gives the pool's entry of the row's n-th page."""
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


def share_registers(attention: Attention, *, attends: bool) -> None:
    """Several warpgroups that attend take what the one that loads can spare; one alone has all that it can have."""
    if attention.warpgroups == 1:
        return
    loader = _CONVERTER_REGISTERS if attention.converts else _LOADER_REGISTERS
    if attends:
        left = (_REGISTERS - loader) // attention.warpgroups
        plgpu.set_max_registers(left // _REGISTER_STEP * _REGISTER_STEP, action="increase")
    else:
        plgpu.set_max_registers(loader, action="decrease")


def fill_rings(
    attention: Attention,
    rings: Sequence[tuple[Any, Ring]],
    head: jax.Array,
    entry: Callable[[jax.Array], jax.Array],
    low: jax.Array,
    high: jax.Array,
) -> None:
    """What the warpgroup that loads does: blocks `low` to `high` of each pool into its ring, as slots become free.

    Ends when the last blocks were read.
    """
    share_registers(attention, attends=False)
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


def drain_rings(attention: Attention, rings: Sequence[tuple[Any, Ring]], low: jax.Array, high: jax.Array) -> None:
    """Wait until the last blocks were read."""

    def drain(i: jax.Array, carry: tuple[()]) -> tuple[()]:
        for _, ring in rings:
            plgpu.barrier_wait(ring.free.at[attention.slot(i - low)])
        return carry

    lax.fori_loop(jnp.maximum(low, high - attention.slots), high, drain, ())


def clear_outside(values: Any, start: jax.Array, low: jax.Array | int, high: jax.Array) -> None:
    """Zero the rows of a block in shared memory whose positions lie outside `[low, high)`: they may hold NaN."""
    rows, columns = values.shape
    for first in range(0, rows, TILE_ROWS):
        part = values.at[pl.ds(first, TILE_ROWS)]
        position = plgpu.broadcasted_iota(jnp.int32, (TILE_ROWS, columns), 0, layout=TILE) + (start + first)
        part[...] = jnp.where((position >= low) & (position < high), part[...], jnp.zeros((), part.dtype))
    plgpu.commit_smem()


def start_softmax(head_dim: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Unnormalized output, largest logit (times log2 e) and sum of exponentials of the rows of a tile."""
    out = plgpu.layout_cast(jnp.zeros((TILE_ROWS, head_dim), jnp.float32), TILE)
    peak = plgpu.layout_cast(jnp.full((TILE_ROWS,), MASKED, jnp.float32), ROWS)
    total = plgpu.layout_cast(jnp.zeros((TILE_ROWS,), jnp.float32), ROWS)
    return out, peak, total


def products(queries: Any, keys: Any) -> jax.Array:
    """Queries times keys, `[64, block]`."""

    def multiply(acc: Any) -> jax.Array:
        plgpu.wgmma(acc, queries, keys.transpose((1, 0)))
        return acc[...]

    return pl.run_scoped(multiply, _Accumulator((TILE_ROWS, keys.shape[0]), jnp.float32))


def scales_of(kv: PagedKV, layer: int | jax.Array) -> Float[jax.Array, "2 kv_heads"] | None:
    """The factors of a layer's stored keys and values, where the pool has some."""
    return None if kv.scales is None else kv.scales[:, layer]


def scale_of(scales: Any, which: int, head: jax.Array) -> jax.Array | None:
    """The factor of a head's stored keys (0) or values (1), inside a kernel."""
    return None if scales is None else scales[which, head]


def logits_base_2(attention: Attention, z: jax.Array, key_scale: jax.Array | None) -> jax.Array:
    """Scaled and capped, times log2 e. The hyperbolic tangent by an exponential: the approximate one is too coarse."""
    scale: Any = attention.scale if key_scale is None else key_scale * attention.scale
    if attention.soft_cap is None:
        return z * (scale * LOG2E)
    e = jnp.exp2(z * (2 * scale * LOG2E / attention.soft_cap))
    return (1.0 - 2.0 / (e + 1.0)) * (attention.soft_cap * LOG2E)


def weigh(
    z: jax.Array, out: jax.Array, peak: jax.Array, total: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """A block's weights, and the running softmax rescaled to its new peak (Milakov, Gimelshein 2018)."""
    new_peak = jnp.maximum(peak, z.max(axis=1))
    keep = jnp.exp2(peak - new_peak)
    weights = jnp.exp2(z - lax.broadcast_in_dim(new_peak, z.shape, [0]))
    out = out * lax.broadcast_in_dim(keep, out.shape, [0])
    return weights, out, new_peak, total * keep + weights.sum(axis=1)


def add_values(attention: Attention, out: jax.Array, weights: Any, values: Any) -> jax.Array:
    """`out` plus weights times values; the weights from registers or from shared memory."""
    if not attention.interpret:
        return pl.run_state(lambda acc: plgpu.wgmma(acc, weights, values))(_Accumulator.init(out))

    def multiply(acc: Any) -> jax.Array:
        plgpu.wgmma(acc, weights, values)
        return acc[...]

    # The interpreter knows no accumulator that begins with something.
    return out + pl.run_scoped(multiply, _Accumulator(out.shape, jnp.float32))


def normalize(
    value_scale: jax.Array | None, out: jax.Array, peak: jax.Array, total: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The output, and the logarithm to base 2 of the sum of exponentials. Rows that saw nothing give zeros."""
    safe = jnp.where(total == 0.0, 1.0, total)
    out = out / lax.broadcast_in_dim(safe, out.shape, [0])
    return out if value_scale is None else out * value_scale, peak + jnp.log(safe) * LOG2E
