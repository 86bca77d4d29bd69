"""The Triton backend: NVIDIA GPUs from Ampere on, by Pallas' Triton lowering.

It has a kernel that writes new tokens, a decode kernel and, for programs with prefill chunks, a prefill kernel. This
module decides what they support, `block_sizes.py` and `latent_sizes.py` with which block sizes they run; the kernels
are in `qkv.py`, `write.py`, `latent_write.py`, `decode.py` and `prefill.py`.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from pallas_kernels.dispatch import Backend
from pallas_kernels.paged_attention.arguments import AttentionOptions, LatentPreparation, Preparation, Rows
from pallas_kernels.paged_attention.layout import KVLayout, PagedKV
from pallas_kernels.paged_attention.problem import Problem, is_float8
from pallas_kernels.paged_attention.triton import latent_sizes
from pallas_kernels.paged_attention.triton.block_sizes import (
    CONVERTS_FP8,
    candidates,
    decode_blocks_for,
    decode_group,
    prefill_blocks_for,
    prefill_group,
)
from pallas_kernels.paged_attention.triton.decode import decode
from pallas_kernels.paged_attention.triton.latent_write import write_latent
from pallas_kernels.paged_attention.triton.prefill import prefill
from pallas_kernels.paged_attention.triton.qkv import write_qkv
from pallas_kernels.paged_attention.triton.tiles import PoolRefs, TritonAttention, flat
from pallas_kernels.paged_attention.triton.write import write
from pallas_kernels.target import KernelTarget

__all__ = ["addressable_pages", "candidates", "latent_attention", "paged_attention", "qkv_attention", "refusal"]

MAX_GROUP = 16
DTYPES = ("float32", "bfloat16", "float16")


def refusal(problem: Problem, target: KernelTarget) -> str | None:
    """Return what isn't supported (dtype, size of heads or rows, number of heads, page size), or None."""
    if problem.dtype.name not in DTYPES:
        return f"triton computes in {', '.join(DTYPES)}, not in {problem.dtype.name}"
    if problem.kv_dtype == jnp.float8_e4m3fn:
        if target.capability is not None and target.capability < CONVERTS_FP8:
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


def write_tokens(
    k: Float[Array, "tokens kv_heads head_dim"],
    v: Float[Array, "tokens kv_heads head_dim"] | None,
    kv: PagedKV,
    layer: int | Int[Array, ""],
    rows: Rows,
    backend: Backend,
) -> PagedKV:
    """Compute `api.write_tokens`."""
    attention = _facts(kv, _problem((k,), kv), 1, AttentionOptions(1.0), backend)
    slots = rows.slots(len(k), kv.page_size)
    kv, _ = write(k, v, kv, jnp.full((1,), layer, jnp.int32), slots, attention)
    return kv


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
    """Compute `api.latent_attention`."""
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
    return _facts(kv, problem, decode_group(problem, backend.target, rows.max_queries or 1), options, backend)


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
        attention = _facts(kv, problem, prefill_group(problem, tiles.block_q), options, backend)
        out = prefill(q, out, pool, rows, options.sinks, attention, tiles)
    return out, kv


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
