"""The TPU backend: one ragged kernel for the decodes and prefill chunks of a step, which also writes the new KV.

This module decides what the kernel supports, and prepares its operands; the kernel itself is in `kernel.py`, and the
rule for its block sizes in `sizes.py`. Heads of any size are padded to whole rows of 128 lanes, as in the pool
(`layout.py`).

All query heads of a shard share a latent row, so its tiles have fewer queries of more heads, as many rows in all.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from pallas_kernels.dispatch import Backend
from pallas_kernels.paged_attention.arguments import AttentionOptions, Rows
from pallas_kernels.paged_attention.layout import PagedKV, as_pool_rows
from pallas_kernels.paged_attention.mosaic_tpu.kernel import attention_kernel
from pallas_kernels.paged_attention.mosaic_tpu.memory import (
    LANES,
    KernelOperands,
    KernelResults,
    LoopSizes,
    TpuAttention,
    new_dtype,
    own_positions,
    whole_lanes,
)
from pallas_kernels.paged_attention.mosaic_tpu.sizes import (
    block_sizes,
    tile_queries,
    vmem_bytes,
    vmem_capacity,
    vmem_limit,
)
from pallas_kernels.paged_attention.problem import Problem, is_float8
from pallas_kernels.paged_attention.write import as_pool_dtype
from pallas_kernels.target import KernelTarget

MAX_GROUP = 16
# The query heads and the numbers of a latent row: those of DeepSeek-V3, whose rows of 576 are padded.
MAX_LATENT_GROUP = 128
MAX_LATENT_DIM = 640
DTYPES = ("float32", "bfloat16")

_TABLE_PAGES = 2**15


def refusal(problem: Problem, target: KernelTarget) -> str | None:
    """Return what isn't supported (dtype, head size, ratio of heads, page size or memory of a tile), or None."""
    if problem.dtype.name not in DTYPES:
        return f"mosaic_tpu computes in {' and '.join(DTYPES)}, not in {problem.dtype.name}"
    if problem.kv_dtype.name not in DTYPES and not is_float8(problem.kv_dtype):
        return f"mosaic_tpu reads KV caches of {', '.join(DTYPES)} and fp8, not of {problem.kv_dtype.name}"
    if problem.value_dim is not None:
        if why := _refused_latent_rows(problem):
            return why
    elif problem.head_dim > 512:
        return f"mosaic_tpu takes heads of up to 512, not of {problem.head_dim}"
    elif problem.heads % problem.kv_heads or problem.heads // problem.kv_heads > MAX_GROUP:
        return f"mosaic_tpu takes up to {MAX_GROUP} query heads a KV head, not {problem.heads} for {problem.kv_heads}"
    if problem.page_size % 16 or problem.page_size & (problem.page_size - 1):
        return f"mosaic_tpu takes pages of 16 tokens or a larger power of two, not of {problem.page_size}"
    arrays = 2 if problem.value_dim is None else 1
    page_bytes = (
        arrays * problem.kv_heads * problem.page_size * whole_lanes(problem.head_dim) * problem.kv_dtype.itemsize
    )
    # A loop holds two blocks of at least a page besides its own tokens.
    if page_bytes > (limit := vmem_capacity(target) // 4):
        return (
            f"mosaic_tpu takes pages of up to {limit // 2**20} MiB, and {problem.page_size} tokens of "
            f"{problem.kv_heads} KV heads take {page_bytes // 2**20}: choose smaller pages"
        )
    joined = problem.value_dim is None and 2 * problem.head_dim <= LANES
    attention = _attention(problem, AttentionOptions(1.0), joined=joined, writes=True)
    least = vmem_bytes(attention, block_sizes(attention, problem, target, queries=attention.unit))
    if least > (limit := vmem_limit(target)):
        return (
            f"mosaic_tpu's smallest tile of {problem.heads} query heads and pages of {problem.page_size} tokens takes "
            f"{least / 2**20:.0f} MiB of vector memory, more than {limit // 2**20}: choose smaller pages, or split the "
            "heads among more devices"
        )
    return None


def _refused_latent_rows(problem: Problem) -> str | None:
    if problem.kv_heads != 1:
        return f"mosaic_tpu takes latent rows that all heads of a shard share, not {problem.kv_heads} a token"
    if problem.head_dim > MAX_LATENT_DIM:
        return f"mosaic_tpu takes latent rows of up to {MAX_LATENT_DIM}, not of {problem.head_dim}"
    if problem.heads > MAX_LATENT_GROUP:
        return f"mosaic_tpu takes up to {MAX_LATENT_GROUP} query heads a latent row, not {problem.heads}"
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
    """Compute `api.paged_attention`.

    Raises ValueError for a pool or page table that a TPU's memory can't hold, and for a window over latent rows.
    """
    tokens, heads, head_dim = q.shape
    kv_heads, lanes = kv.num_kv_heads, kv.keys.shape[3]
    group = heads // kv_heads
    _check_memory(kv, rows.page_table.shape[1])
    if kv.value_dim is not None and options.window is not None:
        raise ValueError(f"mosaic_tpu has no window over latent rows, as of {options.window}")
    problem = Problem(heads, kv_heads, head_dim, kv.page_size, q.dtype, kv.keys.dtype, kv.value_dim)
    attention = _attention(problem, options, joined=kv.joined, writes=k is not None)
    sizes_of = functools.partial(block_sizes, attention, problem, backend.target)
    decode = None if rows.chunks_only else sizes_of(queries=1)
    prefill = None
    if not rows.decode_only:
        prefill = sizes_of(queries=tile_queries(tokens, rows.max_queries, attention), max_queries=rows.max_queries)

    padding = 0 if prefill is None else prefill.queries
    written: tuple[Array, ...] = ()
    if k is not None:
        keys = as_pool_dtype(k, kv, layer, 0)
        written = as_pool_rows(keys, None if v is None else as_pool_dtype(v, kv, layer, 1), kv)
    new = tuple(_padded(x, padding, lanes)[:, :, None].astype(new_dtype(attention.kv_dtype)) for x in written)
    queries = _padded(q, padding, lanes).reshape(-1, kv_heads, group, lanes)
    tiles, tile_rows, tile_numbers = _tiles(rows, tokens, attention, prefill)
    counts = jnp.stack([jnp.asarray(x, jnp.int32) for x in (rows.num_decodes, tiles, layer * kv.num_pages)])
    sinks = options.sinks
    if sinks is not None:
        sinks = jnp.broadcast_to(sinks.reshape(kv_heads, group, 1), (kv_heads, group, LANES))
    operands = KernelOperands(
        counts,
        rows.query_starts,
        rows.kv_lens,
        tile_rows,
        tile_numbers,
        _spread_scales(kv, layer),
        sinks,
        rows.page_table[:, None],
        queries,
        new,
    )
    limit = vmem_limit(backend.target)
    out, *pools = _call(operands, kv.pools, attention, decode, prefill, vmem_limit=limit, interpret=backend.interpret)
    start = lanes // 2 if kv.joined else 0
    out = out[:tokens, :, :, start : start + (kv.value_dim or head_dim)]
    return out.reshape(tokens, heads, -1), kv.with_pools(pools)


def _attention(problem: Problem, options: AttentionOptions, *, joined: bool, writes: bool) -> TpuAttention:
    return TpuAttention(
        kv_heads=problem.kv_heads,
        group=problem.heads // problem.kv_heads,
        lanes=LANES if joined else whole_lanes(problem.head_dim),
        page_size=problem.page_size,
        unit=min(problem.page_size, 32 // problem.kv_dtype.itemsize),
        dtype=problem.dtype,
        kv_dtype=problem.kv_dtype,
        joined=joined,
        scale=options.scale,
        window=options.window,
        soft_cap=options.soft_cap,
        writes=writes,
        value_lanes=None if problem.value_dim is None else whole_lanes(problem.value_dim),
    )


def _call(
    operands: KernelOperands,
    pools: tuple[Array, ...],
    attention: TpuAttention,
    decode: LoopSizes | None,
    prefill: LoopSizes | None,
    *,
    vmem_limit: int,
    interpret: bool,
) -> list[Array]:
    """Run the kernel; the pools are updated in place."""
    scalar, vector, hbm = (pl.BlockSpec(memory_space=space) for space in (pltpu.SMEM, pltpu.VMEM, pl.ANY))
    inputs, structure = jax.tree.flatten(operands)
    first, count = len(inputs), len(pools)
    in_vector = sum(x is not None for x in (operands.scales, operands.sinks))
    specs = [*[scalar] * 5, *[vector] * in_vector, *[hbm] * (first - 5 - in_vector)]

    def kernel(*refs: Any) -> None:
        out, *results = refs[first + count :]
        read = jax.tree.unflatten(structure, refs[:first])
        attention_kernel(read, KernelResults(out, tuple(results)), attention, decode, prefill)

    return pl.pallas_call(
        kernel,
        out_shape=[
            jax.ShapeDtypeStruct((*operands.q.shape[:3], attention.out_lanes), operands.q.dtype),
            *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in pools),
        ],
        in_specs=[*specs, *[hbm] * count],
        out_specs=[hbm] * (1 + count),
        input_output_aliases={first + i: 1 + i for i in range(count)},
        interpret=pltpu.InterpretParams(detect_races=True) if interpret else False,
        compiler_params=pltpu.CompilerParams(vmem_limit_bytes=vmem_limit),
        name="paged_attention_tpu",
    )(*inputs, *pools)


def candidates(kind: str, problem: Problem, target: KernelTarget) -> list[dict[str, int]]:
    """Return the block sizes to time for the tuned table."""
    keys = [{"block_kv": size} for size in (128, 256, 512, 1024) if size >= problem.page_size]
    if kind == "decode":
        return keys
    tiles = (32, 64, 128, 256) if problem.value_dim is None else (16, 32, 64, 128)
    return [{"block_q": queries, **one} for queries in tiles for one in keys]


def _tiles(
    rows: Rows,
    tokens: int,
    attention: TpuAttention,
    prefill: LoopSizes | None,
) -> tuple[Array | int, Int[Array, " tiles"], Int[Array, " tiles"]]:
    """Return prefill's work list: the number of tiles, the row of each, and its index in the row.

    Tiles begin at units.
    """
    if prefill is None:
        return 0, jnp.zeros(1, jnp.int32), jnp.zeros(1, jnp.int32)
    num_rows = rows.kv_lens.shape[0]
    row = jnp.arange(num_rows, dtype=jnp.int32)
    new = rows.query_starts[1:] - rows.query_starts[:-1]
    start = rows.kv_lens - new
    live = (row >= rows.num_decodes) & (row < rows.num_seqs) & (new > 0)
    size = own_positions(attention, prefill)
    tiles = jnp.where(live, (start % attention.unit + new + size - 1) // size, 0)
    ends = jnp.cumsum(tiles).astype(jnp.int32)
    # A row has one tile more than its tokens fill, and one more if it begins within a unit.
    number = jnp.arange(tokens // size + 2 * min(num_rows, tokens), dtype=jnp.int32)
    of = jnp.searchsorted(ends, number, side="right", method="compare_all").astype(jnp.int32)
    of = jnp.minimum(of, num_rows - 1)
    return ends[-1], of, number - (ends - tiles)[of]


def _padded(x: Float[Array, "tokens heads width"], tokens: int, lanes: int) -> Float[Array, "more heads lanes"]:
    return jnp.pad(x, ((0, tokens), (0, 0), (0, lanes - x.shape[2])))


def _spread_scales(kv: PagedKV, layer: int | Int[Array, ""]) -> Float[Array, "2 kv_heads 1 lanes"] | None:
    """Return the factors of a layer's keys and values, if the pool has any. Latent rows have one for both."""
    if kv.scales is None:
        return None
    scales = kv.scales if kv.value_dim is None else kv.scales[:1]
    return jnp.broadcast_to(scales[:, layer, :, None, None], (2, kv.num_kv_heads, 1, kv.keys.shape[3]))


def _check_memory(kv: PagedKV, pages: int) -> None:
    if not kv.page_major or kv.keys.shape[3] % LANES:
        raise ValueError(f"a pool of {kv.keys.shape} is not laid out for a TPU: see kv_layout(platform='tpu')")
    if pages > _TABLE_PAGES:
        raise ValueError(
            f"a row of {pages} pages doesn't fit a TPU's scalar memory, which takes {_TABLE_PAGES}: use larger pages"
        )
