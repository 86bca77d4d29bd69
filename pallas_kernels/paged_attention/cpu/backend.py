"""The CPU's backend: one kernel a call, which LLVM compiles for the machine it runs on.

The kernel writes the new keys and values, lists the work items and shares them among XLA's threads; `decode.py`,
`prefill.py` and, for latent rows, `latent.py` have the code of the items. For XLA it is one operation that updates the
pool in place.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels import cpu
from pallas_kernels.cpu.emit import Function, Module, Value
from pallas_kernels.cpu.ffi import Call, handler
from pallas_kernels.cpu.types import I1, I8, I64, PTR
from pallas_kernels.dispatch import Backend
from pallas_kernels.paged_attention.arguments import AttentionOptions, Rows
from pallas_kernels.paged_attention.cpu import latent
from pallas_kernels.paged_attention.cpu.decode import decode, num_chunks, partial_bytes, write_chunks
from pallas_kernels.paged_attention.cpu.panels import PANEL
from pallas_kernels.paged_attention.cpu.prefill import num_tiles, prefill, write_tiles
from pallas_kernels.paged_attention.cpu.tiles import (
    LANES,
    TASK_BYTES,
    CpuAttention,
    SharedOperands,
    int_at,
    token_offset,
)
from pallas_kernels.paged_attention.layout import PagedKV
from pallas_kernels.paged_attention.problem import Problem
from pallas_kernels.paged_attention.write import as_pool_dtype
from pallas_kernels.target import KernelTarget

DTYPES = ("float32", "bfloat16")
MAX_HEAD_DIM = 512
MAX_LATENT_DIM = 1024

# With at least this many chunks a thread, an item is all heads of a chunk, so that each head can prefetch the next.
_SPARE_CHUNKS = 2

# With fewer items of latent rows a thread than this, tiles are smaller.
_SPARE_TILES = 2

# Query heads of a KV head that an item of decode takes at most: more don't share the cost of reading a chunk.
_MOST_QUERIES = 512


def refusal(problem: Problem, target: KernelTarget) -> str | None:
    """Return what isn't supported (dtype, head size, size of a latent row or page size), or None."""
    for what, dtype in (("computes in", problem.dtype), ("reads KV caches of", problem.kv_dtype)):
        if dtype.name not in DTYPES:
            return f"cpu {what} {' and '.join(DTYPES)}, not {dtype.name}"
    what, most = ("heads", MAX_HEAD_DIM) if problem.value_dim is None else ("latent rows", MAX_LATENT_DIM)
    if problem.head_dim % LANES or not LANES <= problem.head_dim <= most:
        return f"cpu takes {what} of {LANES} to {most} in steps of {LANES}, not of {problem.head_dim}"
    if problem.value_dim is not None and (problem.value_dim % LANES or problem.value_dim < LANES):
        return f"cpu takes values of latent rows in steps of {LANES}, not of {problem.value_dim}"
    if problem.page_size % LANES:
        return f"cpu takes pages of whole multiples of {LANES} tokens, not of {problem.page_size}"
    return None


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
    """Compute `api.paged_attention`."""
    assert kv.scales is None
    group = q.shape[1] // kv.num_kv_heads
    by_decode = kv.value_dim is None and not rows.chunks_only
    few_queries = by_decode and rows.max_queries is not None and rows.max_queries * group <= _MOST_QUERIES
    facts = CpuAttention(
        group=group,
        head_dim=q.shape[2],
        page_size=kv.page_size,
        dtype=q.dtype.name,
        kv_dtype=kv.keys.dtype.name,
        scale=float(options.scale),
        window=options.window,
        soft_cap=options.soft_cap,
        sinks=options.sinks is not None,
        decode_only=by_decode and (rows.decode_only or few_queries),
        max_queries=rows.max_queries if few_queries else None,
        writes=k is not None,
        value_dim=kv.value_dim,
        chunks_only=rows.chunks_only,
    )
    integers = rows.page_table, rows.query_starts, rows.kv_lens, rows.num_decodes, rows.num_seqs
    new = [as_pool_dtype(x, kv, layer, i) for i, x in enumerate((k, v)) if x is not None]
    out, *pools = cpu.call(
        PagedAttention(facts),
        [
            jax.ShapeDtypeStruct((*q.shape[:2], facts.value_width), q.dtype),
            *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in kv.pools),
        ],
        q,
        *kv.pools,
        *(jnp.asarray(x, jnp.int32) for x in (layer * kv.num_pages, *integers)),
        *new,
        *(() if options.sinks is None else (options.sinks.astype(jnp.float32),)),
        in_place={1 + i: 1 + i for i in range(len(kv.pools))},
    )
    return out, kv.with_pools(pools)


