"""The draw on Triton: one program a row finds the peak, lists the tokens that top_k and top_p may keep, and draws.

The two largest logits of each lane bound the thresholds from below: k of them are the logits of k tokens, and their
weights may already sum to top_p. So two passes read the row: one for these, and one that lists the tokens above the
bound. Only if no bound is found, or too many tokens are above it, are the thresholds searched in the row itself.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Bool, Float, Int, UInt32

from pallas_kernels.sampling.noise import noise_of
from pallas_kernels.sampling.parameters import FloatColumn, IntColumn, SlotTable
from pallas_kernels.sampling.triton.rows import (
    LIST,
    TILE,
    Lists,
    Ref,
    compiler_params,
    find_peaks,
    fold,
    largest_bound,
    list_or_row,
    list_shapes,
    measure,
    row_source,
    store_candidates,
    store_lanes,
)

_TINY = float(np.finfo(np.float32).tiny)
# Below this, temperatures differ in nothing; and a GPU may take a denormal divisor for 0.
_COLDEST = 1e-30


def draw_tokens(
    logits: Float[Array, "rows vocab"],
    edited: tuple[Float[Array, "rows vocab"], Int[Array, " rows"]] | None,
    keys: UInt32[Array, "rows 2"],
    live: Bool[Array, " rows"],
    table: SlotTable,
    *,
    interpret: bool,
) -> Int[Array, " rows"]:
    """Return a token of each row by the contract of `reference.draw_tokens`, and 0 for rows that aren't `live`.

    `edited` are the results of `edit_logits`: the rows that it flags are drawn from its logits.
    """
    rows = logits.shape[0]
    token, _ = pl.pallas_call(
        functools.partial(_draw, interpret=interpret),
        grid=(rows,),
        out_shape=(jax.ShapeDtypeStruct((rows,), jnp.int32), list_shapes(rows)),
        compiler_params=compiler_params(),
        interpret=interpret,
        name="draw_tokens",
    )(logits, edited, keys, live.astype(jnp.int32), table)
    return token


def _draw(
    logits: Ref,
    edited: tuple[Ref, Ref] | None,
    keys: Ref,
    live: Ref,
    table: SlotTable,
    token: Ref,
    lists: Lists,
    *,
    interpret: bool,
) -> None:
    row = pl.program_id(0)

    @pl.when(live[row] != 0)
    def draw() -> None:
        rewritten, is_edited = (None, False) if edited is None else (edited[0], edited[1][row] != 0)
        whole = row_source(logits, row, rewritten, is_edited)
        temperature = table.read(row, FloatColumn.TEMPERATURE)
        top_k = table.read(row, IntColumn.TOP_K)
        top_p = jnp.maximum(table.read(row, FloatColumn.TOP_P), _TINY)
        is_drawn = temperature > 0
        has_top_k, has_top_p = is_drawn & (top_k > 0) & (top_k < whole.count), is_drawn & (top_p < 1.0)
        scale = jnp.where(is_drawn, jnp.maximum(temperature, _COLDEST), 1.0)
        lanes, peak, total = find_peaks(whole, scale)

        def weigh(x: jax.Array) -> jax.Array:
            return jnp.exp((x - peak) / scale)

        def count(x: jax.Array) -> tuple[jax.Array, jax.Array]:
            return _bits(weigh(x)), jnp.ones_like(x)

        def mass(x: jax.Array) -> tuple[jax.Array, jax.Array]:
            return _bits(weigh(x)), weigh(x)

        def either(x: jax.Array) -> tuple[jax.Array, jax.Array]:
            return _bits(weigh(x)), jnp.where(has_top_k, 1.0, weigh(x))

        truncated = has_top_k | has_top_p
        peaks = store_lanes(lists, row, lanes, interpret=interpret)
        enough = jnp.where(has_top_k, top_k.astype(jnp.float32), top_p * total)
        bound = largest_bound(peaks, either, enough, truncated)
        listable = whole._replace(count=(bound > 0).astype(jnp.int32) * whole.count)
        listed = store_candidates(listable, lambda x: _bits(weigh(x)) >= bound, lists, row, interpret=interpret)
        in_list = (bound > 0) & (listed <= LIST)
        source = list_or_row(lists, row, listed, whole, in_list)

        by_count = largest_bound(source, count, top_k.astype(jnp.float32), has_top_k)
        [kept] = measure(source._replace(count=jnp.where(has_top_k & has_top_p, source.count, 0)), mass, [by_count])
        by_mass = largest_bound(source, mass, top_p * jnp.where(has_top_k, kept, total), has_top_p)
        threshold = jnp.maximum(_float(jnp.maximum(by_count, by_mass)), table.read(row, FloatColumn.MIN_P))
        key, other = keys[row, 0], keys[row, 1]

        def best(x: jax.Array, ids: jax.Array, state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            high, token = state
            weights = weigh(x)
            drawn = jnp.where(weights >= threshold, weights, 0.0) / noise_of(key, other, ids.astype(jnp.uint32))
            score = jnp.where(is_drawn, drawn, x)
            return jnp.maximum(high, score), jnp.where(score > high, ids, token)

        start = jnp.full((TILE,), -jnp.inf, jnp.float32), jnp.zeros((TILE,), jnp.int32)
        high, ids = fold(source, best, start)
        token[row] = jnp.min(jnp.where(high == jnp.max(high), ids, whole.count - 1))

    @pl.when(live[row] == 0)
    def skip() -> None:
        token[row] = 0


def _bits(x: jax.Array) -> jax.Array:
    """Return the bits of weights, which order as the weights do: they are positive and at most 1."""
    return lax.bitcast_convert_type(x, jnp.int32)


def _float(bits: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(bits, jnp.float32)
