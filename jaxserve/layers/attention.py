"""Self-attention over the paged cache: projections, optional q/k norms, rotation, the kernel, output."""

from __future__ import annotations

import dataclasses
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxserve.layers.batch import TokenBatch
from jaxserve.layers.linear import linear, row_parallel
from jaxserve.layers.norm import rms_norm
from jaxserve.layers.rope import rotate
from pallas_kernels.packed_matmul import PackedWeight
from pallas_kernels.paged_attention import Backend, PagedKV, paged_attention, qkv_attention


@flax.struct.dataclass
class AttentionParams:
    """The attention weights of one layer.

    `qkv` stores each KV head together with its group of query heads, so that shards are split by KV head.
    """

    qkv: Float[Array, "kv_heads group_plus_2 head_dim dim"] | PackedWeight
    output: Float[Array, "dim kv_heads group head_dim"] | PackedWeight
    qkv_bias: Float[Array, "kv_heads group_plus_2 head_dim"] | None
    output_bias: Float[Array, " dim"] | None
    q_norm: Float[Array, " head_dim"] | None
    k_norm: Float[Array, " head_dim"] | None


@dataclasses.dataclass(frozen=True)
class AttentionSettings:
    """The static settings of an attention layer; layers with equal settings share a trace."""

    window: int | None
    norm_eps: float
    backend: Backend


@jax.named_scope("attention")
def self_attention(
    x: Float[Array, "tokens dim"],
    params: AttentionParams,
    batch: TokenBatch,
    kv: PagedKV,
    layer: Int[Array, ""],
    rotation: tuple[Array, Array],
    settings: AttentionSettings,
) -> tuple[Float[Array, "tokens dim"], PagedKV]:
    """Attend from the batch's tokens to their sequences, and write their keys and values to `kv`."""
    kv_heads, rows, head_dim, _ = params.qkv.shape
    bias = None if params.qkv_bias is None else params.qkv_bias.reshape(-1)
    weight = params.qkv.reshape(kv_heads * rows * head_dim, -1)
    where = batch.page_table, batch.query_starts, batch.kv_lens, batch.num_decodes, batch.num_seqs
    options: dict[str, Any] = {
        "scale": head_dim**-0.5,
        "window": settings.window,
        "decode_only": batch.decode_only,
        "backend": settings.backend,
    }
    if settings.backend.takes_qkv:
        norms = None if params.q_norm is None or params.k_norm is None else (params.q_norm, params.k_norm)
        turns = rotation[0][:, 0, 0], rotation[1][:, 0, 1]
        options |= {"eps": settings.norm_eps}
        attended, kv = qkv_attention(linear(x, weight), bias, norms, turns, kv, layer, *where, **options)
    else:
        heads = _heads(linear(x, weight, bias), params, rotation, settings.norm_eps)
        attended, kv = paged_attention(*heads, kv, layer, *where, **options)
    output = params.output.reshape(params.output.shape[0], -1)
    return row_parallel(attended.reshape(len(x), -1), output, params.output_bias), kv


def _heads(
    qkv: Float[Array, "tokens width"], params: AttentionParams, rotation: tuple[Array, Array], eps: float
) -> tuple[
    Float[Array, "tokens heads head_dim"],
    Float[Array, "tokens kv_heads head_dim"],
    Float[Array, "tokens kv_heads head_dim"],
]:
    """Return normalized and rotated queries and keys, and values.

    Queries and keys are normalized and rotated as one array: half the kernels, the same numbers.
    """
    kv_heads, rows, head_dim, _ = params.qkv.shape
    tokens, group = len(qkv), rows - 2
    qkv = qkv.reshape(tokens, kv_heads, rows, head_dim)
    qk = qkv[:, :, : group + 1]
    if params.q_norm is not None and params.k_norm is not None:
        norms = jnp.concatenate([jnp.tile(params.q_norm, (group, 1)), params.k_norm[None]])
        qk = rms_norm(qk, norms, eps)
    qk = rotate(qk.reshape(tokens, kv_heads * (group + 1), head_dim), *rotation)
    qk = qk.reshape(tokens, kv_heads, group + 1, head_dim)
    return qk[:, :, :group].reshape(tokens, kv_heads * group, head_dim), qk[:, :, group], qkv[:, :, group + 1]
