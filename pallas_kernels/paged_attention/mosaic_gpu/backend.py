"""The Mosaic GPU backend: Hopper GPUs, with their copy engine and warpgroup products, by Pallas' own GPU lowering.

A KV write, a decode kernel and, in programs that have prefill chunks, a prefill kernel. What they can do and with
which block sizes is decided here; the kernels stand in `mosaic_gpu_decode.py` and `mosaic_gpu_prefill.py`.
"""

from __future__ import annotations

import os

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.paged_attention.layout import PagedKV
from pallas_kernels.paged_attention.mosaic_gpu.decode import decode
from pallas_kernels.paged_attention.mosaic_gpu.parts import WIDE, Attention, converted_slots
from pallas_kernels.paged_attention.mosaic_gpu.prefill import prefill
from pallas_kernels.paged_attention.problem import Problem, Target, is_float8
from pallas_kernels.paged_attention.tuning import tuned_blocks
from pallas_kernels.paged_attention.write import write_kv

MAX_GROUP = 16
HOPPER = (9, 0)

_CORES = 132
# The interpreter takes programs one after the other: just enough of them that some rows are split.
_INTERPRETED_CORES = 4

# A warpgroup that waits in the interpreter keeps a thread from the one it waits for.
_INTERPRETER_THREADS = 8

_PROGRAMS_A_CORE = 3
_MAX_SPLITS = 64

# Of the 227 KiB of shared memory a program may have; queries, weights and a part on its way out take the rest.
DECODE_BLOCK = 64
_RING_BYTES = 128 * 1024
_MAX_STAGES = 8


def refusal(problem: Problem, target: Target) -> str | None:
    """Why not, by name: the device, a type, the head size, the ratio of heads, the page size."""
    if target.platform not in ("cuda", "gpu", "cpu"):
        return f"mosaic_gpu compiles for NVIDIA GPUs, not for {target.platform}"
    if target.platform != "cpu" and target.capability != HOPPER:
        return f"mosaic_gpu is written for compute capability 9.0 (Hopper), not for {target.kind or 'this one'}"
    if target.platform == "cpu" and _cpu_threads() < _INTERPRETER_THREADS:
        return (
            f"mosaic_gpu's interpreter stands still with fewer than {_INTERPRETER_THREADS} threads of XLA's: set "
            f"NPROC={_INTERPRETER_THREADS} in the environment"
        )
    if problem.dtype != jnp.bfloat16:
        return f"mosaic_gpu takes queries of bfloat16, not of {problem.dtype.name}"
    if problem.kv_dtype != jnp.bfloat16 and not is_float8(problem.kv_dtype):
        return f"mosaic_gpu takes a KV cache of bfloat16 or float8_e4m3fn, not of {problem.kv_dtype.name}"
    if not 16 <= problem.head_dim <= 256 or problem.head_dim % 16:
        return f"mosaic_gpu takes heads of 16 to 256 in steps of 16, not of {problem.head_dim}"
    if problem.heads % problem.kv_heads or problem.heads // problem.kv_heads > MAX_GROUP:
        return f"mosaic_gpu takes up to {MAX_GROUP} query heads a KV head, not {problem.heads} for {problem.kv_heads}"
    if problem.page_size < 16 or problem.page_size & (problem.page_size - 1):
        return f"mosaic_gpu takes pages of a power of two from 16 on, not of {problem.page_size} tokens"
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
    tokens, heads, head_dim = q.shape
    kv_heads = k.shape[1]
    problem = Problem(heads, kv_heads, head_dim, kv.page_size, q.dtype, kv.keys.dtype)

    def attention(blocks: dict[str, int]) -> Attention:
        return Attention(
            kv_heads=kv_heads,
            group=heads // kv_heads,
            head_dim=head_dim,
            page_size=kv.page_size,
            scale=scale,
            window=window,
            soft_cap=soft_cap,
            block=blocks["block"],
            stages=blocks["stages"],
            warpgroups=blocks["warpgroups"],
            p_smem=interpret or bool(blocks["p_smem"]),
            converts=is_float8(kv.keys.dtype),
            interpret=interpret,
        )

    kv = write_kv(k, v, kv, layer, page_table, query_starts, kv_lens, num_seqs)
    rows = min(tokens, page_table.shape[0])
    sizes = tuned_blocks(target, "mosaic_gpu", "decode", problem) or _decode_sizes(problem)
    splits = _splits(rows * kv_heads, page_table.shape[1] * kv.page_size // sizes["block"], interpret=interpret)
    out = decode(q[:rows], kv, layer, page_table, kv_lens, num_decodes, sinks, attention(sizes), splits)
    if decode_only:
        return out, kv
    sizes = tuned_blocks(target, "mosaic_gpu", "prefill", problem) or _prefill_sizes(
        problem, masked=window is not None or soft_cap is not None
    )
    out = jnp.pad(out, ((0, tokens - rows), (0, 0), (0, 0)))
    chunks = prefill(q, kv, layer, page_table, query_starts, kv_lens, num_decodes, num_seqs, sinks, attention(sizes))
    return jnp.where((jnp.arange(tokens) < num_decodes)[:, None, None], out, chunks), kv


def candidates(kind: str, problem: Problem, target: Target) -> list[dict[str, int]]:
    """What to time on a device for the tuned table; what doesn't compile there is passed over."""
    if kind == "decode":
        return [
            {"block": block, "stages": stages, "warpgroups": 1, "p_smem": p_smem}
            for block in (64, 128)
            for stages in (2, 3, 4, 6, 8)
            for p_smem in (0, 1)
        ]
    return [
        {"block": block, "stages": stages, "warpgroups": warpgroups, "p_smem": p_smem}
        for block in (64, 128)
        for stages in range(1 if is_float8(problem.kv_dtype) else 2, 5)
        for warpgroups in (1, 2)
        for p_smem in (0, 1)
    ]


def _cpu_threads() -> int:
    """Threads that XLA takes on a CPU."""
    return int(os.environ.get("NPROC") or os.cpu_count() or 1)


def _splits(programs: int, blocks: int, *, interpret: bool) -> int:
    """Parts of a row, so that there are some programs a core; by static shapes alone."""
    wanted = (_INTERPRETED_CORES if interpret else _CORES) * _PROGRAMS_A_CORE
    return max(1, min(-(-wanted // programs), blocks, _MAX_SPLITS))


def _decode_sizes(problem: Problem) -> dict[str, int]:
    """As many bytes under way as one program a core leaves room for: its registers allow no second one."""
    block = 2 * DECODE_BLOCK * problem.head_dim
    converted = converted_slots(problem.head_dim) * block * problem.dtype.itemsize
    room = _RING_BYTES - (converted if is_float8(problem.kv_dtype) else 0)
    stages = min(_MAX_STAGES, room // (block * problem.kv_dtype.itemsize))
    return {"block": DECODE_BLOCK, "stages": stages, "warpgroups": 1, "p_smem": problem.head_dim > WIDE}


def _prefill_sizes(problem: Problem, *, masked: bool) -> dict[str, int]:
    """As large as the registers hold: those of the sums, and of a block's logits beside what masks them.

    Of fp8, beside large blocks that were converted, shared memory holds one more, which is enough: those are ahead.
    """
    if problem.head_dim > WIDE:
        return {"block": 64, "stages": 2, "warpgroups": 1, "p_smem": 0}
    stages = 1 if is_float8(problem.kv_dtype) and not masked else 2
    return {"block": 64 if masked else 128, "stages": stages, "warpgroups": 2, "p_smem": 0}
