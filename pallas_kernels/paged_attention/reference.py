"""The XLA backend: the contract that every kernel is tested against, and the fallback if no kernel fits.

Decode and prefill both loop over blocks of pages with a running softmax, as far as the longest live context of their
rows: decodes take a group of rows at a time, prefill chunks a tile of queries. Pages with which all decodes begin are
read once for all of them, and each row continues from that running softmax (cascade attention, as in Ye et al. 2024).
Sums are float32. Decodes multiply their own pages in float32 too, as they are bound by memory; all other products are
in the type of the queries. Rows and heads are merged into one outermost dimension, because XLA divides that dimension
among its threads, and three heads alone would be divided unevenly.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.dispatch import Backend
from pallas_kernels.paged_attention.arguments import AttentionOptions, Rows
from pallas_kernels.paged_attention.layout import PagedKV
from pallas_kernels.paged_attention.write import write_kv

DECODE_ROWS = 16
DECODE_BLOCK = 64
FEW_ROWS = 8
SHARED_BLOCK = 256
QUERY_TILE = 128
PREFILL_BLOCK = 128
_MASKED = -1e30


class _LayerOptions(NamedTuple):
    scale: float
    window: int | None
    soft_cap: float | None
    sinks: Float[Array, "kv_heads group"] | None
    kv_scales: Float[Array, "2 kv_heads"] | None


class _RunningSoftmax(NamedTuple):
    """A softmax in progress: unnormalized output, largest logit, sum of exponentials."""

    out: Float[Array, "... head_dim"]
    peak: Float[Array, "..."]
    total: Float[Array, "..."]


def paged_attention(
    q: Float[Array, "tokens heads head_dim"],
    k: Float[Array, "tokens kv_heads head_dim"] | None,
    v: Float[Array, "tokens kv_heads head_dim"] | None,
    kv: PagedKV,
    layer: int | Int[Array, ""],
    rows: Rows,
    options: AttentionOptions,
    backend: Backend,
) -> tuple[Float[Array, "tokens heads value_dim"], PagedKV]:
    """Compute `api.paged_attention`, in the same way on every target."""
    tokens, heads, head_dim = q.shape
    kv_heads = kv.num_kv_heads
    group = heads // kv_heads
    if k is not None:
        kv = write_kv(k, v, kv, layer, rows)
    sinks = None if options.sinks is None else options.sinks.reshape(kv_heads, group)
    kv_scales = None if kv.scales is None else kv.scales[:, layer]
    facts = _LayerOptions(options.scale, options.window, options.soft_cap, sinks, kv_scales)
    table = _entries(rows.page_table, kv, layer)
    queries = q.reshape(tokens, kv_heads, group, head_dim)
    if rows.chunks_only:
        out = jnp.zeros((tokens + QUERY_TILE, kv_heads, group, kv.value_dim or head_dim), jnp.float32)
        out = _prefill(queries, out, kv, table, rows, facts)
        return out[:tokens].reshape(tokens, heads, -1).astype(q.dtype), kv
    most = min(tokens, table.shape[0])
    lens = jnp.where(jnp.arange(most) < rows.num_decodes, rows.kv_lens[:most], 0)
    shared = jnp.zeros((), jnp.int32)
    if most > 1 and options.window is None:  # of the page table without the layer's offset: XLA computes it once
        shared = _shared_pages(rows.page_table[:most], lens, kv.page_size)
    decoded = _decode(queries[:most], kv, table[:most], lens, shared, rows.num_decodes, facts)
    width = decoded.shape[-1]
    if rows.decode_only:
        return decoded.reshape(tokens, heads, width).astype(q.dtype), kv
    out = jnp.zeros((tokens + QUERY_TILE, kv_heads, group, width), jnp.float32)
    out = lax.dynamic_update_slice_in_dim(out, decoded, 0, axis=0)
    out = _prefill(queries, out, kv, table, rows, facts)
    return out[:tokens].reshape(tokens, heads, width).astype(q.dtype), kv


def _entries(
    page_table: Int[Array, "rows max_pages"], kv: PagedKV, layer: int | Int[Array, ""]
) -> Int[Array, "rows padded_pages"]:
    """Return the pool entries of a layer's pages, each row padded so that a block may begin at any of its pages."""
    per_block = max(_decode_pages(kv.page_size, rows=1), max(PREFILL_BLOCK, SHARED_BLOCK) // kv.page_size)
    return jnp.pad(page_table, ((0, 0), (0, per_block))) + layer * kv.num_pages


def _decode_pages(page_size: int, *, rows: int) -> int:
    """Return the pages that a row reads at a time: more if rows are few, as each turn of a loop has a fixed cost."""
    tokens = DECODE_BLOCK * (4 if rows <= FEW_ROWS else 1)
    return max(1, tokens // page_size)


def _decode(
    q: Float[Array, "rows kv_heads group head_dim"],
    kv: PagedKV,
    table: Int[Array, "rows pages"],
    lens: Int[Array, " rows"],
    shared: Int[Array, ""],
    num_decodes: Int[Array, ""],
    facts: _LayerOptions,
) -> Float[Array, "rows kv_heads group value_dim"]:
    """Compute one query a row: the `shared` pages for all rows at once, then `DECODE_ROWS` rows at a time.

    Groups of rows past `num_decodes` cost nothing.
    """
    rows = q.shape[0]
    state = _empty_softmax(q.shape[:3], kv.value_dim or q.shape[3])
    if rows > 1 and facts.window is None:
        state = _decode_shared(q, kv, table[0], lens > 0, shared, facts)
    if rows <= DECODE_ROWS:
        return _decode_rows(q, kv, table, lens, shared, state, facts)
    padding = -rows % DECODE_ROWS
    q, table, lens, state = jax.tree.map(
        lambda x: jnp.pad(x, ((0, padding),) + ((0, 0),) * (x.ndim - 1)), (q, table, lens, state)
    )

    def body(i: Array, out: Array) -> Array:
        at = i * DECODE_ROWS
        own = jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, at, DECODE_ROWS), (q, table, lens, state))
        done = _decode_rows(own[0], kv, own[1], own[2], shared, own[3], facts)
        return lax.dynamic_update_slice_in_dim(out, done, at, axis=0)

    groups = (num_decodes + DECODE_ROWS - 1) // DECODE_ROWS
    return lax.fori_loop(0, groups, body, jnp.zeros(state.out.shape, jnp.float32))[:rows]


