"""Log-sum-exp and largest logits of rows on Triton: one program a row, in two passes and without a sort.

As in `draw.py`, the largest logits of the lanes bound the k-th largest of the row from below, and the logits above the
bound are listed. Only if too many equal ones are among them are the largest looked for in the row itself.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.sampling.triton.rows import (
    LIST,
    NO_ID,
    TILE,
    Lists,
    Ref,
    Source,
    compiler_params,
    find_peaks,
    fold,
    largest_bound,
    list_or_row,
    list_shapes,
    row_source,
    store_candidates,
    store_lanes,
)


class TopLogits(NamedTuple):
    """The log-sum-exp of each row, the logit of its token, and its largest logits with their ids, largest first."""

    normalizer: Float[Array, " rows"]
    chosen: Float[Array, " rows"]
    top: Float[Array, "rows top"]
    top_ids: Int[Array, "rows top"]


def top_logits(
    logits: Float[Array, "rows vocab"],
    token: Int[Array, " rows"],
    wanted: Bool[Array, " rows"],
    *,
    top: int,
    normalize: bool,
    interpret: bool,
) -> TopLogits:
    """Return the `top` largest logits of the rows that are `wanted`, and zeros for other rows.

    Of equal logits, that with the lowest id comes first. The logit of a token that isn't in the vocabulary is 0. With
    `normalize` all are log probabilities.
    """
    rows = logits.shape[0]
    sizes = ((rows,), jnp.float32), ((rows,), jnp.float32), ((rows, top), jnp.float32), ((rows, top), jnp.int32)
    shapes: Any = TopLogits(*(jax.ShapeDtypeStruct(*size) for size in sizes))  # type: ignore[arg-type]
    found, _ = pl.pallas_call(
        functools.partial(_top, top=top, normalize=normalize, interpret=interpret),
        grid=(rows,),
        out_shape=(shapes, list_shapes(rows)),
        compiler_params=compiler_params(),
        interpret=interpret,
        name="top_logits",
    )(logits, token, wanted.astype(jnp.int32))
    return found


def _top(
    logits: Ref,
    token: Ref,
    wanted: Ref,
    out: Ref,
    lists: Lists,
    *,
    top: int,
    normalize: bool,
    interpret: bool,
) -> None:
    row, vocab = pl.program_id(0), logits.shape[1]

    @pl.when(wanted[row] != 0)
    def find() -> None:
        whole = row_source(logits, row)
        lanes, peak, total = find_peaks(whole, 1.0)
        normalizer = peak + jnp.log(total)
        subtracted = normalizer if normalize else 0.0
        chosen = logits[row, jnp.minimum(token[row], vocab - 1)]
        out.normalizer[row] = normalizer
        out.chosen[row] = jnp.where(token[row] < vocab, chosen, 0.0) - subtracted
        peaks = store_lanes(lists, row, lanes, interpret=interpret)
        bound = largest_bound(peaks, lambda x: (_order(x), jnp.ones_like(x)), float(top), jnp.bool_(True))
        listed = store_candidates(whole, lambda x: _order(x) >= bound, lists, row, interpret=interpret)
        source = list_or_row(lists, row, listed, whole, listed <= LIST)

        def store(rank: jax.Array, last: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            found, at = _largest_after(source, *last)
            out.top[row, rank] = found - subtracted
            out.top_ids[row, rank] = jnp.minimum(at, vocab - 1)
            return found, at

        lax.fori_loop(0, top, store, (jnp.float32(jnp.inf), jnp.int32(-1)))

    @pl.when(wanted[row] == 0)
    def skip() -> None:
        out.normalizer[row] = 0.0
        out.chosen[row] = 0.0
        rank = lax.iota(jnp.int32, pl.next_power_of_2(top))
        plgpu.store(out.top.at[row, rank], jnp.zeros(rank.shape, jnp.float32), mask=rank < top)
        plgpu.store(out.top_ids.at[row, rank], jnp.zeros(rank.shape, jnp.int32), mask=rank < top)


def _order(x: jax.Array) -> jax.Array:
    """Return numbers from 0 to 2^30 - 1 that order as floats do, but for the last two bits."""
    bits = lax.bitcast_convert_type(x, jnp.int32)
    return ((bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> 2) + (1 << 29)


def _largest_after(source: Source, last: jax.Array, last_id: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the logit that comes after `last`, by size and then by id, and its id."""

    def step(x: jax.Array, ids: jax.Array, state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        high, at = state
        comes_after = (x < last) | ((x == last) & (ids > last_id))
        better = comes_after & ((x > high) | (at == NO_ID))
        return jnp.where(better, x, high), jnp.where(better, ids, at)

    start = jnp.full((TILE,), -jnp.inf, jnp.float32), jnp.full((TILE,), NO_ID, jnp.int32)
    high, ids = fold(source, step, start)
    largest = jnp.max(high)
    return largest, jnp.min(jnp.where(high == largest, ids, NO_ID))
