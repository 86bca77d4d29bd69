"""Self-attention over the paged cache: projections, optional q/k norms, rotation, the kernel, output."""

from __future__ import annotations

import dataclasses
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxserve.layers.batch import KVLayer, KVPools, TokenBatch, replace_pool
from jaxserve.layers.linear import linear, row_parallel
from jaxserve.layers.norm import rms_norm, rms_norm_of_shards
from jaxserve.layers.rope import Rotation, rotate
from pallas_kernels.packed_matmul import PackedWeight
from pallas_kernels.paged_attention import Backend, paged_attention, qkv_attention


@flax.struct.dataclass
class AttentionParams:
    """The attention weights of one layer.

    `qkv` stores each KV head together with its group of query heads, so that shards are split by KV head. `q_norm` and
    `k_norm` are the weights of norms of each head, or, with a dimension of heads, of one norm of all heads.
    """

    qkv: Float[Array, "kv_heads group_plus_2 head_dim dim"] | PackedWeight
    output: Float[Array, "dim kv_heads group head_dim"] | PackedWeight
    qkv_bias: Float[Array, "kv_heads group_plus_2 head_dim"] | None
    output_bias: Float[Array, " dim"] | None
    q_norm: Float[Array, " head_dim"] | Float[Array, "kv_heads group head_dim"] | None
    k_norm: Float[Array, " head_dim"] | Float[Array, "kv_heads 1 head_dim"] | None


@dataclasses.dataclass(frozen=True)
class AttentionSettings:
    """The static settings of an attention layer; layers with equal settings share a trace.

    `scale` multiplies the products of queries and keys; None is one over the root of the head size.
    """

    norm_eps: float
    backend: Backend
    window: int | None = None
    scale: float | None = None
    soft_cap: float | None = None


@jax.named_scope("attention")
def self_attention(
    x: Float[Array, "tokens dim"],
    params: AttentionParams,
    batch: TokenBatch,
    kv: KVPools,
    layer: KVLayer,
    rotation: Rotation | None,
    settings: AttentionSettings,
    query_scale: Float[Array, " tokens"] | None = None,
) -> tuple[Float[Array, "tokens dim"], KVPools]:
    """Attend from the batch's tokens to their sequences, and write their keys and values to `kv`.

    Without `rotation`, positions have no effect but by order. `query_scale` multiplies the rotated queries of a token.
    """
    kv_heads, rows, head_dim, _ = params.qkv.shape
    bias = None if params.qkv_bias is None else params.qkv_bias.reshape(-1)
    weight = params.qkv.reshape(kv_heads * rows * head_dim, -1)
    pool, index, table = kv[layer.group], layer.index, batch.page_tables[layer.group]
    where = table, batch.query_starts, batch.kv_lens, batch.num_decodes, batch.num_seqs
    options: dict[str, Any] = {
        "scale": head_dim**-0.5 if settings.scale is None else settings.scale,
        "window": settings.window,
        "soft_cap": settings.soft_cap,
        "decode_only": batch.decode_only,
        "backend": settings.backend,
    }
    norms = None if params.q_norm is None or params.k_norm is None else (params.q_norm, params.k_norm)
    if settings.backend.takes_qkv and (norms is None or norms[0].ndim == 1):
        turns = None if rotation is None else (rotation[0][:, 0, 0], rotation[1][:, 0, 1])
        options |= {"eps": settings.norm_eps, "query_scale": query_scale}
        attended, pool = qkv_attention(linear(x, weight), bias, norms, turns, pool, index, *where, **options)
    else:
        heads = linear(x, weight, bias).reshape(len(x), kv_heads, rows, head_dim)
        q, k, v = _heads(heads, norms, rotation, settings.norm_eps)
        if query_scale is not None:
            q *= query_scale[:, None, None].astype(q.dtype)
        attended, pool = paged_attention(q, k, v, pool, index, *where, **options)
    output = params.output.reshape(params.output.shape[0], -1)
    return row_parallel(attended.reshape(len(x), -1), output, params.output_bias), replace_pool(kv, layer.group, pool)


def _heads(
    qkv: Float[Array, "tokens kv_heads group_plus_2 head_dim"],
    norms: tuple[Array, Array] | None,
    rotation: Rotation | None,
    eps: float,
) -> tuple[
    Float[Array, "tokens heads head_dim"],
    Float[Array, "tokens kv_heads head_dim"],
    Float[Array, "tokens kv_heads head_dim"],
]:
    """Return normalized and rotated queries and keys, and values.

    Queries and keys are normalized and rotated as one array: half the kernels, the same numbers.
    """
    tokens, kv_heads, rows, head_dim = qkv.shape
    group = rows - 2
    qk = qkv[:, :, : group + 1]
    if norms is not None:
        qk = _normed(qk, *norms, eps)
    if rotation is not None:
        qk = rotate(qk.reshape(tokens, kv_heads * (group + 1), head_dim), *rotation)
        qk = qk.reshape(tokens, kv_heads, group + 1, head_dim)
    return qk[:, :, :group].reshape(tokens, kv_heads * group, head_dim), qk[:, :, group], qkv[:, :, group + 1]


def _normed(
    qk: Float[Array, "tokens kv_heads group_plus_1 head_dim"], q_norm: Array, k_norm: Array, eps: float
) -> Float[Array, "tokens kv_heads group_plus_1 head_dim"]:
    """Normalize each head, or all queries and all keys of a token if the norms have a dimension of heads."""
    if q_norm.ndim == 1:
        group = qk.shape[2] - 1
        return rms_norm(qk, jnp.concatenate([jnp.tile(q_norm, (group, 1)), k_norm[None]]), eps)
    q, k = (
        rms_norm_of_shards(x.reshape(len(x), -1), norm.reshape(-1), eps).reshape(x.shape)
        for x, norm in ((qk[:, :, :-1], q_norm), (qk[:, :, -1:], k_norm))
    )
    return jnp.concatenate([q, k], axis=2)
