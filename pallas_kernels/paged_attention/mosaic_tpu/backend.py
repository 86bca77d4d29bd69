"""The TPU backend: one ragged kernel for the decodes and prefill chunks of a step, which writes the new KV as well.

What it can do and with which block sizes is decided here, and its operands are laid out; the kernel itself stands in
`mosaic_tpu_kernel.py`. Heads of any size come in whole rows of 128 lanes, as the pool has them (`layout.py`).
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from pallas_kernels.paged_attention.layout import PagedKV, in_lanes
from pallas_kernels.paged_attention.mosaic_tpu.kernel import attention_kernel
from pallas_kernels.paged_attention.mosaic_tpu.memory import (
    LANES,
    Blocks,
    Form,
    Given,
    Written,
    new_dtype,
    scratch_types,
)
from pallas_kernels.paged_attention.problem import Problem, Target, is_float8
from pallas_kernels.paged_attention.tuning import tuned_blocks
from pallas_kernels.paged_attention.write import stored

MAX_GROUP = 16
DTYPES = ("float32", "bfloat16")

_DECODE_KEYS = 512
_PREFILL_KEYS = 512
_PREFILL_QUERIES = 128
# Of one slot of a block's pages: enough in flight for HBM's latency.
_BLOCK_BYTES = 2 * 2**20
_SCORES_BYTES = 2**18
# Vector memory of a core, by device; v5e and v6e have the default. XLA keeps a part of it for what runs beside.
_VMEM_BYTES = {"TPU7x": 64 * 2**20}
_DEFAULT_VMEM_BYTES = 128 * 2**20
_TABLE_PAGES = 2**15


def refusal(problem: Problem, target: Target) -> str | None:
    """Why not, by name: the device, a type, the head size, the ratio of heads, the page size."""
    if target.platform not in ("tpu", "cpu"):
        return f"mosaic_tpu compiles for TPUs, not for {target.platform}"
    if problem.dtype.name not in DTYPES:
        return f"mosaic_tpu computes in {' and '.join(DTYPES)}, not in {problem.dtype.name}"
    if problem.kv_dtype.name not in DTYPES and not is_float8(problem.kv_dtype):
        return f"mosaic_tpu reads KV caches of {', '.join(DTYPES)} and float8_e4m3fn, not of {problem.kv_dtype.name}"
    if problem.head_dim > 256:
        return f"mosaic_tpu takes heads of up to 256, not of {problem.head_dim}"
    if problem.heads % problem.kv_heads or problem.heads // problem.kv_heads > MAX_GROUP:
        return f"mosaic_tpu takes up to {MAX_GROUP} query heads a KV head, not {problem.heads} for {problem.kv_heads}"
    if problem.page_size % 16 or problem.page_size & (problem.page_size - 1):
        return f"mosaic_tpu takes pages of 16 tokens or a larger power of two, not of {problem.page_size}"
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
    """See `api.paged_attention`. Raises ValueError for a pool or a page table that a TPU's memory doesn't take."""
    tokens, heads, head_dim = q.shape
    kv_heads, lanes = kv.num_kv_heads, kv.keys.shape[3]
    group = heads // kv_heads
    _check_memory(kv, page_table.shape[1])
    problem = Problem(heads, kv_heads, head_dim, kv.page_size, q.dtype, kv.keys.dtype)
    unit = min(kv.page_size, 32 // kv.keys.dtype.itemsize)
    form = Form(kv_heads, group, lanes, kv.page_size, unit, q.dtype, kv.keys.dtype, kv.joined, scale, window, soft_cap)
    decode = block_sizes(form, problem, target, queries=1)
    prefill = None if decode_only else block_sizes(form, problem, target, queries=_tile_queries(tokens, form))

    padding = 0 if prefill is None else prefill.queries
    rows = in_lanes(stored(k, kv, layer, 0), stored(v, kv, layer, 1), kv)
    new = tuple(_padded(x, padding, lanes)[:, :, None].astype(new_dtype(form.kv_dtype)) for x in rows)
    queries = _padded(q, padding, lanes).reshape(-1, kv_heads, group, lanes)
    tiles, tile_rows, tile_numbers = _tiles(query_starts, kv_lens, num_decodes, num_seqs, tokens, form, prefill)
    counts = jnp.stack([jnp.asarray(x, jnp.int32) for x in (num_decodes, tiles, layer * kv.num_pages)])
    given = Given(
        counts,
        query_starts,
        kv_lens,
        tile_rows,
        tile_numbers,
        None if kv.scales is None else jnp.broadcast_to(kv.scales[:, layer, :, None, None], (2, kv_heads, 1, lanes)),
        None if sinks is None else jnp.broadcast_to(sinks.reshape(kv_heads, group, 1), (kv_heads, group, LANES)),
        page_table[:, None],
        queries,
        new,
    )
    out, *pools = _call(
        given, kv.pools, form, decode, prefill, vmem_limit=_vmem_capacity(target) * 3 // 4, interpret=interpret
    )
    start = lanes // 2 if kv.joined else 0
    return out[:tokens, :, :, start : start + head_dim].reshape(q.shape), kv.with_pools(pools)


def _call(
    given: Given,
    pools: tuple[Array, ...],
    form: Form,
    decode: Blocks,
    prefill: Blocks | None,
    *,
    vmem_limit: int,
    interpret: bool,
) -> list[Array]:
    """Runs the kernel; the pools are updated in place."""
    scalar, vector, hbm = (pl.BlockSpec(memory_space=space) for space in (pltpu.SMEM, pltpu.VMEM, pl.ANY))
    inputs, structure = jax.tree.flatten(given)
    first, count = len(inputs), len(pools)
    in_vector = sum(x is not None for x in (given.scales, given.sinks))
    specs = [*[scalar] * 5, *[vector] * in_vector, *[hbm] * (first - 5 - in_vector)]

    def kernel(*refs: Any) -> None:
        out, *written = refs[first + count :]
        read = jax.tree.unflatten(structure, refs[:first])
        attention_kernel(read, Written(out, tuple(written)), form, decode, prefill)

    return pl.pallas_call(
        kernel,
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (given.q, *pools)],
        in_specs=[*specs, *[hbm] * count],
        out_specs=[hbm] * (1 + count),
        input_output_aliases={first + i: 1 + i for i in range(count)},
        interpret=pltpu.InterpretParams(detect_races=True) if interpret else False,
        compiler_params=pltpu.CompilerParams(vmem_limit_bytes=vmem_limit),
        name="paged_attention_tpu",
    )(*inputs, *pools)


def block_sizes(form: Form, problem: Problem, target: Target, *, queries: int) -> Blocks:
    """Tuned or by rule, and no larger than vector memory takes: `block_kv` tokens a block, `block_q` queries a tile."""
    tuned = tuned_blocks(target, "mosaic_tpu", "decode" if queries == 1 else "prefill", problem) or {}
    arrays = 1 if form.joined else 2
    token_bytes = arrays * form.kv_heads * form.lanes * form.kv_dtype.itemsize
    keys = min(_DECODE_KEYS if queries == 1 else _PREFILL_KEYS, _BLOCK_BYTES // token_bytes)
    pages = max(1, tuned.get("block_kv", keys) // form.page_size)
    if queries > 1:
        queries = _whole_units(min(queries, tuned.get("block_q", queries)), form)
    budget = _vmem_capacity(target) // 3
    while True:
        blocks = Blocks(queries, pages, _heads_at_once(form, queries, pages))
        can_halve_queries = queries > form.unit
        if vmem_bytes(form, blocks) <= budget or (pages == 1 and not can_halve_queries):
            return blocks
        if can_halve_queries and (pages == 1 or queries * form.group > pages * form.page_size):
            queries = _whole_units(queries // 2, form)
        else:
            pages //= 2


def candidates(kind: str, problem: Problem, target: Target) -> list[dict[str, int]]:
    """What to time on a device for the tuned table."""
    keys = [{"block_kv": size} for size in (128, 256, 512, 1024) if size >= problem.page_size]
    if kind == "decode":
        return keys
    return [{"block_q": queries, **one} for queries in (32, 64, 128, 256) for one in keys]


def vmem_bytes(form: Form, blocks: Blocks) -> int:
    """Vector memory of a loop's scratch, and of the scores of the heads that are multiplied at once."""
    types = [
        t
        for t in jax.tree.leaves(tuple(scratch_types(form, blocks, 1)))
        if getattr(t, "memory_space", None) == pltpu.VMEM
    ]
    scores = blocks.heads * blocks.queries * form.group * blocks.pages * form.page_size
    return sum(_padded_bytes(t.shape, t.dtype) for t in types) + 6 * scores


