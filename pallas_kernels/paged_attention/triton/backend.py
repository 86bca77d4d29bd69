"""The Triton backend: NVIDIA GPUs from Ampere on, by Pallas' Triton lowering.

It has a kernel that writes new tokens, a decode kernel and, for programs with prefill chunks, a prefill kernel. This
module decides what they support and with which block sizes they run, `latent_sizes.py` for latent rows; the kernels are
in `qkv.py`, `write.py`, `latent_write.py`, `decode.py` and `prefill.py`.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from pallas_kernels.dispatch import Backend
from pallas_kernels.paged_attention.arguments import AttentionOptions, Preparation, Rows
from pallas_kernels.paged_attention.layout import KVLayout, PagedKV
from pallas_kernels.paged_attention.problem import Problem, is_float8
from pallas_kernels.paged_attention.triton import latent_sizes
from pallas_kernels.paged_attention.triton.decode import MIN_ROWS, DecodeBlocks, decode
from pallas_kernels.paged_attention.triton.latent_write import LatentPreparation, write_latent
from pallas_kernels.paged_attention.triton.prefill import PrefillBlocks, prefill
from pallas_kernels.paged_attention.triton.qkv import write_qkv
from pallas_kernels.paged_attention.triton.tiles import PoolRefs, TritonAttention, flat
from pallas_kernels.paged_attention.triton.write import write
from pallas_kernels.paged_attention.tuning import tuned_blocks
from pallas_kernels.target import KernelTarget

MAX_GROUP = 16
DTYPES = ("float32", "bfloat16", "float16")

# Streaming multiprocessors, if the target doesn't say how many, and KiB of shared memory of each: Hopper's, others'.
_CORES = 132
_SHARED_KIB, _LESS_SHARED_KIB = 228, {(8, 0): 164, (8, 6): 100, (8, 9): 100, (12, 0): 100}

# Warps that a core runs at once, limited by decode's registers; fewer with heads wider than 128, fp8 to convert, or
# tiles of more than 16 rows.
_WARPS_A_CORE, _LARGE_WARPS_A_CORE = 12, 8

# The shared memory of a decode's queries, sums and page ids, besides the tiles in flight.
_DECODE_SHARED_KIB = 8

# The first compute capability (Ada's) with instructions that convert fp8; before it, Triton converts only e5m2, by
# shifting bits.
_CONVERTS_FP8 = (8, 9)

_MAX_SPLITS = 64
_PARTIAL_BYTES = 32 * 2**20


def refusal(problem: Problem, target: KernelTarget) -> str | None:
    """Return what isn't supported (dtype, size of heads or rows, number of heads, page size), or None."""
    if problem.dtype.name not in DTYPES:
        return f"triton computes in {', '.join(DTYPES)}, not in {problem.dtype.name}"
    if problem.kv_dtype == jnp.float8_e4m3fn:
        if target.capability is not None and target.capability < _CONVERTS_FP8:
            return (
                f"a KV cache of float8_e4m3fn needs compute capability 8.9 (Ada) or newer, not {target.kind}, which "
                "takes float8_e5m2"
            )
    elif not is_float8(problem.kv_dtype) and problem.kv_dtype.name not in DTYPES:
        return f"triton reads KV caches of {', '.join(DTYPES)} and fp8, not of {problem.kv_dtype.name}"
    if why := _refused_heads(problem) if problem.value_dim is None else latent_sizes.refusal(problem):
        return why
    if problem.page_size & (problem.page_size - 1):
        return f"triton takes pages whose size is a power of two, not of {problem.page_size} tokens"
    return None


