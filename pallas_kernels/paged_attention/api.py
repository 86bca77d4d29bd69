"""The public functions: one contract, several backends."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.dispatch import Backend
from pallas_kernels.paged_attention.arguments import AttentionOptions, LatentPreparation, Preparation, Rows
from pallas_kernels.paged_attention.backends import BACKENDS, REFERENCE
from pallas_kernels.paged_attention.layout import PagedKV
from pallas_kernels.paged_attention.write import as_pool_dtype, write_kv


def paged_attention(
    q: Float[Array, "tokens heads head_dim"],
    k: Float[Array, "tokens kv_heads head_dim"] | None,
    v: Float[Array, "tokens kv_heads head_dim"] | None,
    kv: PagedKV,
    layer: int | Int[Array, ""],
    rows: Rows,
    options: AttentionOptions,
    backend: Backend = REFERENCE,
) -> tuple[Float[Array, "tokens heads value_dim"], PagedKV]:
    """Compute causal attention of ragged queries over paged keys and values, and write the new `k` and `v`.

    The output of padding tokens is unspecified, and they are not written. Contents of pages that the page table names
    beyond a row's own pages are never used and may be NaN. So may tokens before the windows of all queries of a row,
    though their entries are page ids as well.

    Without `k` and `v`, the pool has the new tokens already and is only read: another layer of this step wrote them.

    With a pool of latent rows, `k` are the new rows, and there is no `v`: the value of a token is the first
    `kv.value_dim` numbers of its row, and so the output has heads of that size.

    If the pool holds fp8, the layer's `scales` divide what is written and multiply what is read.

    Returns the attention output in `q`'s dtype, accumulated in float32, and the pool with the new tokens in place.
    """
    with jax.named_scope("paged_attention"):
        out, kv = BACKENDS.module(backend.name).paged_attention(q, k, v, kv, layer, rows, options, backend)
    return out, kv


def write_tokens(
    k: Float[Array, "tokens kv_heads head_dim"],
    v: Float[Array, "tokens kv_heads head_dim"] | None,
    kv: PagedKV,
    layer: int | Int[Array, ""],
    rows: Rows,
    backend: Backend = REFERENCE,
) -> PagedKV:
    """Return the pool with the new tokens, as `paged_attention` writes them; it may then be called without them."""
    module: Any = BACKENDS.module(backend.name)
    with jax.named_scope("paged_attention"):
        if hasattr(module, "write_tokens"):
            written: PagedKV = module.write_tokens(k, v, kv, layer, rows, backend)
            return written
        return write_kv(k, v, kv, layer, rows)


def as_stored(
    x: Float[Array, "tokens kv_heads head_dim"], kv: PagedKV, layer: int | Int[Array, ""]
) -> Float[Array, "tokens kv_heads head_dim"]:
    """Return keys, or latent rows, as they are once they were written to the pool and read again."""
    stored = as_pool_dtype(x, kv, layer, 0)
    if kv.scales is None:
        return stored.astype(x.dtype)
    return (stored.astype(jnp.float32) * kv.scales[0, layer][:, None]).astype(x.dtype)


def qkv_attention(
    qkv: Float[Array, "tokens width"],
    preparation: Preparation,
    kv: PagedKV,
    layer: int | Int[Array, ""],
    rows: Rows,
    options: AttentionOptions,
    backend: Backend,
) -> tuple[Float[Array, "tokens heads head_dim"], PagedKV]:
    """Compute `paged_attention` of the raw product of the projections; only for backends that take it.

    `qkv` has for each KV head its group of query heads, its key and its value. The result of each part of the
    `preparation` is rounded to the dtype of `qkv`, as is the output. Only weights in float32 multiply what isn't
    rounded yet.
    """
    module: Any = BACKENDS.module(backend.name)
    with jax.named_scope("paged_attention"):
        out, kv = module.qkv_attention(qkv, preparation, kv, layer, rows, options, backend)
    return out, kv


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
    """Compute `paged_attention` over latent rows of the raw products of the projections, where a backend takes them.

    A query is its `q_latent`, and the last numbers of its `q`, not rotated yet. A new row is the end of its `down`,
    neither normalized nor rotated.
    """
    module: Any = BACKENDS.module(backend.name)
    with jax.named_scope("paged_attention"):
        out, kv = module.latent_attention(q_latent, q, down, preparation, kv, layer, rows, options, backend)
    return out, kv
