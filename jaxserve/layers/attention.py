"""Self-attention over the paged cache, or within packed texts: projections, optional q/k norms, rotation, the kernel,
output."""

from __future__ import annotations

import dataclasses

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxserve.layers.batch import KVLayer, KVPools, TokenBatch, paged_pool, replace_pool
from jaxserve.layers.linear import linear, row_parallel
from jaxserve.layers.norm import rms_norm, rms_norm_of_shards
from jaxserve.layers.rope import Rotation, rotate
from pallas_kernels.packed_attention import PackedOptions, packed_attention
from pallas_kernels.paged_attention import (
    AttentionOptions,
    Backend,
    Preparation,
    paged_attention,
    qkv_attention,
    takes_qkv,
)
from pallas_kernels.quantized_matmul import HeldWeight


@flax.struct.dataclass
class AttentionParams:
    """The attention weights of one layer.

    `qkv` stores each KV head together with its group of query heads, so that shards are split by KV head. Its `rows`
    are the query heads, then the key, then the value. There is no value if keys are values too, and neither key nor
    value if the layer reuses those of an earlier layer. `q_norm` and `k_norm` are the weights of norms of each head,
    or, with a dimension of heads, of one norm of all heads. The sigmoid of the product with `gate`, if there is one,
    multiplies the output of each head before the last projection.
    """

    qkv: Float[Array, "kv_heads rows head_dim dim"] | HeldWeight
    output: Float[Array, "dim kv_heads group head_dim"] | HeldWeight
    qkv_bias: Float[Array, "kv_heads rows head_dim"] | None
    output_bias: Float[Array, " dim"] | None
    q_norm: Float[Array, " head_dim"] | Float[Array, "kv_heads group head_dim"] | None
    k_norm: Float[Array, " head_dim"] | Float[Array, "kv_heads 1 head_dim"] | None
    sinks: Float[Array, "kv_heads group"] | None = None
    gate: Float[Array, "kv_heads group head_dim dim"] | HeldWeight | None = None


@dataclasses.dataclass(frozen=True)
class AttentionSettings:
    """The static settings of an attention layer; layers with equal settings share a trace.

    `scale` multiplies the products of queries and keys; None is one over the root of the head size. With
    `norm_values`, each value is scaled to unit mean square. With `keys_as_values`, values are the products of the key
    projection, before the norm and rotation of keys. If it is `bidirectional`, rows are whole texts, a window
    counts the positions on each side, and `backend` is one of `packed_attention`.
    """

    norm_eps: float
    backend: Backend
    window: int | None = None
    scale: float | None = None
    soft_cap: float | None = None
    norm_values: bool = False
    keys_as_values: bool = False
    bidirectional: bool = False


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
    distance_bias: Float[Array, "heads distances"] | None = None,
) -> tuple[Float[Array, "tokens dim"], KVPools]:
    """Attend from the batch's tokens to their sequences, and write their keys and values to `kv`.

    A layer that reuses the keys and values of an earlier one reads those of this step's tokens from `kv`, too. Without
    `rotation`, a position decides only which tokens are seen. `query_scale` multiplies the rotated queries of a token.
    Bidirectional layers neither read nor write `kv`; only they take a `distance_bias` (see `PackedOptions`).
    """
    kv_heads, rows, head_dim, _ = params.qkv.shape
    bias = None if params.qkv_bias is None else params.qkv_bias.reshape(-1)
    weight = params.qkv.reshape(kv_heads * rows * head_dim, -1)
    options = AttentionOptions(
        scale=head_dim**-0.5 if settings.scale is None else settings.scale,
        window=settings.window,
        soft_cap=settings.soft_cap,
        sinks=None if params.sinks is None else params.sinks.reshape(-1).astype(jnp.float32),
    )
    if settings.bidirectional:
        heads = linear(x, weight, bias).reshape(len(x), kv_heads, rows, head_dim)
        q, k, v = _heads(heads, params, rotation, settings, reuses=False)
        assert k is not None
        assert v is not None
        packed = PackedOptions(options.scale, settings.window, settings.soft_cap, distance_bias)
        attended = packed_attention(q, k, v, batch.texts, packed, settings.backend)
        return row_parallel(attended.reshape(len(x), -1), _output(params), params.output_bias), kv
    where = paged_pool(kv, layer.group), layer.index, batch.rows(layer.group), options, settings.backend
    norms = None if params.q_norm is None or params.k_norm is None else (params.q_norm, params.k_norm)
    if takes_qkv(settings.backend) and not layer.reuses and (norms is None or norms[0].ndim == 1):
        turns = None if rotation is None else (rotation[0][:, 0, 0], rotation[1][:, 0, 1])
        forms = settings.norm_values, settings.keys_as_values
        preparation = Preparation(settings.norm_eps, bias, norms, turns, query_scale, *forms)
        attended, pool = qkv_attention(linear(x, weight), preparation, *where)
    else:
        heads = linear(x, weight, bias).reshape(len(x), kv_heads, rows, head_dim)
        q, k, v = _heads(heads, params, rotation, settings, reuses=layer.reuses)
        if query_scale is not None:
            q *= query_scale[:, None, None].astype(q.dtype)
        attended, pool = paged_attention(q, k, v, *where)
    output, attended = _output(params), attended.reshape(len(x), -1)
    if params.gate is not None:
        gate = linear(x, params.gate.reshape(attended.shape[1], -1))
        attended = (attended.astype(jnp.float32) * jax.nn.sigmoid(gate.astype(jnp.float32))).astype(x.dtype)
    return row_parallel(attended, output, params.output_bias), replace_pool(kv, layer.group, pool)