def _refused_heads(problem: Problem) -> str | None:
    """Return why heads of this size or number aren't supported, or None."""
    if not 16 <= problem.head_dim <= 512 or problem.head_dim % 8:
        return f"triton takes heads of 16 to 512 in steps of 8, not of {problem.head_dim}"
    if problem.heads % problem.kv_heads or problem.heads // problem.kv_heads > MAX_GROUP:
        return f"triton takes up to {MAX_GROUP} query heads a KV head, not {problem.heads} for {problem.kv_heads}"
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
    attention = _decode_facts((q,), kv, rows, options, backend)
    if k is None:
        arrivals = jnp.zeros((len(q), attention.kv_heads), jnp.int32)
    else:
        slots = rows.slots(len(q), kv.page_size)
        kv, arrivals = write(k, v, kv, jnp.full((1,), layer, jnp.int32), slots, attention)
    return _attend((q,), arrivals, kv, layer, rows, options, backend)


def qkv_attention(
    qkv: Float[Array, "tokens width"],
    preparation: Preparation,
    kv: PagedKV,
    layer: int | Int[Array, ""],
    rows: Rows,
    options: AttentionOptions,
    backend: Backend,
) -> tuple[Float[Array, "tokens heads head_dim"], PagedKV]:
    """Compute `api.qkv_attention`."""
    slots = rows.slots(len(qkv), kv.page_size)
    q, kv, arrivals = write_qkv(qkv, preparation, kv, layer, slots, interpret=backend.interpret)
    return _attend((q,), arrivals, kv, layer, rows, options, backend)


def latent_attention(
    q_latent: Float[Array, "tokens heads value_dim"],
    q: Float[Array, "tokens heads query_dim"],
    down: Float[Array, "tokens width"],
    preparation: LatentPreparation,
    kv: PagedKV,
    layer: int | Int[Array, ""],
    rows: Rows,
    options: AttentionOptions,
    backend: Backend,
) -> tuple[Float[Array, "tokens heads value_dim"], PagedKV]:
    """Compute `paged_attention` over latent rows of the raw products of the projections.

    A query is its `q_latent`, and the last numbers of its `q`, not rotated yet. A new row is the end of its `down`,
    neither normalized nor rotated.
    """
    items = _decode_facts((q_latent,), kv, rows, options, backend).kv_heads
    slots = rows.slots(len(q), kv.page_size)
    rotated, kv, arrivals = write_latent(down, q, preparation, kv, layer, slots, items, interpret=backend.interpret)
    return _attend((q_latent, rotated), arrivals, kv, layer, rows, options, backend)


def _problem(q: tuple[Float[Array, "tokens heads numbers"], ...], kv: PagedKV) -> Problem:
    _, heads, _ = q[0].shape
    return Problem(heads, kv.num_kv_heads, kv.keys.shape[3], kv.page_size, q[0].dtype, kv.keys.dtype, kv.value_dim)


def _decode_facts(
    q: tuple[Float[Array, "tokens heads numbers"], ...],
    kv: PagedKV,
    rows: Rows,
    options: AttentionOptions,
    backend: Backend,
) -> TritonAttention:
    problem = _problem(q, kv)
    return _facts(kv, problem, _decode_group(problem, backend.target, rows.max_queries or 1), options, backend)


def _facts(kv: PagedKV, problem: Problem, group: int, options: AttentionOptions, backend: Backend) -> TritonAttention:
    """Return the facts of kernels whose items have `group` query heads."""
    _check_addressable(kv)
    _, entries, page_size, head_dim = kv.keys.shape
    return TritonAttention(
        problem.heads // group,
        group,
        head_dim,
        page_size,
        kv.num_pages,
        entries,
        options.scale,
        options.window,
        options.soft_cap,
        backend.interpret,
        kv.value_dim,
    )


