"""The parts that the Triton kernels share: loads and stores of tiles, page lookups, the step of the running softmax.

Sizes of Triton's arrays are powers of two, so a head of 80 or 96 becomes a tile of 128 whose last lanes are neither
read nor written. A latent row becomes two tiles, of its value and of its other numbers: 512 and 64 of 576.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Bool, Float, Int

MASKED = -1e30
LOG2E = math.log2(math.e)

# The widest tile of a latent row.
VALUE_LANES = 256

# The smallest dimension of a product.
_LEAST_LANES = 16

# A reference into device memory; jax has no public type for it.
Ref = Any


class HeadSpan(NamedTuple):
    """Consecutive numbers of a head, which a kernel takes as one tile."""

    start: int
    size: int

    @property
    def lanes(self) -> int:
        """The width of the tile. Products need 16."""
        return max(_LEAST_LANES, pl.next_power_of_2(self.size))


@dataclasses.dataclass(frozen=True)
class TritonAttention:
    """The static facts of a call. `num_pages` counts one layer's pages, `entries` those of all layers.

    With `value_dim`, the pool has latent rows. They have one KV head, whose query heads are computed in `kv_heads`
    tiles of `group` heads: each tile is like a KV head whose keys and values are those of all others.
    """

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
    value_dim: int | None = None

    @property
    def head(self) -> HeadSpan:
        """The numbers of a head."""
        return HeadSpan(0, self.head_dim)

    @property
    def values(self) -> tuple[HeadSpan, ...]:
        """The numbers of a value, and so of an output, in the tiles that are summed; the key of a latent row has them.

        One wide tile of latent rows would take more registers wherever it is stored.
        """
        if self.value_dim is None:
            return (self.head,)
        starts = range(0, self.value_dim, VALUE_LANES)
        return tuple(HeadSpan(start, min(VALUE_LANES, self.value_dim - start)) for start in starts)

    @property
    def keys(self) -> tuple[HeadSpan, ...]:
        """The numbers of a query or key, in the tiles that are multiplied."""
        if self.value_dim is None:
            return (self.head,)
        return *self.values, HeadSpan(self.value_dim, self.head_dim - self.value_dim)

    @property
    def output_dim(self) -> int:
        """The size of an output head."""
        return self.value_dim or self.head_dim


class PoolRefs(NamedTuple):
    """The pool of all layers, flat: `[kv_heads * entries * page_size, head_dim]`, and the layer to use.

    `values` is None if the pool has latent rows. `scales`, `[2, layers, kv_heads]`, is None unless it holds fp8.
    """

    keys: Ref
    values: Ref | None
    scales: Ref | None
    layer: Ref
    page_table: Ref


class LogitFacts(Protocol):
    """What logits are of products of queries and keys: see `AttentionOptions`."""

    @property
    def scale(self) -> float: ...
    @property
    def soft_cap(self) -> float | None: ...


class SoftmaxState(NamedTuple):
    """A softmax in progress: unnormalized output, largest logit in base 2, sum of exponentials."""

    out: tuple[Float[Array, "queries lanes"], ...]
    peak: Float[Array, " queries"]
    total: Float[Array, " queries"]


def empty_softmax(queries: int, spans: tuple[HeadSpan, ...]) -> SoftmaxState:
    """Return a softmax over no tokens, with some spans of its output."""
    return SoftmaxState(
        tuple(jnp.zeros((queries, span.lanes), jnp.float32) for span in spans),
        jnp.full((queries,), MASKED, jnp.float32),
        jnp.zeros((queries,), jnp.float32),
    )


def _lanes(span: HeadSpan) -> tuple[Int[Array, "1 lanes"], Bool[Array, "1 lanes"]]:
    """Return the index in a head of each lane of a tile, and whether the span has it."""
    lane = lax.broadcasted_iota(jnp.int32, (1, span.lanes), 1)
    return lane + span.start if span.start else lane, lane < span.size


def load_rows(
    ref: Ref, at: tuple[Any, ...], live: Bool[Array, " rows"] | None, span: HeadSpan
) -> Float[Array, "rows lanes"]:
    """Load a span of heads at the indices `at`, one of which is a vector; zeros for rows that aren't live."""
    lane, has_lane = _lanes(span)
    index = tuple(x[:, None] if getattr(x, "ndim", 0) == 1 else x for x in at)
    if live is None and span.lanes == span.size:
        return plgpu.load(ref.at[(*index, lane)])
    mask = has_lane if live is None else live[:, None] & has_lane
    rows = next(x.shape[0] for x in at if getattr(x, "ndim", 0) == 1)
    mask = jnp.broadcast_to(mask, (rows, span.lanes))
    return plgpu.load(ref.at[(*index, lane)], mask=mask, other=0.0)