def _decode_rows(
    q: Float[Array, "rows kv_heads group head_dim"],
    kv: PagedKV,
    table: Int[Array, "rows pages"],
    lens: Int[Array, " rows"],
    first: Int[Array, ""],
    state: _RunningSoftmax,
    facts: _LayerOptions,
) -> Float[Array, "rows kv_heads group value_dim"]:
    """Compute decodes from page `first` on; `state` is the softmax over the pages before it.

    With a window, each row begins at the first page that it sees instead.
    """
    rows, kv_heads, group, head_dim = q.shape
    queries = q.reshape(rows * kv_heads, group, head_dim).astype(jnp.float32) * facts.scale
    gather = functools.partial(_gather, kv, facts.kv_scales, queries.dtype, head_dim)
    per_block = _decode_pages(kv.page_size, rows=rows)
    block = per_block * kv.page_size

    if facts.window is None:
        blocks = (jnp.max(lens) - first * kv.page_size + block - 1) // block
    else:
        first = jnp.maximum(lens - facts.window, 0) // kv.page_size
        blocks = (jnp.max(lens - first * kv.page_size) + block - 1) // block

    def pages(i: Array) -> tuple[Array, Array]:
        """Return the entries of block `i` and their positions; both by row with a window."""
        if facts.window is None:
            page = first + i * per_block
            entries = lax.dynamic_slice_in_dim(table, page, per_block, axis=1)
        else:
            page = first[:, None] + i * per_block
            entries = jnp.take_along_axis(table, page + jnp.arange(per_block, dtype=jnp.int32), axis=1, mode="clip")
        return entries, page * kv.page_size + jnp.arange(block, dtype=jnp.int32)

    def body(i: Array, state: _RunningSoftmax) -> _RunningSoftmax:
        entries, position = pages(i)
        seen = position < lens[:, None]
        if facts.window is not None:
            seen &= position >= lens[:, None] - facts.window
        seen = jnp.repeat(seen, kv_heads, axis=0)
        keys = gather(0, entries)
        values = jnp.where(seen[:, :, None], gather(1, entries), 0.0)
        logits = jnp.einsum("rgd,rtd->rgt", queries, keys)
        return _advance(state, _cap(logits, facts), seen[:, None], values, "rgt,rtd->rgd")

    start = jax.tree.map(lambda x: x.reshape(rows * kv_heads, *x.shape[2:]), state)
    state = lax.fori_loop(0, blocks, body, start)
    sinks = None if facts.sinks is None else jnp.tile(facts.sinks, (rows, 1))
    return _finish(state, sinks).reshape(rows, kv_heads, group, -1)