def _attend(
    q: tuple[Float[Array, "tokens heads numbers"], ...],
    arrivals: Int[Array, "tokens items"],
    kv: PagedKV,
    layer: int | Int[Array, ""],
    rows: Rows,
    options: AttentionOptions,
    backend: Backend,
) -> tuple[Float[Array, "tokens heads value_dim"], PagedKV]:
    """Attend to tokens that are all in the pool."""
    problem, target, tokens = _problem(q, kv), backend.target, len(q[0])
    decodes = None if rows.chunks_only else rows.decodes(tokens)
    layers, pools = jnp.full((1,), layer, jnp.int32), [flat(pool) for pool in kv.pools]
    pool = PoolRefs(pools[0], None if kv.value_dim is not None else pools[1], kv.scales, layers, rows.page_table)
    out = None
    if decodes is not None:
        attention = _decode_facts(q, kv, rows, options, backend)
        count = min(tokens, len(decodes.kv_lens))
        blocks = decode_blocks_for(problem, target, rows=count, queries=rows.max_queries or 1)
        out = decode(q, arrivals, pool, decodes, options.sinks, attention, blocks)
    if out is None or rows.has_chunks:
        tiles = prefill_blocks_for(problem, target)
        attention = _facts(kv, problem, _prefill_group(problem, tiles.block_q), options, backend)
        out = prefill(q, out, pool, rows, options.sinks, attention, tiles)
    return out, kv


