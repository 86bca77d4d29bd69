"""The CPU's backend: one kernel a call, which LLVM compiles for the machine it runs on.

It writes the new keys and values, lists the items of work and shares them among XLA's threads; what they do stands in
`cpu_decode.py` and `cpu_prefill.py`. XLA sees one operation with the pool in place.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels import cpu
from pallas_kernels.cpu.emit import Function, Module, Value
from pallas_kernels.cpu.ffi import Call, handler
from pallas_kernels.cpu.types import I1, I8, I64, PTR
from pallas_kernels.paged_attention.cpu.decode import decode, num_chunks, partial_bytes, write_chunks
from pallas_kernels.paged_attention.cpu.prefill import num_tiles, prefill, write_tiles
from pallas_kernels.paged_attention.cpu.tiles import LANES, TASK_BYTES, Attention, Work, int_at, token_offset
from pallas_kernels.paged_attention.layout import PagedKV
from pallas_kernels.paged_attention.problem import Problem, Target
from pallas_kernels.paged_attention.write import stored

DTYPES = ("float32", "bfloat16")
MAX_HEAD_DIM = 256

# With so many chunks for each thread, one item is all heads of a chunk, and memory is asked for the next in time.
_SPARE_CHUNKS = 2


def refusal(problem: Problem, target: Target) -> str | None:
    """Why not, by name: the device, a type, the head size, the page size."""
    if target.platform != "cpu":
        return f"cpu compiles for the CPU it runs on, not for {target.platform}"
    if why := cpu.refusal():
        return why
    for what, dtype in (("computes in", problem.dtype), ("reads KV caches of", problem.kv_dtype)):
        if dtype.name not in DTYPES:
            return f"cpu {what} {' and '.join(DTYPES)}, not {dtype.name}"
    if problem.head_dim % LANES or not LANES <= problem.head_dim <= MAX_HEAD_DIM:
        return f"cpu takes heads of {LANES} to {MAX_HEAD_DIM} in steps of {LANES}, not of {problem.head_dim}"
    if problem.page_size % LANES:
        return f"cpu takes pages of whole multiples of {LANES} tokens, not of {problem.page_size}"
    return None


def paged_attention(
    q: Float[Array, "tokens heads head_dim"],
    k: Float[Array, "tokens kv_heads head_dim"],
    v: Float[Array, "tokens kv_heads head_dim"],
    kv: PagedKV,
    layer: int | Int[Array, ""],
    page_table: Int[Array, "rows max_pages"],
    query_starts: Int[Array, " rows_plus_1"],
    kv_lens: Int[Array, " rows"],
    num_decodes: Int[Array, ""],
    num_seqs: Int[Array, ""],
    *,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    sinks: Float[Array, " heads"] | None,
    decode_only: bool,
    target: Target,
    interpret: bool,
) -> tuple[Float[Array, "tokens heads head_dim"], PagedKV]:
    """See `api.paged_attention`."""
    assert kv.scales is None
    facts = Attention(
        group=q.shape[1] // k.shape[1],
        head_dim=q.shape[2],
        page_size=kv.page_size,
        dtype=q.dtype.name,
        kv_dtype=kv.keys.dtype.name,
        scale=float(scale),
        window=window,
        soft_cap=soft_cap,
        sinks=sinks is not None,
        decode_only=decode_only,
    )
    integers = (layer * kv.num_pages, page_table, query_starts, kv_lens, num_decodes, num_seqs)
    # Without it XLA copies a pool that the program has reshaped before.
    keys, values = lax.optimization_barrier((kv.keys, kv.values))
    out, keys, values = cpu.call(
        PagedAttention(facts),
        [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (q, kv.keys, kv.values)],
        q,
        stored(k, kv, layer, 0),
        stored(v, kv, layer, 1),
        keys,
        values,
        *(jnp.asarray(x, jnp.int32) for x in integers),
        *(() if sinks is None else (sinks.astype(jnp.float32),)),
        in_place={3: 1, 4: 2},
    )
    return out, kv.with_pools((keys, values))


@dataclasses.dataclass(frozen=True)
class PagedAttention:
    """The kernel for calls of which these facts hold, whatever their shapes."""

    facts: Attention

    @property
    def name(self) -> str:
        """See `cpu.Kernel`."""
        return self.facts.name

    def write(self, module: Module, features: frozenset[str]) -> None:
        """See `cpu.Kernel`."""
        handler(module, self.name, 11 + self.facts.sinks, 3, lambda call: _write_call(call, self.facts, features))


def _write_call(call: Call, facts: Attention, features: frozenset[str]) -> None:
    f = call.function
    q, k, v, _, _, first_entry, page_table, query_starts, kv_lens, num_decodes, num_seqs, *sinks = call.arguments
    out, keys, values = call.results
    null = f.constant(PTR, 0)
    num_seqs_now = int_at(f, num_seqs.data, f.constant(I64, 0))
    work = Work(
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
        num_decodes=int_at(f, num_decodes.data, f.constant(I64, 0)),
        kv_heads=keys.dim(0),
        head_shares=null,
        entries=keys.dim(1),
        first_entry=int_at(f, first_entry.data, f.constant(I64, 0)),
        max_pages=page_table.dim(1),
    )
    _write_kv(f, work, num_seqs_now, k.data, v.data, facts)
    _clear_padding(f, work, num_seqs_now, q.dim(0), facts)
    _share_work(call, work, num_seqs_now, facts, features)


def _write_kv(f: Function, work: Work, num_seqs: Value, k: Value, v: Value, facts: Attention) -> None:
    """Puts each new token into its page."""

    def row(r: Value) -> None:
        start, stop = (int_at(f, work.query_starts, r + i) for i in range(2))
        position = int_at(f, work.kv_lens, r) - stop

        def head(token: Value, h: Value) -> None:
            to = token_offset(f, work, facts, r, h, position + token)
            come = (token * work.kv_heads + h) * facts.kv_row_bytes
            for pool, new in ((work.keys, k), (work.values, v)):
                size, volatile = f.constant(I64, facts.kv_row_bytes), f.constant(I1, 0)
                f.call("llvm.memcpy.p0.p0.i64", None, f.at(pool, to), f.at(new, come), size, volatile)

        def one(token: Value) -> None:
            f.loop(work.kv_heads, lambda h: head(token, h))

        f.loop(stop, one, start=start)

    f.loop(num_seqs, row)


def _clear_padding(f: Function, work: Work, num_seqs: Value, tokens: Value, facts: Attention) -> None:
    """What a program computes of tokens that aren't there is the same each time."""
    row_bytes = work.kv_heads * (facts.group * facts.head_dim * facts.q_bytes)
    live = int_at(f, work.query_starts, num_seqs)
    size = (tokens - live) * row_bytes
    f.call("llvm.memset.p0.i64", None, f.at(work.out, live * row_bytes), f.constant(I8, 0), size, f.constant(I1, 0))


