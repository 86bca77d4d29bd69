"""The TPU backend: XLA puts the tokens of a head side by side, a kernel computes tiles of queries (`kernel.py`).

Heads are padded to whole vectors, which an array in a TPU's memory is anyway.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.dispatch import Backend
from pallas_kernels.packed_attention.arguments import PackedOptions, PackedProblem, Texts
from pallas_kernels.packed_attention.mosaic_tpu.kernel import TILE, attend
from pallas_kernels.target import KernelTarget

DTYPES = ("float32", "bfloat16")
MAX_HEAD_DIM = 256
LANES = 128

# Three quarters of the vector memory of a core that has least of it.
_VMEM_LIMIT = 48 * 2**20
# The keys and values of a head, of which those of the next one are read ahead, may take this much of it.
_KV_BYTES = 40 * 2**20


def refusal(problem: PackedProblem, target: KernelTarget) -> str | None:
    """Return what isn't supported (dtype, size of heads, biases), or None."""
    if problem.dtype.name not in DTYPES:
        return f"mosaic_tpu computes in {' and '.join(DTYPES)}, not in {problem.dtype.name}"
    if problem.head_dim > MAX_HEAD_DIM:
        return f"mosaic_tpu takes heads of up to {MAX_HEAD_DIM}, not of {problem.head_dim}"
    if problem.has_bias:
        return "mosaic_tpu adds no biases of distances to logits"
    return None


def packed_attention(
    q: Float[Array, "tokens heads head_dim"],
    k: Float[Array, "tokens kv_heads head_dim"],
    v: Float[Array, "tokens kv_heads head_dim"],
    texts: Texts,
    options: PackedOptions,
    backend: Backend,
) -> Float[Array, "tokens heads head_dim"]:
    """Compute `api.packed_attention`.

    Raises ValueError if the program has more tokens than vector memory has room for.
    """
    tokens, head_dim = q.shape[0], q.shape[2]
    rows, lanes = -(-tokens // TILE) * TILE, -(-head_dim // LANES) * LANES
    most = _KV_BYTES // (4 * lanes * q.dtype.itemsize) // TILE * TILE
    if rows > most:
        raise ValueError(
            f"mosaic_tpu holds the keys and values of a head in vector memory, up to {most} tokens of heads of "
            f"{head_dim} in {q.dtype.name}, not {tokens}: take programs of fewer tokens, or the reference backend"
        )

    def by_head(x: Float[Array, "tokens some head_dim"]) -> Float[Array, "some rows lanes"]:
        return jnp.pad(x.swapaxes(0, 1), ((0, 0), (0, rows - tokens), (0, lanes - head_dim)))

    seen = _seen(texts, tokens, options.reach)
    live = (seen[:, 1] > 0)[:, None, None]
    k, v = jnp.where(live, k, 0), jnp.where(live, v, 0)
    out = attend(
        by_head(q),
        by_head(k),
        by_head(v),
        jnp.pad(seen, ((0, rows - tokens), (0, 0))),
        scale=options.scale,
        soft_cap=options.soft_cap,
        vmem_limit=_VMEM_LIMIT,
        interpret=backend.interpret,
    )
    return out[:, :tokens, :head_dim].swapaxes(0, 1)


def _seen(texts: Texts, tokens: int, reach: int | None) -> Int[Array, "tokens two"]:
    """Return the first token that each one sees, and one past the last; 0 and 0 for padding."""
    token, text = jnp.arange(tokens, dtype=jnp.int32), texts.of_tokens(tokens)
    live = text < len(texts.starts) - 1
    text = jnp.where(live, text, 0)
    first, stop = texts.starts[text], texts.starts[text + 1]
    if reach is not None:
        first, stop = jnp.maximum(first, token - reach), jnp.minimum(stop, token + reach + 1)
    return jnp.where(live[:, None], jnp.stack([first, stop], axis=1), 0)
