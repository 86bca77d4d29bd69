"""The XLA backend: the contract that every kernel is tested against, and the fallback if no kernel fits.

A tile of queries at a time attends to all tokens. Softmax and sums are float32; products are in the type of the
queries.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from pallas_kernels.dispatch import Backend
from pallas_kernels.packed_attention.arguments import PackedOptions, Texts

QUERY_TILE = 128
_MASKED = -1e30


def packed_attention(
    q: Float[Array, "tokens heads head_dim"],
    k: Float[Array, "tokens kv_heads head_dim"],
    v: Float[Array, "tokens kv_heads head_dim"],
    texts: Texts,
    options: PackedOptions,
    backend: Backend,
) -> Float[Array, "tokens heads head_dim"]:
    """Compute `api.packed_attention`."""
    tokens, heads, head_dim = q.shape
    kv_heads, of_token = k.shape[1], texts.of_tokens(tokens)
    live = (of_token < len(texts.starts) - 1)[:, None, None]
    k, v = jnp.where(live, k, 0), jnp.where(live, v, 0)
    tile = min(QUERY_TILE, tokens)
    padding = -tokens % tile
    queries = jnp.pad(q.reshape(tokens, kv_heads, -1, head_dim), ((0, padding), (0, 0), (0, 0), (0, 0)))
    at = jnp.arange(tokens, dtype=jnp.int32)

    def attend(given: tuple[Array, Array]) -> Array:
        own, first = given
        rows = first + jnp.arange(tile, dtype=jnp.int32)
        logits = jnp.einsum("tkgd,skd->kgts", own, k, preferred_element_type=jnp.float32) * options.scale
        if options.soft_cap is not None:
            logits = options.soft_cap * jnp.tanh(logits / options.soft_cap)
        distance = at - rows[:, None]
        if options.distance_bias is not None:
            far = options.distance_bias.shape[1] // 2
            bias = options.distance_bias[:, jnp.clip(distance, -far, far) + far]
            logits += bias.reshape(kv_heads, -1, tile, tokens)
        seen = of_token[jnp.minimum(rows, tokens - 1)][:, None] == of_token
        if options.reach is not None:
            seen &= jnp.abs(distance) <= options.reach
        logits = jnp.where(seen, logits, _MASKED)
        weights = jnp.exp(logits - logits.max(axis=-1, keepdims=True))
        total = weights.sum(axis=-1, keepdims=True)
        out = jnp.einsum("kgts,skd->kgtd", weights.astype(v.dtype), v, preferred_element_type=jnp.float32) / total
        return out.transpose(2, 0, 1, 3).reshape(tile, heads, head_dim).astype(q.dtype)

    tiles = queries.reshape(-1, tile, *queries.shape[1:])
    starts = jnp.arange(len(tiles), dtype=jnp.int32) * tile
    return lax.map(attend, (tiles, starts)).reshape(-1, heads, head_dim)[:tokens]


def refusal(problem: object, target: object) -> None:
    """Return None: it supports every problem."""