@dataclasses.dataclass(frozen=True)
class PagedAttention:
    """The kernel of calls with these static facts, for any shapes."""

    facts: CpuAttention

    @property
    def name(self) -> str:
        """See `cpu.Kernel`."""
        return self.facts.name

    def write(self, module: Module, features: frozenset[str]) -> None:
        """See `cpu.Kernel`."""
        pools = self.facts.num_pools
        count = 7 + pools + pools * self.facts.writes + self.facts.sinks
        handler(module, self.name, count, 1 + pools, lambda call: _write_call(call, self.facts, features))


def _write_call(call: Call, facts: CpuAttention, features: frozenset[str]) -> None:
    f = call.function
    q, first_entry, page_table, query_starts, kv_lens, num_decodes, num_seqs, *more = (
        call.arguments[0],
        *call.arguments[1 + facts.num_pools :],
    )
    sinks = more[facts.num_pools :] if facts.writes else more
    out, *pools = call.results
    keys, values = pools[0], pools[-1]
    null = f.constant(PTR, 0)
    num_seqs_now = int_at(f, num_seqs.data, f.constant(I64, 0))
    shared = SharedOperands(
        q=q.data,
        out=out.data,
        keys=keys.data,
        values=values.data,
        page_table=page_table.data,
        query_starts=query_starts.data,
        kv_lens=kv_lens.data,
        sinks=sinks[0].data if sinks else null,
        tasks=null,
        counters=null,
        partials=null,
        num_decodes=num_seqs_now if facts.max_queries else int_at(f, num_decodes.data, f.constant(I64, 0)),
        kv_heads=keys.dim(0),
        head_shares=null,
        entries=keys.dim(1),
        first_entry=int_at(f, first_entry.data, f.constant(I64, 0)),
        max_pages=page_table.dim(1),
    )
    if facts.writes:
        _write_kv(f, shared, num_seqs_now, [new.data for new in more[: facts.num_pools]], facts)
    _clear_padding(f, shared, num_seqs_now, q.dim(0), facts)
    share = _share_work if facts.value_dim is None else _share_latent_work
    share(call, shared, num_seqs_now, facts, features)


def _write_kv(f: Function, shared: SharedOperands, num_seqs: Value, new: Sequence[Value], facts: CpuAttention) -> None:
    """Write each new token into its page."""

    def row(r: Value) -> None:
        start, stop = (int_at(f, shared.query_starts, r + i) for i in range(2))
        position = int_at(f, shared.kv_lens, r) - stop

        def head(token: Value, h: Value) -> None:
            to = token_offset(f, shared, facts, r, h, position + token)
            source = (token * shared.kv_heads + h) * facts.kv_row_bytes
            for pool, some in zip((shared.keys, shared.values), new):
                size, volatile = f.constant(I64, facts.kv_row_bytes), f.constant(I1, 0)
                f.call("llvm.memcpy.p0.p0.i64", None, f.at(pool, to), f.at(some, source), size, volatile)

        f.loop(stop, lambda token: f.loop(shared.kv_heads, lambda h: head(token, h)), start=start)

    f.loop(num_seqs, row, start=shared.num_decodes if facts.chunks_only else 0)


