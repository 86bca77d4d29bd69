"""The parts that the Triton kernels share: loads and stores of tiles, page lookups, the step of the running softmax.

Sizes of Triton's arrays are powers of two, so a head of 80 or 96 becomes a tile of 128 whose last lanes are neither
read nor written.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Bool, Float, Int

MASKED = -1e30
LOG2E = math.log2(math.e)

# A reference into device memory; jax has no public type for it.
Ref = Any


@dataclasses.dataclass(frozen=True)
class TritonAttention:
    """The static facts of a call. `num_pages` counts one layer's pages, `entries` those of all layers."""

    kv_heads: int
    group: int
    head_dim: int
    page_size: int
    num_pages: int
    entries: int
    scale: float
    window: int | None
    soft_cap: float | None
    interpret: bool

    @property
    def lanes(self) -> int:
        """The width of a tile of heads."""
        return pl.next_power_of_2(self.head_dim)


class PoolRefs(NamedTuple):
    """The pool of all layers, flat: `[kv_heads * entries * page_size, head_dim]`, and the layer to use.

    `scales`, `[2, layers, kv_heads]`, is None unless the pool holds fp8.
    """

    keys: Ref
    values: Ref
    scales: Ref | None
    layer: Ref
    page_table: Ref


class SoftmaxState(NamedTuple):
    """A softmax in progress: unnormalized output, largest logit in base 2, sum of exponentials."""

    out: Float[Array, "queries lanes"]
    peak: Float[Array, " queries"]
    total: Float[Array, " queries"]


def empty_softmax(queries: int, lanes: int) -> SoftmaxState:
    """Return a softmax over no tokens."""
    return SoftmaxState(
        jnp.zeros((queries, lanes), jnp.float32),
        jnp.full((queries,), MASKED, jnp.float32),
        jnp.zeros((queries,), jnp.float32),
    )


def head_lanes(attention: TritonAttention) -> tuple[Int[Array, "1 lanes"], Bool[Array, "1 lanes"]]:
    """Return the index of each lane of a tile, and whether the head has it."""
    lane = lax.broadcasted_iota(jnp.int32, (1, attention.lanes), 1)
    return lane, lane < attention.head_dim


def load_rows(
    ref: Ref, at: tuple[Any, ...], live: Bool[Array, " rows"] | None, attention: TritonAttention
) -> Float[Array, "rows lanes"]:
    """Load rows of heads at the indices `at`, one of which is a vector; zeros for rows that aren't live."""
    lane, has_lane = head_lanes(attention)
    index = tuple(x[:, None] if getattr(x, "ndim", 0) == 1 else x for x in at)
    if live is None and attention.lanes == attention.head_dim:
        return plgpu.load(ref.at[(*index, lane)])
    mask = has_lane if live is None else live[:, None] & has_lane
    rows = next(x.shape[0] for x in at if getattr(x, "ndim", 0) == 1)
    mask = jnp.broadcast_to(mask, (rows, attention.lanes))
    return plgpu.load(ref.at[(*index, lane)], mask=mask, other=0.0)


def store_rows(
    ref: Ref,
    at: tuple[Any, ...],
    rows: Float[Array, "rows lanes"],
    live: Bool[Array, " rows"],
    attention: TritonAttention,
) -> None:
    """Store the rows that are live."""
    lane, has_lane = head_lanes(attention)
    index = tuple(x[:, None] if getattr(x, "ndim", 0) == 1 else x for x in at)
    plgpu.store(ref.at[(*index, lane)], rows.astype(ref.dtype), mask=live[:, None] & has_lane)


def pool_rows(
    pool: PoolRefs, row: Array, kv_head: Array, position: Int[Array, " tokens"], attention: TritonAttention
) -> Int[Array, " tokens"]:
    """Return the rows of the flat pool that hold some of a row's tokens.

    In a loop, Triton pipelines these loads twice: page ids are copied to shared memory a stage before they are used, so
    that copies of keys and values wait for no load.
    """
    size = attention.page_size
    page = plgpu.load(pool.page_table.at[row, lax.div(position, size)])
    entry = kv_head * attention.entries + pool.layer[0] * attention.num_pages + page
    return entry * size + lax.rem(position, size)


def kv_scale(pool: PoolRefs, which: int, kv_head: Array) -> Array | float:
    """Return the factor of stored keys (0) or values (1)."""
    return 1.0 if pool.scales is None else pool.scales[which, pool.layer[0], kv_head]


def dot(a: Float[Array, "m k"], b: Float[Array, "k n"]) -> Float[Array, "m n"]:
    """Multiply with float32 sums; float32 operands aren't rounded to TF32."""
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return jnp.dot(a, b, precision=precision, preferred_element_type=jnp.float32)


def advance(
    state: SoftmaxState,
    q: Float[Array, "queries lanes"],
    keys: Float[Array, "tokens lanes"],
    values: Float[Array, "tokens lanes"],
    seen: Bool[Array, "queries tokens"] | None,
    key_scale: Array | float,
    attention: TritonAttention,
) -> SoftmaxState:
    """Add a tile of tokens to the softmax; sums under the old peak are rescaled (Milakov, Gimelshein 2018)."""
    logits = dot(q, keys.astype(q.dtype).T)
    if attention.soft_cap is None:
        logits = logits * (key_scale * (attention.scale * LOG2E))
    else:
        capped = jnp.tanh(logits * (key_scale * (attention.scale / attention.soft_cap)))
        logits = capped * (attention.soft_cap * LOG2E)
    if seen is not None:
        logits = jnp.where(seen, logits, MASKED)
    peak = jnp.maximum(state.peak, jnp.max(logits, axis=1))
    keep = jnp.exp2(state.peak - peak)
    weights = jnp.exp2(logits - peak[:, None])
    if seen is not None:
        weights = jnp.where(seen, weights, 0.0)
    out = state.out * keep[:, None] + dot(weights.astype(q.dtype), values.astype(q.dtype))
    return SoftmaxState(out, peak, state.total * keep + jnp.sum(weights, axis=1))


def flat(pool: jax.Array) -> jax.Array:
    """Return a pool `[kv_heads, entries, page_size, head_dim]` as rows `[rows, head_dim]`."""
    return pool.reshape(-1, pool.shape[3])
