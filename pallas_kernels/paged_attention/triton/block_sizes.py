"""Block sizes on Triton: measured ones of the device, or those of a rule; and how many programs a device runs at once.

The rule for latent rows is in `latent_sizes.py`.
"""

from __future__ import annotations

from jax.experimental import pallas as pl

from pallas_kernels.paged_attention.problem import Problem, is_float8
from pallas_kernels.paged_attention.triton import latent_sizes
from pallas_kernels.paged_attention.triton.decode import MIN_ROWS, DecodeBlocks
from pallas_kernels.paged_attention.triton.prefill import PrefillBlocks
from pallas_kernels.paged_attention.tuning import tuned_blocks
from pallas_kernels.target import KernelTarget

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
CONVERTS_FP8 = (8, 9)

_MAX_SPLITS = 64
_PARTIAL_BYTES = 32 * 2**20


def decode_blocks_for(problem: Problem, target: KernelTarget, *, rows: int, queries: int = 1) -> DecodeBlocks:
    """Return tuned block sizes or those of the rule, with as many splits as fill the device.

    Rows are queries, of which up to `queries` are consecutive ones of a sequence.
    """
    group, sizes = decode_group(problem, target, queries), dict(_decode_blocks(problem, target, queries))
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
    masks_all = problem.head_dim > 128 and (_is_padded(problem) or queries_in_registers(target))
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


def decode_group(problem: Problem, target: KernelTarget, queries: int) -> int:
    """Return how many heads an item of decode has."""
    if problem.value_dim is None:
        return problem.heads // problem.kv_heads
    return latent_sizes.group_of(problem.heads, _decode_blocks(problem, target, queries)["block_rows"])


def prefill_group(problem: Problem, block_q: int) -> int:
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

    A tile of a single query has 16 rows as well, so tensor cores compute no more than without packing.
    """
    if is_float8(problem.kv_dtype) and queries_in_registers(target):
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
        sizes = (64, 16, 8, 3) if queries_in_registers(target) and plain else (32, 32, 8, 3)
    elif queries_in_registers(target):
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
    return is_float8(problem.kv_dtype) and (target.capability or (9, 0)) < CONVERTS_FP8


def _is_padded(problem: Problem) -> bool:
    """Return whether lanes of heads, or rows of a group, only fill a tile, as its sizes are powers of two."""
    sizes = problem.head_dim, problem.heads // problem.kv_heads
    return any(size < pl.next_power_of_2(size) for size in sizes)


def queries_in_registers(target: KernelTarget) -> bool:
    """Return whether prefill holds queries in registers: tensor cores take them from there before Hopper."""
    return (target.capability or (9, 0)) < (9, 0) or _small_shared_memory(target)


def _small_shared_memory(target: KernelTarget) -> bool:
    """Return whether shared memory is the 99 KiB of smaller GPUs: compute capability 8.6, 8.9, 12.x."""
    return target.capability is not None and target.capability[0] in (8, 12) and target.capability != (8, 0)
