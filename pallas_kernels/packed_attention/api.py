"""The public function: one contract, several backends."""

from __future__ import annotations

import jax
from jaxtyping import Array, Float

from pallas_kernels.dispatch import Backend
from pallas_kernels.packed_attention.arguments import PackedOptions, Texts
from pallas_kernels.packed_attention.backends import BACKENDS, REFERENCE


def packed_attention(
    q: Float[Array, "tokens heads head_dim"],
    k: Float[Array, "tokens kv_heads head_dim"],
    v: Float[Array, "tokens kv_heads head_dim"],
    texts: Texts,
    options: PackedOptions,
    backend: Backend = REFERENCE,
) -> Float[Array, "tokens heads head_dim"]:
    """Compute the attention of the tokens of each text to the tokens of the same text, before and after them.

    Query head h reads KV head `h // (heads // kv_heads)`. Padding tokens may be NaN: they are never used. Their output
    is unspecified.

    Returns the output in `q`'s dtype, accumulated in float32.
    """
    with jax.named_scope("packed_attention"):
        return BACKENDS.module(backend.name).packed_attention(q, k, v, texts, options, backend)