def _output(params: AttentionParams) -> Float[Array, "dim inputs"] | HeldWeight:
    return params.output.reshape(params.output.shape[0], -1)


def _heads(
    qkv: Float[Array, "tokens kv_heads rows head_dim"],
    params: AttentionParams,
    rotation: Rotation | None,
    settings: AttentionSettings,
    *,
    reuses: bool,
) -> tuple[
    Float[Array, "tokens heads head_dim"],
    Float[Array, "tokens kv_heads head_dim"] | None,
    Float[Array, "tokens kv_heads head_dim"] | None,
]:
    """Return normalized and rotated queries and keys, and values; no keys and values if the layer `reuses` others.

    Queries and keys are normalized and rotated as one array: half the kernels, the same numbers.
    """
    tokens, kv_heads, rows, head_dim = qkv.shape
    keys = 0 if reuses else 1
    group = rows if reuses else rows - (1 if settings.keys_as_values else 2)
    qk = qkv[:, :, : group + keys]
    if params.q_norm is not None:
        qk = _normed(qk, params.q_norm, params.k_norm, settings.norm_eps)
    if rotation is not None:
        qk = rotate(qk.reshape(tokens, kv_heads * (group + keys), head_dim), *rotation)
        qk = qk.reshape(tokens, kv_heads, group + keys, head_dim)
    q = qk[:, :, :group].reshape(tokens, kv_heads * group, head_dim)
    if reuses:
        return q, None, None
    v = qkv[:, :, -1]
    if settings.norm_values:
        v = rms_norm(v, jnp.ones(head_dim, jnp.float32), settings.norm_eps)
    return q, qk[:, :, group], v


def _normed(
    qk: Float[Array, "tokens kv_heads rows head_dim"], q_norm: Array, k_norm: Array | None, eps: float
) -> Float[Array, "tokens kv_heads rows head_dim"]:
    """Normalize each head, or all queries and all keys of a token if the norms have a dimension of heads.

    Without `k_norm`, there are no keys.
    """
    if q_norm.ndim == 1:
        if k_norm is None:
            return rms_norm(qk, q_norm, eps)
        group = qk.shape[2] - 1
        return rms_norm(qk, jnp.concatenate([jnp.tile(q_norm, (group, 1)), k_norm[None]]), eps)
    parts = [(qk, q_norm)] if k_norm is None else [(qk[:, :, :-1], q_norm), (qk[:, :, -1:], k_norm)]
    normed = [rms_norm_of_shards(x.reshape(len(x), -1), norm.reshape(-1), eps).reshape(x.shape) for x, norm in parts]
    return jnp.concatenate(normed, axis=2)
