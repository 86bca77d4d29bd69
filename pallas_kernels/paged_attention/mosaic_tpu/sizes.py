"""The rule for the block sizes of the TPU kernel: what a loop takes of vector memory, and how it is made to fit."""

from __future__ import annotations

import math

import jax
import numpy as np
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.paged_attention.mosaic_tpu.memory import LANES, LoopSizes, TpuAttention, scratch_types
from pallas_kernels.paged_attention.problem import Problem
from pallas_kernels.paged_attention.tuning import tuned_blocks
from pallas_kernels.target import KernelTarget

_DECODE_KEYS = 512
_PREFILL_KEYS = 512
_PREFILL_QUERIES = 128
# A latent row is small, so more of them are in flight. Queries and sums take most of the vector memory, so smaller
# blocks than the least wouldn't save much.
_LATENT_DECODE_KEYS = 1024
_LATENT_LEAST_KEYS = 256
# Rows of a tile of latent rows, which are queries times heads, and of a part of it.
_TILE_ROWS = 2048
_PART_ROWS = 512
# Bytes of a block's pages: with these in flight, HBM's latency is hidden.
_BLOCK_BYTES = 2 * 2**20
_SCORES_BYTES = 2**18
# Vector memory of a core, by device; v5e and v6e have the default. XLA keeps a part of it for other operations.
_VMEM_BYTES = {"TPU7x": 64 * 2**20}
_DEFAULT_VMEM_BYTES = 128 * 2**20


def block_sizes(
    attention: TpuAttention, problem: Problem, target: KernelTarget, *, queries: int, max_queries: int | None = None
) -> LoopSizes:
    """Return tuned block sizes or those of the rule, reduced until they fit vector memory.

    Tuned tables have `block_kv` tokens a block and `block_q` queries a tile. A tile of latent rows has all
    `max_queries` of its row if these are few.
    """
    latent = attention.value_lanes is not None
    tuned = tuned_blocks(target, "mosaic_tpu", "decode" if queries == 1 else "prefill", problem) or {}
    token_bytes = attention.arrays * attention.kv_heads * attention.lanes * attention.kv_dtype.itemsize
    decode_keys = _LATENT_DECODE_KEYS if latent else _DECODE_KEYS
    keys = min(decode_keys if queries == 1 else _PREFILL_KEYS, _BLOCK_BYTES // token_bytes)
    pages = max(1, tuned.get("block_kv", keys) // attention.page_size)
    least_pages = max(1, _LATENT_LEAST_KEYS // attention.page_size) if latent else 1
    whole_rows = False
    if latent and queries > 1 and max_queries is not None and max_queries <= attention.unit:
        whole_rows = True
        queries = max(2, max_queries)
        queries += -queries % (8 // math.gcd(8, attention.group))  # The memory's tiles have 8 rows.
    elif queries > 1:
        most = _TILE_ROWS // attention.group if latent else queries
        queries = _whole_units(min(queries, tuned.get("block_q", most)), attention)
    budget = vmem_capacity(target) // 3
    while True:
        parts = _parts(attention, queries)
        sizes = LoopSizes(queries, pages, _heads_at_once(attention, queries, pages), parts, whole_rows)
        can_halve_queries = queries > attention.unit and not whole_rows
        if vmem_bytes(attention, sizes) <= budget or (pages <= least_pages and not can_halve_queries):
            return sizes
        if can_halve_queries and (pages <= least_pages or queries * attention.group > pages * attention.page_size):
            queries = _whole_units(queries // 2, attention)
        else:
            pages //= 2


def vmem_bytes(attention: TpuAttention, sizes: LoopSizes) -> int:
    """Return the vector memory of a loop's scratch, and of the scores of the heads that are multiplied at once."""
    types = [
        t
        for t in jax.tree.leaves(tuple(scratch_types(attention, sizes, 1)))
        if getattr(t, "memory_space", None) == pltpu.VMEM
    ]
    scores = sizes.heads * sizes.queries // sizes.parts * attention.group * sizes.pages * attention.page_size
    return sum(_padded_bytes(t.shape, t.dtype) for t in types) + 6 * scores


def vmem_capacity(target: KernelTarget) -> int:
    """Return the bytes of vector memory of a core."""
    return _VMEM_BYTES.get(target.kind, _DEFAULT_VMEM_BYTES)


def vmem_limit(target: KernelTarget) -> int:
    """Return how much of the vector memory a kernel may take."""
    return vmem_capacity(target) * 3 // 4


def _padded_bytes(shape: tuple[int, ...], dtype: np.dtype) -> int:
    """Return the size in memory tiles, whose rows are words of 32 bits."""
    *outer, rows, lanes = shape
    packing = 4 // np.dtype(dtype).itemsize
    return math.prod(outer) * (rows + -rows % packing) * (lanes + -lanes % LANES) * np.dtype(dtype).itemsize


def _heads_at_once(attention: TpuAttention, queries: int, pages: int) -> int:
    """Return how many heads are multiplied at once: several for a single query, as small products hide no latency."""
    if queries > 1:
        return 1
    most = max(1, _SCORES_BYTES // (4 * 8 * pages * attention.page_size))
    return max(n for n in range(1, attention.kv_heads + 1) if attention.kv_heads % n == 0 and n <= most)


def _parts(attention: TpuAttention, queries: int) -> int:
    """Return in how many parts a tile's queries are multiplied: parts of whole tiles of memory, of 8 rows."""
    if attention.value_lanes is None or queries == 1:
        return 1
    group = attention.group
    sizes = [n for n in range(queries, 0, -1) if queries % n == 0 and n * group % 8 == 0]
    return queries // next((n for n in sizes if n * group <= _PART_ROWS), sizes[-1])


def _whole_units(queries: int, attention: TpuAttention) -> int:
    return max(attention.unit, queries - queries % attention.unit)


def tile_queries(tokens: int, max_queries: int | None, attention: TpuAttention) -> int:
    """Return the queries of a tile of prefill for which `block_sizes` is asked."""
    # A row of few queries is one tile, even if it begins at the end of a unit.
    most = tokens if max_queries is None else max_queries + attention.unit - 1
    return min(_PREFILL_QUERIES, most + -most % attention.unit)
