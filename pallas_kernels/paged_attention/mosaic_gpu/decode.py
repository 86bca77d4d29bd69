"""Decode on NVIDIA GPUs by Mosaic GPU: one query a row, its keys and values split among programs.

A program takes one KV head of one row: the query heads that share it are the rows of one tensor core tile. One
warpgroup copies pages into a ring of blocks, the other computes attention. If a row is split, a second pass combines
the parts by their log-sum-exps. The split depends on the row's length alone, so its bits don't depend on other rows.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.paged_attention.arguments import DecodeRows
from pallas_kernels.paged_attention.layout import PagedKV
from pallas_kernels.paged_attention.mosaic_gpu.convert import convert_rings
from pallas_kernels.paged_attention.mosaic_gpu.parts import (
    LOG2E,
    MASKED,
    PIECE,
    TILE,
    TILE_ROWS,
    MosaicGpuAttention,
    add_values,
    ceil_div,
    clear_outside,
    fill_rings,
    logits_base_2,
    normalize,
    query_key_products,
    scale_of,
    scales_of,
    softmax_weights,
    start_softmax,
)

MIN_BLOCKS = 4

# Wider parts are copied out in two halves.
_STAGED_COLUMNS = 128

_ATTENDS, _LOADS = 0, 1


def decode(
    q: Float[Array, "rows heads head_dim"],
    kv: PagedKV,
    layer: int | Int[Array, ""],
    page_table: Int[Array, "rows max_pages"],
    decodes: DecodeRows,
    sinks: Float[Array, " heads"] | None,
    attention: MosaicGpuAttention,
    splits: int,
) -> Float[Array, "rows heads head_dim"]:
    """Return the output of the first `num_decodes` rows; the output of other rows is unspecified.

    Row r of `page_table` has the pages of row r of `q`.
    """
    rows, heads, head_dim = q.shape
    kv_heads, group = attention.kv_heads, attention.group
    padded = -(-group // PIECE) * PIECE
    queries = jnp.pad(q.reshape(rows, kv_heads, group, head_dim), ((0, 0), (0, 0), (0, padded - group), (0, 0)))
    lens = jnp.where(jnp.arange(rows, dtype=jnp.int32) < decodes.num_decodes, decodes.kv_lens[:rows], 0)
    out, lse = _parts(queries, kv, layer, page_table, lens, attention, splits)
    out, lse = out[..., :group, :], lse[..., :group]
    if splits > 1:
        first, per, end = _split(lens, splits, attention)
        used = jnp.arange(splits) < ceil_div(end - first, per)[:, None]
        used = used[:, None, :, None]
        peak = jnp.where(used, lse, MASKED).max(axis=2)
        weight = jnp.where(used, jnp.exp2(lse - peak[:, :, None]), 0.0)
        total = weight.sum(axis=2)
        out = jnp.where(used[..., None], out, 0.0) * weight[..., None]
        out = out.sum(axis=2) / total[..., None]
        lse = peak + jnp.log2(total)
    else:
        out, lse = out[:, :, 0], lse[:, :, 0]
    if sinks is not None:
        out = out / (1.0 + jnp.exp2(sinks.reshape(kv_heads, group) * LOG2E - lse))[..., None]
    return out.reshape(rows, heads, head_dim).astype(q.dtype)


def _split(lens: Any, splits: int, attention: MosaicGpuAttention) -> tuple[Any, Any, Any]:
    """Return the first block of a row, the number of blocks of each part, and the end; for one row, or for all rows."""
    end = ceil_div(lens, attention.block)
    first = jnp.zeros_like(end)
    if attention.window is not None:
        first = lax.div(jnp.maximum(lens - attention.window, 0), jnp.int32(attention.block))
    per = jnp.maximum(ceil_div(end - first, splits), MIN_BLOCKS) if splits > 1 else jnp.maximum(end - first, 1)
    return first, per, end


def _parts(
    q: Float[Array, "rows kv_heads group head_dim"],
    kv: PagedKV,
    layer: int | Int[Array, ""],
    page_table: Int[Array, "rows max_pages"],
    lens: Int[Array, " rows"],
    attention: MosaicGpuAttention,
    splits: int,
) -> tuple[Float[Array, "rows kv_heads splits group head_dim"], Float[Array, "rows kv_heads splits tile_rows"]]:
    """Return each part's output and log-sum-exp (to base 2); for parts without blocks, undefined values."""
    rows, kv_heads, group, head_dim = q.shape
    block = attention.block
    # The output of an unsplit row is rounded once, in the shared memory of its queries; parts stay in float32.
    part_type = jnp.float32 if splits > 1 else q.dtype
    columns = head_dim // 2 if splits > 1 and head_dim > _STAGED_COLUMNS else head_dim

    def body(*refs: Any) -> None:
        lens_ref, layer_ref, table_ref, q_ref, keys_ref, values_ref, scales_ref = refs[:7]
        out_ref, lse_ref = refs[7:9]
        q_smem, k_ring, v_ring, out_smem, lse_smem, p_smem, q_arrived = refs[9:]
        row, head, split = (lax.axis_index(name) for name in ("row", "head", "split"))
        length = lens_ref[row]
        first, per, end = _split(length, splits, attention)
        low = first + split.astype(jnp.int32) * per
        high = jnp.minimum(low + per, end)
        window_start = jnp.int32(0) if attention.window is None else length - attention.window

        @pl.when((low < high) & (lax.axis_index("warpgroup") == _ATTENDS))
        def _attend() -> None:
            plgpu.copy_gmem_to_smem(q_ref.at[row, head], q_smem.at[pl.ds(0, group)], q_arrived)
            plgpu.barrier_wait(q_arrived)
            key_scale = scale_of(scales_ref, 0, head)

            def step(i: jax.Array, state: Any) -> Any:
                slot = attention.slot(i - low)
                plgpu.barrier_wait(k_ring.arrived.at[slot])
                z = logits_base_2(attention, query_key_products(q_smem, k_ring.blocks.at[slot]), key_scale)
                plgpu.barrier_arrive(k_ring.free.at[slot])
                start = i * block
                position = plgpu.broadcasted_iota(jnp.int32, z.shape, 1, layout=TILE) + start
                seen = position < length
                if attention.window is not None:
                    seen = seen & (position >= window_start)
                weights, out, peak, total = softmax_weights(jnp.where(seen, z, MASKED), *state)
                weights = weights.astype(q.dtype)
                if attention.p_smem:
                    p_smem[...] = weights
                    plgpu.commit_smem()
                    weights = p_smem
                plgpu.barrier_wait(v_ring.arrived.at[slot])

                if not attention.converts:

                    @pl.when((start + block > length) | (start < window_start))
                    def _() -> None:
                        clear_outside(v_ring.blocks.at[slot], start, window_start, length)

                out = add_values(attention, out, weights, v_ring.blocks.at[slot])
                plgpu.barrier_arrive(v_ring.free.at[slot])
                return out, peak, total

            state = lax.fori_loop(low, high, step, start_softmax(head_dim))
            out, lse = normalize(scale_of(scales_ref, 1, head), *state)
            result = q_smem if splits == 1 else out_smem
            lse_smem[...] = lse
            for column in range(0, head_dim, columns):
                result[...] = out[:, column : column + columns].astype(part_type)
                plgpu.commit_smem()
                target = out_ref.at[row, head, split, :, pl.ds(column, columns)]
                plgpu.copy_smem_to_gmem(result.at[pl.ds(0, group)], target)
                plgpu.wait_smem_to_gmem(0)
            plgpu.copy_smem_to_gmem(lse_smem, lse_ref.at[row, head, split])
            plgpu.wait_smem_to_gmem(0)

        @pl.when((low < high) & (lax.axis_index("warpgroup") == _LOADS))
        def _load() -> None:
            first_entry = layer_ref[0] * kv.num_pages
            last_page = lax.div(length - 1, jnp.int32(attention.page_size))

            def entry(page: jax.Array) -> jax.Array:
                return first_entry + table_ref[row, jnp.minimum(page, last_page)]

            rings = (keys_ref, k_ring), (values_ref, v_ring)
            if attention.converts:
                convert_rings(attention, rings, head, entry, low, high, (window_start, length))
            else:
                fill_rings(attention, rings, head, entry, low, high)

    ring = attention.ring(kv.keys.dtype)
    kernel = attention.kernel(
        body,
        "paged_decode",
        out_type=(
            jax.ShapeDtypeStruct((rows, kv_heads, splits, group, head_dim), part_type),
            jax.ShapeDtypeStruct((rows, kv_heads, splits, TILE_ROWS), jnp.float32),
        ),
        scratch_types=(
            attention.smem(TILE_ROWS, head_dim),
            ring,
            ring,
            attention.smem(TILE_ROWS if splits > 1 else PIECE, columns, dtype=part_type),
            plgpu.SMEM((TILE_ROWS,), jnp.float32),
            attention.smem(TILE_ROWS if attention.p_smem else PIECE, block),
            plgpu.Barrier(),
        ),
        grid=(rows, kv_heads, splits),
        grid_names=("row", "head", "split"),
        num_threads=2,
        thread_name="warpgroup",
    )
    layers = jnp.full((1,), layer, jnp.int32)
    return kernel(lens, layers, page_table, q, kv.keys, kv.values, scales_of(kv, layer))