def load_queries(
    refs: tuple[Ref, ...], at: tuple[Any, ...], live: Bool[Array, " rows"], attention: TritonAttention
) -> tuple[Float[Array, "rows lanes"], ...]:
    """Load queries, one tile for each of a key. A second reference, if there is one, has the last of them."""
    *spans, last = attention.keys
    tiles = [load_rows(refs[0], at, live, span) for span in spans]
    return *tiles, load_rows(refs[-1], at, live, last._replace(start=0) if len(refs) > 1 else last)


def store_rows(
    ref: Ref, at: tuple[Any, ...], rows: Float[Array, "rows lanes"], live: Bool[Array, " rows"], span: HeadSpan
) -> None:
    """Store a span of the rows that are live."""
    lane, has_lane = _lanes(span)
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
    head = 0 if pool.values is None else kv_head * attention.entries
    entry = head + pool.layer[0] * attention.num_pages + page
    return entry * size + lax.rem(position, size)


def load_kv(
    pool: PoolRefs, at: Int[Array, " tokens"], attention: TritonAttention
) -> tuple[tuple[Float[Array, "tokens lanes"], ...], tuple[Float[Array, "tokens lanes"], ...]]:
    """Load the tiles of the keys and values of tokens, at rows of the flat pool."""
    keys = tuple(load_rows(pool.keys, (at,), None, span) for span in attention.keys)
    if pool.values is None:
        return keys, keys[: len(attention.values)]
    return keys, tuple(load_rows(pool.values, (at,), None, span) for span in attention.values)


def kv_scale(pool: PoolRefs, which: int, kv_head: Array) -> Array | float:
    """Return the factor of stored keys (0) or values (1). Those of latent rows are keys of one head."""
    if pool.scales is None:
        return 1.0
    if pool.values is None:
        which, kv_head = 0, jnp.int32(0)
    return pool.scales[which, pool.layer[0], kv_head]


def dot(a: Float[Array, "m k"], b: Float[Array, "k n"]) -> Float[Array, "m n"]:
    """Multiply with float32 sums; float32 operands aren't rounded to TF32."""
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return jnp.dot(a, b, precision=precision, preferred_element_type=jnp.float32)


def advance(
    state: SoftmaxState,
    q: tuple[Float[Array, "queries lanes"], ...],
    keys: tuple[Float[Array, "tokens lanes"], ...],
    values: tuple[Float[Array, "tokens lanes"], ...],
    seen: Bool[Array, "queries tokens"] | None,
    key_scale: Array | float,
    attention: LogitFacts,
    bias: Float[Array, "queries tokens"] | None = None,
) -> SoftmaxState:
    """Add a tile of tokens to the softmax; sums under the old peak are rescaled (Milakov, Gimelshein 2018).

    `bias` is added to logits.
    """
    dtype = q[0].dtype
    logits = functools.reduce(jnp.add, (dot(a, b.astype(dtype).T) for a, b in zip(q, keys, strict=True)))
    if attention.soft_cap is None:
        logits = logits * (key_scale * (attention.scale * LOG2E))
    else:
        capped = jnp.tanh(logits * (key_scale * (attention.scale / attention.soft_cap)))
        logits = capped * (attention.soft_cap * LOG2E)
    if bias is not None:
        logits = logits + bias * LOG2E
    if seen is not None:
        logits = jnp.where(seen, logits, MASKED)
    peak = jnp.maximum(state.peak, jnp.max(logits, axis=1))
    keep = jnp.exp2(state.peak - peak)
    weights = jnp.exp2(logits - peak[:, None])
    if seen is not None:
        weights = jnp.where(seen, weights, 0.0)
    out = [old * keep[:, None] + dot(weights.astype(dtype), x.astype(dtype)) for old, x in zip(state.out, values)]
    return SoftmaxState(tuple(out), peak, state.total * keep + jnp.sum(weights, axis=1))


def flat(pool: jax.Array) -> jax.Array:
    """Return a pool `[kv_heads, entries, page_size, head_dim]` as rows `[rows, head_dim]`."""
    return pool.reshape(-1, pool.shape[3])