def _shared_pages(table: Int[Array, "rows pages"], lens: Int[Array, " rows"], page_size: int) -> Int[Array, ""]:
    """Return the number of whole pages that all rows of nonzero length, which come first, begin with.

    It is 0 for a single row: then its sums are the same as beside rows that share nothing with it.
    """
    live = lens > 0
    same = ((table == table[0]) | ~live[:, None]).all(axis=0)
    leading = jnp.cumprod(same.astype(jnp.int32)).sum()
    shortest = jnp.min(jnp.where(live, lens, 2**31 - 1))
    return jnp.where(live[1], jnp.minimum(leading, shortest // page_size), 0)


def _decode_shared(
    q: Float[Array, "rows kv_heads group head_dim"],
    kv: PagedKV,
    entries: Int[Array, " pages"],
    live: Bool[Array, " rows"],
    num_pages: Int[Array, ""],
    facts: _LayerOptions,
) -> _RunningSoftmax:
    """Return the softmax of the live rows over their first `num_pages` pages, which are the same for all of them."""
    rows, kv_heads, group, head_dim = q.shape
    queries = (q.astype(jnp.float32) * facts.scale).astype(q.dtype)
    queries = queries.swapaxes(0, 1).reshape(kv_heads, rows * group, head_dim)
    per_block = max(1, SHARED_BLOCK // kv.page_size)
    block = per_block * kv.page_size
    query_positions = jnp.repeat(live, group)[:, None]

    def body(i: Array, state: _RunningSoftmax) -> _RunningSoftmax:
        some = lax.dynamic_slice_in_dim(entries, i * per_block, per_block)[None]
        held = i * block + jnp.arange(block, dtype=jnp.int32) < num_pages * kv.page_size
        keys, values = (_gather(kv, facts.kv_scales, q.dtype, head_dim, which, some) for which in (0, 1))
        values = jnp.where(held[:, None], values, jnp.zeros((), values.dtype))
        logits = jnp.einsum("hqd,htd->hqt", queries, keys, preferred_element_type=jnp.float32)
        return _advance(state, _cap(logits, facts), (query_positions & held)[None], values, "hqt,htd->hqd")

    blocks = (num_pages + per_block - 1) // per_block
    state = lax.fori_loop(0, blocks, body, _empty_softmax((kv_heads, rows * group), kv.value_dim or head_dim))
    return jax.tree.map(lambda x: x.reshape(kv_heads, rows, group, *x.shape[2:]).swapaxes(0, 1), state)


def _prefill(
    q: Float[Array, "tokens kv_heads group head_dim"],
    out: Float[Array, "padded_tokens kv_heads group value_dim"],
    kv: PagedKV,
    table: Int[Array, "rows pages"],
    rows: Rows,
    facts: _LayerOptions,
) -> Float[Array, "padded_tokens kv_heads group value_dim"]:
    """Compute rows from `num_decodes` on, as a work list of query tiles in token order.

    The last tile of a row also writes over the next row's first tokens; the next tile overwrites these.
    """
    _, kv_heads, group, head_dim = q.shape
    gather = functools.partial(_gather, kv, facts.kv_scales, q.dtype, head_dim)
    per_block = max(1, PREFILL_BLOCK // kv.page_size)
    block = per_block * kv.page_size
    row_ids = jnp.arange(table.shape[0], dtype=jnp.int32)
    query_starts, kv_lens = rows.query_starts, rows.kv_lens
    query_lens = query_starts[1:] - query_starts[:-1]
    live = (row_ids >= rows.num_decodes) & (row_ids < rows.num_seqs)
    tiles = jnp.where(live, (query_lens + QUERY_TILE - 1) // QUERY_TILE, 0)
    tile_ends = jnp.cumsum(tiles)
    padded = jnp.pad(q, ((0, QUERY_TILE), (0, 0), (0, 0), (0, 0)))

    def tile(i: Array, out: Array) -> Array:
        row = jnp.searchsorted(tile_ends, i, side="right", method="compare_all").astype(jnp.int32)
        offset = (i - tile_ends[row] + tiles[row]) * QUERY_TILE
        at = query_starts[row] + offset
        queries = (lax.dynamic_slice_in_dim(padded, at, QUERY_TILE).astype(jnp.float32) * facts.scale).astype(q.dtype)
        queries = queries.transpose(1, 2, 0, 3).reshape(kv_heads, group * QUERY_TILE, head_dim)
        start = kv_lens[row] - query_lens[row] + offset
        query_positions = start + jnp.tile(jnp.arange(QUERY_TILE, dtype=jnp.int32), group)
        end = jnp.minimum(kv_lens[row], start + QUERY_TILE)
        first = jnp.zeros((), jnp.int32)
        if facts.window is not None:
            first = jnp.maximum(start - facts.window + 1, 0) // block

        def body(j: Array, state: _RunningSoftmax) -> _RunningSoftmax:
            entries = lax.dynamic_slice(table, (row, j * per_block), (1, per_block), allow_negative_indices=False)[0]
            position = j * block + jnp.arange(block, dtype=jnp.int32)
            held = position < end
            seen = (position <= query_positions[:, None]) & held
            if facts.window is not None:
                held &= position > start - facts.window
                seen &= position > query_positions[:, None] - facts.window
            keys = gather(0, entries[None])
            values = gather(1, entries[None])
            values = jnp.where(held[None, :, None], values, jnp.zeros((), values.dtype))
            logits = jnp.einsum("hqd,htd->hqt", queries, keys, preferred_element_type=jnp.float32)
            return _advance(state, _cap(logits, facts), seen[None], values, "hqt,htd->hqd")

        blocks = (end + block - 1) // block
        width = kv.value_dim or head_dim
        state = lax.fori_loop(first, blocks, body, _empty_softmax((kv_heads, group * QUERY_TILE), width))
        sinks = None if facts.sinks is None else jnp.repeat(facts.sinks, QUERY_TILE, axis=1)
        done = _finish(state, sinks).reshape(kv_heads, group, QUERY_TILE, width).transpose(2, 0, 1, 3)
        return lax.dynamic_update_slice_in_dim(out, done, at, axis=0)

    return lax.fori_loop(0, tile_ends[-1], tile, out)


def _gather(
    kv: PagedKV,
    scales: Float[Array, "2 kv_heads"] | None,
    dtype: jnp.dtype,
    head_dim: int,
    which: int,
    entries: Int[Array, "rows pages"],
) -> Float[Array, "rows_heads tokens width"]:
    """Return the keys (0) or values (1) of some pages, with rows and heads as one dimension."""
    pages = kv.gather(which, entries, head_dim)
    if scales is not None:
        scale = scales[which if kv.value_dim is None else 0]
        pages = pages.astype(jnp.float32) * scale[:, None, None, None, None]
    pages = pages.astype(dtype).swapaxes(0, 1)
    return pages.reshape(pages.shape[0] * pages.shape[1], -1, pages.shape[-1])


def _cap(logits: Float[Array, "..."], facts: _LayerOptions) -> Float[Array, "..."]:
    return logits if facts.soft_cap is None else facts.soft_cap * jnp.tanh(logits / facts.soft_cap)


def _empty_softmax(shape: tuple[int, ...], head_dim: int) -> _RunningSoftmax:
    return _RunningSoftmax(
        jnp.zeros((*shape, head_dim), jnp.float32), jnp.full(shape, _MASKED, jnp.float32), jnp.zeros(shape, jnp.float32)
    )


def _advance(
    state: _RunningSoftmax, logits: Array, seen: Bool[Array, "..."], values: Array, mix: str
) -> _RunningSoftmax:
    """Add a block to the softmax; sums under the old peak are rescaled (Milakov, Gimelshein 2018)."""
    logits = jnp.where(seen, logits, _MASKED)
    peak = jnp.maximum(state.peak, logits.max(axis=-1))
    keep = jnp.exp(state.peak - peak)
    weights = jnp.where(seen, jnp.exp(logits - peak[..., None]), 0.0)
    out = state.out * keep[..., None] + jnp.einsum(
        mix, weights.astype(values.dtype), values, preferred_element_type=jnp.float32
    )
    return _RunningSoftmax(out, peak, state.total * keep + weights.sum(axis=-1))


def _finish(state: _RunningSoftmax, sinks: Float[Array, "..."] | None) -> Float[Array, "... head_dim"]:
    """Normalize the output; a sink adds its exponential to the denominator. Rows that saw no token become zeros."""
    total = state.total
    if sinks is not None:
        total = total + jnp.exp(sinks - state.peak)
    return state.out / jnp.where(total == 0.0, 1.0, total)[..., None]