def _vmem_capacity(target: Target) -> int:
    return _VMEM_BYTES.get(target.kind, _DEFAULT_VMEM_BYTES)


def _padded_bytes(shape: tuple[int, ...], dtype: np.dtype) -> int:
    """As tiles hold it, whose rows are words of 32 bits."""
    *outer, rows, lanes = shape
    packing = 4 // np.dtype(dtype).itemsize
    return math.prod(outer) * (rows + -rows % packing) * (lanes + -lanes % LANES) * np.dtype(dtype).itemsize


def _heads_at_once(form: Form, queries: int, pages: int) -> int:
    """For one query several, as a product so small waits for itself; else one."""
    if queries > 1:
        return 1
    most = max(1, _SCORES_BYTES // (4 * 8 * pages * form.page_size))
    return max(n for n in range(1, form.kv_heads + 1) if form.kv_heads % n == 0 and n <= most)


def _whole_units(queries: int, form: Form) -> int:
    return max(form.unit, queries - queries % form.unit)


def _tile_queries(tokens: int, form: Form) -> int:
    return min(_PREFILL_QUERIES, tokens + -tokens % form.unit)


def _tiles(
    query_starts: Int[Array, " rows_plus_1"],
    kv_lens: Int[Array, " rows"],
    num_decodes: Int[Array, ""],
    num_seqs: Int[Array, ""],
    tokens: int,
    form: Form,
    prefill: Blocks | None,
) -> tuple[Array | int, Int[Array, " tiles"], Int[Array, " tiles"]]:
    """The work list of prefill: how many tiles, the row of each and its number in the row. They begin at units."""
    if prefill is None:
        return 0, jnp.zeros(1, jnp.int32), jnp.zeros(1, jnp.int32)
    rows = kv_lens.shape[0]
    row = jnp.arange(rows, dtype=jnp.int32)
    new = query_starts[1:] - query_starts[:-1]
    start = kv_lens - new
    live = (row >= num_decodes) & (row < num_seqs) & (new > 0)
    tiles = jnp.where(live, (start % form.unit + new + prefill.queries - 1) // prefill.queries, 0)
    ends = jnp.cumsum(tiles).astype(jnp.int32)
    # A row has one tile more than its tokens fill, and one more where it begins within a unit.
    number = jnp.arange(tokens // prefill.queries + 2 * min(rows, tokens), dtype=jnp.int32)
    of = jnp.searchsorted(ends, number, side="right", method="compare_all").astype(jnp.int32)
    of = jnp.minimum(of, rows - 1)
    return ends[-1], of, number - (ends - tiles)[of]


def _padded(x: Float[Array, "tokens heads width"], tokens: int, lanes: int) -> Float[Array, "more heads lanes"]:
    return jnp.pad(x, ((0, tokens), (0, 0), (0, lanes - x.shape[2])))


def _check_memory(kv: PagedKV, pages: int) -> None:
    if not kv.page_major or kv.keys.shape[3] % LANES:
        raise ValueError(f"a pool of {kv.keys.shape} is not laid out for a TPU: see kv_layout(platform='tpu')")
    if pages > _TABLE_PAGES:
        raise ValueError(
            f"a row of {pages} pages doesn't fit a TPU's scalar memory, which takes {_TABLE_PAGES}: use larger pages"
        )