def _share_work(call: Call, work: Work, num_seqs: Value, facts: Attention, features: frozenset[str]) -> None:
    """Lists the items and has them done: prefill tiles, which take longer, and then decodes."""
    f = call.function

    def length(row: Value) -> Value:
        return int_at(f, work.kv_lens, row)

    (chunks,) = f.loop(
        work.num_decodes, lambda row, count: count + num_chunks(f, facts, length(row)), f.constant(I64, 0)
    )
    tiles = f.constant(I64, 0) if facts.decode_only else num_tiles(f, facts, work, num_seqs)
    chunk_bytes = work.kv_heads * (8 + partial_bytes(facts))
    tasks = f.call("malloc", PTR, chunks * (chunk_bytes + TASK_BYTES) + tiles * TASK_BYTES + 64)
    tile_tasks = f.at(tasks, chunks * TASK_BYTES)
    counters = f.at(tile_tasks, tiles * TASK_BYTES)
    num_counters = chunks * work.kv_heads
    one, each = f.constant(I64, 1), work.kv_heads
    work = work._replace(
        tasks=tasks,
        counters=counters,
        partials=f.at(counters, num_counters * 8),
        head_shares=f.select(chunks >= call.num_threads * _SPARE_CHUNKS, one, each),
    )
    f.loop(num_counters, lambda i: f.store(f.constant(I64, 0), counters, i * 8))
    f.loop(
        work.num_decodes,
        lambda row, count: write_chunks(f, facts, tasks, count, row, length(row)),
        f.constant(I64, 0),
    )
    if not facts.decode_only:
        write_tiles(f, facts, work, tile_tasks, num_seqs)
    tile_items = tiles * work.kv_heads

    def do(inner: Function, item: Value, tile_items: Value, tile_tasks: Value, *shared: Value) -> None:
        mine = Work(*shared)

        def do_decode() -> None:
            decode(inner, item - tile_items, mine, facts, features)

        if facts.decode_only:
            do_decode()
        else:
            inner.when(
                item < tile_items,
                lambda: prefill(inner, item, tile_tasks, mine, facts, features),
                do_decode,
            )

    call.share(tile_items + chunks * work.head_shares, [tile_items, tile_tasks, *work], do)
    f.call("free", None, tasks)
