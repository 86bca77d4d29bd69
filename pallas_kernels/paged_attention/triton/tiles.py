"""What both Triton kernels do with a tile: gather keys and values from their pages, and advance a softmax by them.

Triton's arrays have sizes that are powers of two, so a head of 80 or 96 is a tile of 128 whose last lanes are neither
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
class Attention:
    """What stays the same over all tiles of a call; `num_pages` is of one layer, `entries` of all."""

    kv_heads: int
    group: int
    head_dim: int
    page_size: int
    num_pages: int
    entries: int
    scale: float
    window: int | None
    soft_cap: float | None

    @property
    def lanes(self) -> int:
        """The width of a tile of heads."""
        return pl.next_power_of_2(self.head_dim)


class PoolRefs(NamedTuple):
    """The pool of all layers, flat: `[kv_heads * entries * page_size, head_dim]`, and which layer of it is meant.

    `scales` is there where the pool holds fp8: `[2, layers, kv_heads]`.
    """

    keys: Ref
    values: Ref
    scales: Ref | None
    layer: Ref
    page_table: Ref


class Running(NamedTuple):
    """A softmax in progress: unnormalized output, largest logit in base 2, sum of exponentials."""

    out: Float[Array, "queries lanes"]
    peak: Float[Array, " queries"]
    total: Float[Array, " queries"]


def start(queries: int, lanes: int) -> Running:
    """Nothing seen yet."""
    return Running(
        jnp.zeros((queries, lanes), jnp.float32),
        jnp.full((queries,), MASKED, jnp.float32),
        jnp.zeros((queries,), jnp.float32),
    )


def lanes_of(attention: Attention) -> tuple[Int[Array, "1 lanes"], Bool[Array, "1 lanes"]]:
    """Index of each lane of a head, and whether the head has it."""
    lane = lax.broadcasted_iota(jnp.int32, (1, attention.lanes), 1)
    return lane, lane < attention.head_dim


def load_rows(
    ref: Ref, at: tuple[Any, ...], live: Bool[Array, " rows"] | None, attention: Attention
) -> Float[Array, "rows lanes"]:
    """Rows of heads at the indices `at`, one of which is a vector; zeros where they aren't live."""
    lane, has_lane = lanes_of(attention)
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
    attention: Attention,
) -> None:
    """Write the rows that are live."""
    lane, has_lane = lanes_of(attention)
    index = tuple(x[:, None] if getattr(x, "ndim", 0) == 1 else x for x in at)
    plgpu.store(ref.at[(*index, lane)], rows.astype(ref.dtype), mask=live[:, None] & has_lane)


def places(
    pool: PoolRefs,
    row: Array,
    kv_head: Array,
    position: Int[Array, " tokens"],
    held: Bool[Array, " tokens"],
    attention: Attention,
) -> Int[Array, " tokens"]:
    """Where in the flat pool the tokens of a row lie; for those not held, a place that is in the pool."""
    size = attention.page_size
    page = plgpu.load(pool.page_table.at[row, lax.div(position, size)], mask=held, other=0)
    entry = kv_head * attention.entries + pool.layer[0] * attention.num_pages + page
    return entry * size + lax.rem(position, size)


def kv_scale(pool: PoolRefs, which: int, kv_head: Array) -> Array | float:
    """The factor of stored keys (0) or values (1)."""
    return 1.0 if pool.scales is None else pool.scales[which, pool.layer[0], kv_head]


def dot(a: Float[Array, "m k"], b: Float[Array, "k n"]) -> Float[Array, "m n"]:
    """Float32 sums of products; of float32 numbers they aren't rounded to TF32."""
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return jnp.dot(a, b, precision=precision, preferred_element_type=jnp.float32)


def advance(
    state: Running,
    q: Float[Array, "queries lanes"],
    keys: Float[Array, "tokens lanes"],
    values: Float[Array, "tokens lanes"],
    seen: Bool[Array, "queries tokens"] | None,
    key_scale: Array | float,
    attention: Attention,
) -> Running:
    """One tile of tokens further: what was summed under the old peak is rescaled (Milakov, Gimelshein 2018)."""
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
    return Running(out, peak, state.total * keep + jnp.sum(weights, axis=1))


def flat(pool: jax.Array) -> jax.Array:
    """A pool `[kv_heads, entries, page_size, head_dim]` as rows of heads."""
    return pool.reshape(-1, pool.shape[3])