def decode_blocks_for(problem: Problem, target: KernelTarget, *, rows: int, queries: int = 1) -> DecodeBlocks:
    """Return tuned block sizes or those of the rule, with as many splits as fill the device.

    Rows are queries, of which up to `queries` are consecutive ones of a sequence.
    """
    group, sizes = _decode_group(problem, target, queries), dict(_decode_blocks(problem, target, queries))
    packed = sizes.pop("block_rows", None) or _packed_rows(problem, target)
    queries = max(1, min(queries, packed // group))
    tile = sizes["block_kv"] * sum(_tile_lanes(problem)) * problem.kv_dtype.itemsize
    # Half of the stages hold page ids.
    shared = (sizes["num_stages"] - 1) // 2 * tile + _DECODE_SHARED_KIB * 1024
    if problem.value_dim is not None:
        shared += packed * sum(_tile_lanes(problem)) * problem.dtype.itemsize
    programs = _programs(problem, target, sizes["num_warps"], shared, large=queries * group > MIN_ROWS)
    splits = min(_MAX_SPLITS, pl.cdiv(programs, pl.cdiv(rows, queries) * (problem.heads // group)))
    room = _PARTIAL_BYTES // (rows * problem.heads * (problem.value_dim or problem.head_dim) * 4)
    most = max(splits, min(room, _MAX_SPLITS))
    return DecodeBlocks(splits=splits, most_splits=most, programs=programs, queries=queries, **sizes)


def prefill_blocks_for(problem: Problem, target: KernelTarget) -> PrefillBlocks:
    """Return tuned block sizes or those of the rule."""
    rule = _prefill_sizes if problem.value_dim is None else latent_sizes.prefill_sizes
    sizes = tuned_blocks(target, "triton", "prefill", problem) or rule(problem, target)
    lanes, loaded = sum(_tile_lanes(problem)), (sizes["num_stages"] - 1) // 2 * sizes["block_kv"]
    of_queries = lanes // 2 if problem.value_dim is None else lanes
    shared = of_queries * sizes["block_q"] * problem.dtype.itemsize + lanes * loaded * problem.kv_dtype.itemsize
    # Besides the sums of wide heads, registers hold queries, or the masks of lanes and rows that only fill a tile.
    masks_all = problem.head_dim > 128 and (_is_padded(problem) or _queries_in_registers(target))
    return PrefillBlocks(masks_all=masks_all, programs=_programs(problem, target, sizes["num_warps"], shared), **sizes)


def _decode_blocks(problem: Problem, target: KernelTarget, queries: int) -> dict[str, int]:
    """Return tuned block sizes or those of the rule; for latent rows also `block_rows`, the rows of a tile of queries.

    `queries` is the most that a sequence has.
    """
    if tuned := tuned_blocks(target, "triton", "decode", problem):
        return tuned
    if problem.value_dim is None:
        return _decode_sizes(problem, target)
    return latent_sizes.decode_sizes(problem, target, queries)


def _decode_group(problem: Problem, target: KernelTarget, queries: int) -> int:
    """Return how many heads an item of decode has."""
    if problem.value_dim is None:
        return problem.heads // problem.kv_heads
    return latent_sizes.group_of(problem.heads, _decode_blocks(problem, target, queries)["block_rows"])


def _prefill_group(problem: Problem, block_q: int) -> int:
    """Return how many heads an item of prefill has."""
    if problem.value_dim is None:
        return problem.heads // problem.kv_heads
    return latent_sizes.group_of(problem.heads, block_q)


def _tile_lanes(problem: Problem) -> tuple[int, int]:
    """Return the lanes of a token's tiles: of its key and value, or of a latent row's value and other numbers."""
    first, second = problem.head_dim, problem.head_dim
    if problem.value_dim is not None:
        first, second = problem.value_dim, problem.head_dim - problem.value_dim
    return pl.next_power_of_2(first), pl.next_power_of_2(second)


def _programs(problem: Problem, target: KernelTarget, num_warps: int, shared_bytes: int, *, large: bool = False) -> int:
    """Return how many programs a device runs at once. With too many of them, the last would start late."""
    large |= problem.head_dim > 128 or is_float8(problem.kv_dtype)
    by_registers = (_LARGE_WARPS_A_CORE if large else _WARPS_A_CORE) // num_warps
    by_shared = _LESS_SHARED_KIB.get(target.capability or (9, 0), _SHARED_KIB) * 1024 // shared_bytes
    return (target.cores or _CORES) * max(1, min(by_registers, by_shared))


def candidates(kind: str, problem: Problem, target: KernelTarget) -> list[dict[str, int]]:
    """Return the block sizes to time for the tuned table; those that don't compile on the device are skipped."""
    if problem.value_dim is not None:
        return latent_sizes.candidates(kind, problem)
    block_qs, block_kvs = ((32, 64), (16, 32)) if problem.head_dim > 256 else ((64, 128), (32, 64, 128))
    if kind == "decode":
        return [
            {"block_kv": block_kv, "num_warps": num_warps, "num_stages": num_stages}
            for block_kv in block_kvs
            for num_warps in (2, 4, 8)
            for num_stages in (3, 5, 7)
        ]
    return [
        {"block_q": block_q, "block_kv": block_kv, "num_warps": num_warps, "num_stages": num_stages}
        for block_q in block_qs
        for block_kv in block_kvs
        for num_warps in (4, 8)
        for num_stages in (3, 5)
    ]


def _decode_sizes(problem: Problem, target: KernelTarget) -> dict[str, int]:
    """Return sizes for tiles of 16 KiB of keys and 16 KiB of values, two of each in flight.

    Tiles are half as large with a small shared memory, and with float32, which is multiplied without tensor cores and
    takes more registers. They are also half as large with fp8, unless heads are of 128: for other heads, its conversion
    takes too many registers. They are a quarter without instructions for that conversion.
    """
    lanes, halved = pl.next_power_of_2(problem.head_dim), _small_shared_memory(target) or problem.dtype.itemsize == 4
    width = problem.kv_dtype.itemsize if lanes == 128 and not halved else problem.dtype.itemsize
    block_kv = (8 * 1024 if halved else 16 * 1024) // (lanes * width)
    if _shifts_fp8(problem, target):
        block_kv = 4 * 1024 // (lanes * problem.dtype.itemsize)
    # The smallest tiles of float32 are so large from heads of 512 that a small shared memory holds one of them.
    stages = 3 if lanes * problem.kv_dtype.itemsize >= 2048 and _small_shared_memory(target) else 5
    return {"block_kv": min(128, max(16, block_kv)), "num_warps": 4, "num_stages": stages}


def _packed_rows(problem: Problem, target: KernelTarget) -> int:
    """Return how many rows a tile of packed queries has at most, so that no registers are spilled.

    With 16 rows, as many as a single query's tile has, tensor cores compute nothing more than without packing.
    """
    if is_float8(problem.kv_dtype) and _queries_in_registers(target):
        return 1
    if problem.dtype.itemsize == 4 or is_float8(problem.kv_dtype) or problem.head_dim > 256:
        return MIN_ROWS
    return 64 if problem.head_dim <= 128 and (target.capability or (9, 0)) == (9, 0) else 32


def _prefill_sizes(problem: Problem, target: KernelTarget) -> dict[str, int]:
    """Return the largest tiles that compile without spilling registers."""
    lanes, capability = pl.next_power_of_2(problem.head_dim), target.capability or (9, 0)
    if problem.dtype.itemsize == 4:
        sizes = (32, 32, 8, 3) if lanes <= 64 else (16, 16, 4, 3)
    elif lanes > 256:
        # With 64 rows, the sums take half of all registers. The rest is too few for masks of padding, for fp8 to
        # convert, or for products as Hopper and later GPUs start them with so many rows.
        plain = not _is_padded(problem) and not is_float8(problem.kv_dtype)
        sizes = (64, 16, 8, 3) if _queries_in_registers(target) and plain else (32, 32, 8, 3)
    elif _queries_in_registers(target):
        # Here fp8 is converted in registers, besides those of the queries.
        block_kv = (64 if lanes <= 64 else 32) // (2 if is_float8(problem.kv_dtype) else 1)
        sizes = (128, block_kv, 8, 5) if lanes <= 128 else (64, block_kv, 8, 3)
    elif lanes <= 128:
        sizes = (128, 128 if lanes <= 64 else 64, 8, 5)
    else:
        sizes = (128, 32, 8, 5) if capability < (10, 0) else (64, 32, 8, 3)
    return dict(zip(("block_q", "block_kv", "num_warps", "num_stages"), sizes, strict=True))


def _shifts_fp8(problem: Problem, target: KernelTarget) -> bool:
    """Return whether the pool holds fp8 that the device has no instruction to convert, which takes more registers."""
    return is_float8(problem.kv_dtype) and (target.capability or (9, 0)) < _CONVERTS_FP8


def _is_padded(problem: Problem) -> bool:
    """Return whether lanes of heads, or rows of a group, only fill a tile, as its sizes are powers of two."""
    sizes = problem.head_dim, problem.heads // problem.kv_heads
    return any(size < pl.next_power_of_2(size) for size in sizes)


def _queries_in_registers(target: KernelTarget) -> bool:
    """Return whether prefill holds queries in registers: tensor cores take them from there before Hopper."""
    return (target.capability or (9, 0)) < (9, 0) or _small_shared_memory(target)


def _small_shared_memory(target: KernelTarget) -> bool:
    """Return whether shared memory is the 99 KiB of smaller GPUs: compute capability 8.6, 8.9, 12.x."""
    return target.capability is not None and target.capability[0] in (8, 12) and target.capability != (8, 0)


def addressable_pages(layout: KVLayout, shards: int) -> int:
    """Return how many of a layer's pages kernels can address on one of `shards` of the heads."""
    page = layout.num_layers * layout.num_kv_heads // shards * layout.page_size * layout.lanes
    if page == 0:
        return layout.num_pages
    return _addressable(layout.num_pages * page, layout.dtype) // page


def _addressable(elements: int, dtype: np.dtype) -> int:
    """Return how many elements of a pool's keys (or values) kernels can address.

    Pallas' Triton lowering computes addresses in signed 32 bits if an array has at most 4 GiB. That is too little for
    fp8 pools between 2 and 4 GiB.
    """
    if elements >= 2**31 and elements * dtype.itemsize <= 2**32:
        return 2**31 - 1
    return elements


def _check_addressable(kv: PagedKV) -> None:
    if _addressable(kv.keys.size, kv.keys.dtype) < kv.keys.size:
        raise ValueError(
            f"the triton attention backend can't address an fp8 KV pool whose keys take {kv.keys.nbytes / 2**30:.2f} "
            "GiB, between 2 and 4 GiB: give it fewer or more tokens, or choose attention backend 'reference'"
        )
