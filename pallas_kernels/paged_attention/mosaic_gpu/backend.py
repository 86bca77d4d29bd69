"""The Mosaic GPU backend: Hopper GPUs, with their copy engine and warpgroup products, by Pallas' own GPU lowering.

It has a decode kernel and, for programs with prefill chunks, a prefill kernel. This module decides what they support
and with which block sizes they run; the kernels are in `decode.py` and `prefill.py`. Triton's kernel writes new tokens.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.dispatch import Backend
from pallas_kernels.paged_attention.arguments import AttentionOptions, Preparation, Rows
from pallas_kernels.paged_attention.layout import PagedKV
from pallas_kernels.paged_attention.mosaic_gpu.decode import decode
from pallas_kernels.paged_attention.mosaic_gpu.parts import WIDE, MosaicGpuAttention, converted_slots
from pallas_kernels.paged_attention.mosaic_gpu.prefill import prefill
from pallas_kernels.paged_attention.problem import Problem, is_float8
from pallas_kernels.paged_attention.triton.qkv import write_qkv
from pallas_kernels.paged_attention.tuning import tuned_blocks
from pallas_kernels.paged_attention.write import write_kv
from pallas_kernels.target import KernelTarget

MAX_GROUP = 16

_CORES = 132
# The interpreter runs programs one after another: just enough of them that some rows are split.
_INTERPRETED_CORES = 4

_PROGRAMS_A_CORE = 3
_MAX_SPLITS = 64

# Rings take `_RING_BYTES` of a program's 227 KiB of shared memory; queries, weights and outgoing results take the rest.
DECODE_BLOCK = 64
_RING_BYTES = 128 * 1024
_MAX_STAGES = 8


def refusal(problem: Problem, target: KernelTarget) -> str | None:
    """Return what isn't supported (dtype, head size, ratio of heads or page size), or None."""
    if problem.value_dim is not None:
        return "mosaic_gpu has no kernel for latent rows"
    if problem.dtype != jnp.bfloat16:
        return f"mosaic_gpu takes queries of bfloat16, not of {problem.dtype.name}"
    if problem.kv_dtype not in (jnp.bfloat16, jnp.float8_e4m3fn):
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
    k: Float[Array, "tokens kv_heads head_dim"] | None,
    v: Float[Array, "tokens kv_heads head_dim"] | None,
    kv: PagedKV,
    layer: int | Int[Array, ""],
    rows: Rows,
    options: AttentionOptions,
    backend: Backend,
) -> tuple[Float[Array, "tokens heads head_dim"], PagedKV]:
    """Compute `api.paged_attention`."""
    if k is not None and v is not None:
        kv = write_kv(k, v, kv, layer, rows)
    return _attend(q, kv, layer, rows, options, backend), kv


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
    q, kv, _ = write_qkv(qkv, preparation, kv, layer, rows.slots(len(qkv), kv.page_size), interpret=backend.interpret)
    return _attend(q, kv, layer, rows, options, backend), kv


def _attend(
    q: Float[Array, "tokens heads head_dim"],
    kv: PagedKV,
    layer: int | Int[Array, ""],
    rows: Rows,
    options: AttentionOptions,
    backend: Backend,
) -> Float[Array, "tokens heads head_dim"]:
    """Attend to tokens that are all in the pool."""
    tokens, heads, head_dim = q.shape
    decodes, page_table, sinks = rows.decodes(tokens), rows.page_table, options.sinks
    if decodes.table_rows is not None:
        page_table = page_table[decodes.table_rows]
    target, interpret = backend.target, backend.interpret
    kv_heads = kv.num_kv_heads
    problem = Problem(heads, kv_heads, head_dim, kv.page_size, q.dtype, kv.keys.dtype)

    def attention(blocks: dict[str, int]) -> MosaicGpuAttention:
        return MosaicGpuAttention(
            kv_heads=kv_heads,
            group=heads // kv_heads,
            head_dim=head_dim,
            page_size=kv.page_size,
            scale=options.scale,
            window=options.window,
            soft_cap=options.soft_cap,
            block=blocks["block"],
            stages=blocks["stages"],
            warpgroups=blocks["warpgroups"],
            p_smem=interpret or bool(blocks["p_smem"]),
            converts=is_float8(kv.keys.dtype),
            interpret=interpret,
        )

    most = min(tokens, page_table.shape[0])
    out = None
    if not rows.chunks_only:
        sizes = tuned_blocks(target, "mosaic_gpu", "decode", problem) or _decode_sizes(problem)
        splits = _splits(most * kv_heads, page_table.shape[1] * kv.page_size // sizes["block"], interpret=interpret)
        out = decode(q[:most], kv, layer, page_table, decodes, sinks, attention(sizes), splits)
        if not rows.has_chunks:
            return out
    sizes = tuned_blocks(target, "mosaic_gpu", "prefill", problem) or _prefill_sizes(
        problem, masked=options.window is not None or options.soft_cap is not None
    )
    if out is not None:
        out = jnp.pad(out, ((0, tokens - most), (0, 0), (0, 0)))
    chunks = prefill(q, kv, layer, rows, sinks, attention(sizes))
    if out is None:
        return chunks
    return jnp.where((jnp.arange(tokens) < rows.num_decodes)[:, None, None], out, chunks)


def candidates(kind: str, problem: Problem, target: KernelTarget) -> list[dict[str, int]]:
    """Return the block sizes to time for the tuned table; those that don't compile on the device are skipped."""
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


def _splits(programs: int, blocks: int, *, interpret: bool) -> int:
    """Return into how many parts a row is split, so that each core has some programs. Only static shapes decide it."""
    wanted = (_INTERPRETED_CORES if interpret else _CORES) * _PROGRAMS_A_CORE
    return max(1, min(-(-wanted // programs), blocks, _MAX_SPLITS))


def _decode_sizes(problem: Problem) -> dict[str, int]:
    """Return sizes that keep as many bytes in flight as shared memory holds for one program a core.

    The registers of a program leave no room for a second one.
    """
    block = 2 * DECODE_BLOCK * problem.head_dim
    converted = converted_slots(problem.head_dim) * block * problem.dtype.itemsize
    room = _RING_BYTES - (converted if is_float8(problem.kv_dtype) else 0)
    stages = min(_MAX_STAGES, room // (block * problem.kv_dtype.itemsize))
    return {"block": DECODE_BLOCK, "stages": stages, "warpgroups": 1, "p_smem": problem.head_dim > WIDE}


def _prefill_sizes(problem: Problem, *, masked: bool) -> dict[str, int]:
    """Return the largest sizes for which registers hold the sums, a block's logits and their mask.

    For fp8, shared memory holds only one stored block besides large converted ones. That is enough, as converted blocks
    are already ahead of the products.
    """
    if problem.head_dim > WIDE:
        return {"block": 64, "stages": 2, "warpgroups": 1, "p_smem": 0}
    stages = 1 if is_float8(problem.kv_dtype) and not masked else 2
    return {"block": 64 if masked else 128, "stages": stages, "warpgroups": 2, "p_smem": 0}
