"""Prefill on NVIDIA GPUs by Mosaic GPU: a work list of tiles of queries over paged keys and values.

The rows of a tile are the query heads of one KV head, for some tokens of one sequence. Two warpgroups compute
attention, half a tile each (or a single one, if heads are large), and share the blocks of keys and values that another
warpgroup copies. Queries are packed before, so that a tile is one copy. A copy must begin at a multiple of eight rows,
so each sequence begins at such a multiple.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.paged_attention.arguments import Rows
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
    set_register_budget,
    softmax_weights,
    start_softmax,
)


class _QueryTiles(NamedTuple):
    """The padded work list, and the indices between tokens and packed rows.

    Each tile has its `row` of the batch, the `start` and number (`rows`, 0 in padding) of its packed queries, and the
    `position` of its first token. `source` is the query of each packed row. `packed`, `tile` and `tile_row` say where
    each token's first head is.
    """

    row: Int[Array, " tiles"]
    start: Int[Array, " tiles"]
    rows: Int[Array, " tiles"]
    position: Int[Array, " tiles"]
    source: Int[Array, " packed_rows"]
    packed: Int[Array, " tokens"]
    tile: Int[Array, " tokens"]
    tile_row: Int[Array, " tokens"]


def prefill(
    q: Float[Array, "tokens heads head_dim"],
    kv: PagedKV,
    layer: int | Int[Array, ""],
    rows: Rows,
    sinks: Float[Array, " heads"] | None,
    attention: MosaicGpuAttention,
) -> Float[Array, "tokens heads head_dim"]:
    """Return the output of the tokens of rows `[num_decodes, num_seqs)`; the output of others is unspecified."""
    tokens, _, head_dim = q.shape
    kv_heads, group = attention.kv_heads, attention.group
    tile_rows = attention.warpgroups * TILE_ROWS
    padding = 0 if _tokens_a_tile(group, tile_rows) else -group % PIECE
    attention = dataclasses.replace(attention, group=group + padding)
    tiles = _tiles(tokens, group + padding, tile_rows, rows)
    by_head = q.reshape(tokens, kv_heads, group, head_dim).swapaxes(0, 1)
    by_head = jnp.pad(by_head, ((0, 0), (0, 0), (0, padding), (0, 0))).reshape(kv_heads, -1, head_dim)
    queries = by_head.at[:, tiles.source].get(mode="promise_in_bounds")
    out, lse = _attend_tiles(queries, tiles, kv, layer, rows, attention, with_lse=sinks is not None)
    lanes = jnp.arange(group, dtype=jnp.int32)
    out = out.at[:, tiles.packed[:, None] + lanes].get(mode="promise_in_bounds")
    if sinks is not None:
        total = lse.at[:, tiles.tile[:, None], tiles.tile_row[:, None] + lanes].get(mode="promise_in_bounds")
        sink = sinks.reshape(kv_heads, 1, group) * LOG2E
        out = out / (1.0 + jnp.exp2(sink - total))[..., None]
    return out.swapaxes(0, 1).reshape(q.shape).astype(q.dtype)


def _tokens_a_tile(group: int, tile_rows: int) -> int:
    """Return the most tokens that fit and let tiles begin at multiples of eight rows; 0 if no number does."""
    step = PIECE // math.gcd(group, PIECE)
    return tile_rows // group // step * step


def _tiles(tokens: int, group: int, tile_rows: int, rows: Rows) -> _QueryTiles:
    per_tile = _tokens_a_tile(group, tile_rows)
    query_starts, kv_lens = rows.query_starts, rows.kv_lens
    num_rows = kv_lens.shape[0]
    row_ids = jnp.arange(num_rows, dtype=jnp.int32)
    query_lens = query_starts[1:] - query_starts[:-1]
    query_lens = jnp.where((row_ids >= rows.num_decodes) & (row_ids < rows.num_seqs), query_lens, 0)
    packed_lens = ceil_div(query_lens * group, PIECE) * PIECE
    packed_ends = jnp.cumsum(packed_lens, dtype=jnp.int32)
    packed_starts = packed_ends - packed_lens
    tile_counts = ceil_div(query_lens, per_tile)
    tile_ends = jnp.cumsum(tile_counts, dtype=jnp.int32)
    tile_starts = tile_ends - tile_counts

    def row_of(ends: Array, at: Array) -> Array:
        row = jnp.searchsorted(ends, at, side="right", method="compare_all").astype(jnp.int32)
        return jnp.minimum(row, num_rows - 1)

    most_rows = min(num_rows, tokens)
    # The last tiles of a sequence have most to read, so they start first: tiles are counted from the end.
    index = jnp.arange(-(-tokens // per_tile) + most_rows, dtype=jnp.int32)
    index = tile_ends[-1] - 1 - index
    live = index >= 0
    index = jnp.maximum(index, 0)
    row = row_of(tile_ends, index)
    offset = (index - tile_starts[row]) * per_tile
    packed_rows = -(-tokens * group // PIECE) * PIECE + most_rows * PIECE + tile_rows
    at = jnp.arange(packed_rows, dtype=jnp.int32)
    source_row = row_of(packed_ends, at)
    source = query_starts[source_row] * group + at - packed_starts[source_row]
    token = jnp.arange(tokens, dtype=jnp.int32)
    token_row = row_of(query_starts[1:], token)
    within = jnp.clip(token - query_starts[token_row], 0, jnp.maximum(query_lens[token_row] - 1, 0))
    return _QueryTiles(
        row=row,
        start=packed_starts[row] + offset * group,
        rows=jnp.where(live, jnp.minimum(query_lens[row] - offset, per_tile) * group, 0),
        position=kv_lens[row] - query_lens[row] + offset,
        source=jnp.minimum(source, tokens * group - 1),
        packed=packed_starts[token_row] + within * group,
        tile=jnp.clip(tile_ends[-1] - 1 - tile_starts[token_row] - within // per_tile, 0, live.shape[0] - 1),
        tile_row=within % per_tile * group,
    )


def _attend_tiles(
    q: Float[Array, "kv_heads packed_rows head_dim"],
    tiles: _QueryTiles,
    kv: PagedKV,
    layer: int | Int[Array, ""],
    of_rows: Rows,
    attention: MosaicGpuAttention,
    *,
    with_lse: bool,
) -> tuple[Float[Array, "kv_heads packed_rows head_dim"], Any]:
    """Return the output, packed as the queries are, and log-sum-exps (to base 2) `[kv_heads, tiles, tile_rows]`."""
    kv_heads, _, head_dim = q.shape
    block, group, window = attention.block, attention.group, attention.window
    warpgroups = attention.warpgroups
    tile_rows = warpgroups * TILE_ROWS
    per_tile = _tokens_a_tile(group, tile_rows)
    num_tiles = tiles.row.shape[0]
    # With one loop instead of two, the sums of large heads stay in registers.
    mask_all = window is not None or warpgroups == 1

    def body(*refs: Any) -> None:
        row_ref, start_ref, rows_ref, position_ref = refs[:4]
        lens_ref, layer_ref, table_ref, q_ref, keys_ref, values_ref, scales_ref = refs[4:11]
        out_ref, lse_ref = refs[11:13]
        q_smem, k_ring, v_ring, lse_smem, p_smem, q_arrived, v_clear = refs[13:]
        tile, head, warpgroup = (lax.axis_index(name) for name in ("tile", "head", "warpgroup"))
        row, rows, first_query = row_ref[tile], rows_ref[tile], position_ref[tile]
        length = lens_ref[row]
        live = rows > 0
        end = jnp.minimum(length, first_query + per_tile)
        high = ceil_div(end, block)
        first_seen = jnp.int32(0) if window is None else jnp.maximum(first_query - (window - 1), 0)
        low = lax.div(first_seen, jnp.int32(block))

        @pl.when(live & (warpgroup < warpgroups))
        def _attend() -> None:
            set_register_budget(attention, attends=True)
            first_row = warpgroup * TILE_ROWS
            start_row = pl.multiple_of(start_ref[tile] + first_row, PIECE)
            q_tile = q_smem.at[warpgroup]
            plgpu.copy_gmem_to_smem(q_ref.at[head, pl.ds(start_row, TILE_ROWS)], q_tile, q_arrived.at[warpgroup])
            plgpu.barrier_wait(q_arrived.at[warpgroup])
            key_scale = scale_of(scales_ref, 0, head)

            def step(i: jax.Array, state: Any, masked: bool) -> Any:
                slot, start = attention.slot(i - low), i * block
                clears = masked and not attention.converts
                if clears:
                    # This waits before the logits are computed, as they leave few registers.
                    plgpu.barrier_wait(v_ring.arrived.at[slot])

                    @pl.when((start + block > length) | (start < first_seen))
                    def _() -> None:
                        @pl.when(warpgroup == 0)
                        def _() -> None:
                            clear_outside(v_ring.blocks.at[slot], start, first_seen, length)

                        plgpu.barrier_arrive(v_clear)
                        plgpu.barrier_wait(v_clear)

                plgpu.barrier_wait(k_ring.arrived.at[slot])
                z = logits_base_2(attention, query_key_products(q_tile, k_ring.blocks.at[slot]), key_scale)
                plgpu.barrier_arrive(k_ring.free.at[slot])
                if masked:
                    tile_row = plgpu.broadcasted_iota(jnp.int32, z.shape, 0, layout=TILE) + first_row
                    query = _divide(tile_row, group) + first_query
                    position = plgpu.broadcasted_iota(jnp.int32, z.shape, 1, layout=TILE) + start
                    seen = position <= query
                    if window is not None:
                        seen = seen & (position > query - window)
                    z = jnp.where(seen, z, MASKED)
                weights, out, peak, total = softmax_weights(z, *state)
                weights = weights.astype(q.dtype)
                if attention.p_smem:
                    p_smem[warpgroup] = weights
                    plgpu.commit_smem()
                    weights = p_smem.at[warpgroup]
                if not clears:
                    plgpu.barrier_wait(v_ring.arrived.at[slot])
                out = add_values(attention, out, weights, v_ring.blocks.at[slot])
                plgpu.barrier_arrive(v_ring.free.at[slot])
                return out, peak, total

            # Blocks that all queries of the tile see in full need no mask; with a window there are few of these.
            full = low if mask_all else jnp.minimum(lax.div(first_query + 1, jnp.int32(block)), high)
            state = start_softmax(head_dim)
            if not mask_all:
                state = lax.fori_loop(low, full, lambda i, state: step(i, state, masked=False), state)
            state = lax.fori_loop(full, high, lambda i, state: step(i, state, masked=True), state)
            out, lse = normalize(scale_of(scales_ref, 1, head), *state)
            q_tile[...] = out.astype(q.dtype)
            if with_lse:
                lse_smem[warpgroup] = lse
            plgpu.commit_smem()
            if with_lse:
                plgpu.copy_smem_to_gmem(lse_smem.at[warpgroup], lse_ref.at[head, tile, pl.ds(first_row, TILE_ROWS)])
            whole = rows - first_row >= TILE_ROWS

            @pl.when(whole)
            def _() -> None:
                plgpu.copy_smem_to_gmem(q_tile, out_ref.at[head, pl.ds(start_row, TILE_ROWS)])

            @pl.when(jnp.logical_not(whole))
            def _() -> None:
                # The following rows belong to the next sequence, or to the next tile of this one.
                for piece in range(0, TILE_ROWS, PIECE):

                    @pl.when(first_row + piece < rows)
                    def _(piece: int = piece) -> None:
                        at = pl.multiple_of(start_row + piece, PIECE)
                        plgpu.copy_smem_to_gmem(q_tile.at[pl.ds(piece, PIECE)], out_ref.at[head, pl.ds(at, PIECE)])

            plgpu.wait_smem_to_gmem(0)

        @pl.when(live & (warpgroup == warpgroups))
        def _load() -> None:
            first_entry = layer_ref[0] * kv.num_pages
            last_page = lax.div(length - 1, jnp.int32(attention.page_size))

            def entry(page: jax.Array) -> jax.Array:
                return first_entry + table_ref[row, jnp.minimum(page, last_page)]

            rings = (keys_ref, k_ring), (values_ref, v_ring)
            if attention.converts:
                convert_rings(attention, rings, head, entry, low, high, (first_seen, length))
            else:
                fill_rings(attention, rings, head, entry, low, high)

    ring = attention.ring(kv.keys.dtype)
    kernel = attention.kernel(
        body,
        "paged_prefill",
        out_type=(
            jax.ShapeDtypeStruct(q.shape, q.dtype),
            jax.ShapeDtypeStruct((kv_heads, num_tiles, tile_rows), jnp.float32),
        ),
        scratch_types=(
            attention.smem(warpgroups, TILE_ROWS, head_dim),
            ring,
            ring,
            plgpu.SMEM((warpgroups, TILE_ROWS), jnp.float32),
            attention.smem(warpgroups, TILE_ROWS if attention.p_smem else PIECE, block),
            plgpu.Barrier(num_barriers=warpgroups),
            plgpu.Barrier(num_arrivals=warpgroups),
        ),
        grid=(num_tiles, kv_heads),
        grid_names=("tile", "head"),
        num_threads=warpgroups + 1,
        thread_name="warpgroup",
    )
    layers = jnp.full((1,), layer, jnp.int32)
    return kernel(
        tiles.row,
        tiles.start,
        tiles.rows,
        tiles.position,
        of_rows.kv_lens,
        layers,
        of_rows.page_table,
        q,
        kv.keys,
        kv.values,
        scales_of(kv, layer),
    )


def _divide(x: jax.Array, by: int) -> jax.Array:
    """Divide row numbers of a tile by the group's size; exact below 2^16 / 16."""
    if by == 1:
        return x
    return lax.shift_right_logical(x * (2**16 // by + 1), jnp.full_like(x, 16))