def _clear_padding(f: Function, shared: SharedOperands, num_seqs: Value, tokens: Value, facts: CpuAttention) -> None:
    """Set the output of tokens that aren't computed to 0, so that the program computes the same from it each time."""
    row_bytes = shared.kv_heads * (facts.group * facts.value_width * facts.q_bytes)
    live = int_at(f, shared.query_starts, num_seqs)
    size = (tokens - live) * row_bytes
    f.call("llvm.memset.p0.i64", None, f.at(shared.out, live * row_bytes), f.constant(I8, 0), size, f.constant(I1, 0))
    if facts.chunks_only:
        size = int_at(f, shared.query_starts, shared.num_decodes) * row_bytes
        f.call("llvm.memset.p0.i64", None, shared.out, f.constant(I8, 0), size, f.constant(I1, 0))


def _share_work(
    call: Call, shared: SharedOperands, num_seqs: Value, facts: CpuAttention, features: frozenset[str]
) -> None:
    """List the work items and run them: prefill tiles first, as they take longer, then decodes."""
    f = call.function

    zero = f.constant(I64, 0)
    decodes = zero if facts.chunks_only else shared.num_decodes
    (chunks,) = f.loop(decodes, lambda row, count: count + num_chunks(f, facts, shared, row), zero)
    tiles = zero if facts.decode_only else num_tiles(f, facts, shared, num_seqs)
    chunk_bytes = shared.kv_heads * (8 + partial_bytes(facts, features))
    tasks = f.call("malloc", PTR, chunks * (chunk_bytes + TASK_BYTES) + tiles * TASK_BYTES + 64)
    tile_tasks = f.at(tasks, chunks * TASK_BYTES)
    counters = f.at(tile_tasks, tiles * TASK_BYTES)
    num_counters = chunks * shared.kv_heads
    one, each = f.constant(I64, 1), shared.kv_heads
    shared = shared._replace(
        tasks=tasks,
        counters=counters,
        partials=f.at(counters, num_counters * 8),
        head_shares=f.select(chunks >= call.num_threads * _SPARE_CHUNKS, one, each),
    )
    f.loop(num_counters, lambda i: f.store(zero, counters, i * 8))
    f.loop(decodes, lambda row, count: write_chunks(f, facts, shared, count, row), zero)
    if not facts.decode_only:
        write_tiles(f, facts, shared, tile_tasks, num_seqs)
    tile_items = tiles * shared.kv_heads

    def run_item(f: Function, item: Value, tile_items: Value, tile_tasks: Value, *fields: Value) -> None:
        shared = SharedOperands(*fields)

        def run_decode() -> None:
            decode(f, item - tile_items, shared, facts, features)

        if facts.decode_only:
            run_decode()
        elif facts.chunks_only:
            prefill(f, item, tile_tasks, shared, facts, features)
        else:
            f.when(item < tile_items, lambda: prefill(f, item, tile_tasks, shared, facts, features), run_decode)

    call.parallel_for(tile_items + chunks * shared.head_shares, [tile_items, tile_tasks, *shared], run_item)
    f.call("free", None, tasks)


def _share_latent_work(
    call: Call, shared: SharedOperands, num_seqs: Value, facts: CpuAttention, features: frozenset[str]
) -> None:
    """List the work items of latent rows and run them."""
    f = call.function
    least, most = (f.constant(I64, rows) for rows in (PANEL, latent.MOST_ROWS))
    items, _ = latent.count_items(f, facts, shared, num_seqs, most)
    tile_rows = f.select(items >= call.num_threads * _SPARE_TILES, most, least)
    items, partials = latent.count_items(f, facts, shared, num_seqs, tile_rows)
    item_bytes, partial_bytes = items * latent.ITEM_BYTES, partials * (8 + latent.partial_bytes(facts))
    tasks = f.call("malloc", PTR, item_bytes + partial_bytes + 64)
    counters = f.at(tasks, item_bytes)
    shared = shared._replace(tasks=tasks, counters=counters, partials=f.at(counters, partials * 8))
    f.loop(partials, lambda i: f.store(f.constant(I64, 0), counters, i * 8))
    latent.write_items(f, facts, shared, num_seqs, tile_rows)

    def run_item(f: Function, item: Value, *fields: Value) -> None:
        latent.attend(f, item, SharedOperands(*fields), facts, features)

    call.parallel_for(items, list(shared), run_item)
    f.call("free", None, tasks)
