"""Functions that the kernels of a row share: passes over its logits by tiles, and the search for a threshold.

One program handles a row, of which it reads a tile of lanes at a time. Its sums depend on the row alone, whatever other
rows there are. A pass reads a `Source`: the logits of the row, or a short list of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

# Lanes of a tile, and the capacity of a list: the two largest logits of each lane
TILE = 4096
LIST = 2 * TILE
NUM_WARPS = 8

# This stands for an id where there is none
NO_ID = np.iinfo(np.int32).max

_LOWEST = float(np.finfo(np.float32).min)
# Thresholds are found two bits at a time, from bit 29 down: no key has a higher one.
_BITS, _DIGIT_BITS = 30, 2

# A reference into device memory; jax has no public type for it.
Ref = Any


class Source(NamedTuple):
    """The numbers that a pass reads: `load(i)` returns logits and ids of tile i, -inf for lanes from `count` on."""

    load: Callable[[Any], tuple[jax.Array, jax.Array]]
    count: Any


class Lists(NamedTuple):
    """Some of the logits of each row, and their ids: `[rows, LIST]`."""

    logits: Ref
    ids: Ref


class Peaks(NamedTuple):
    """The two largest logits of each lane, the largest of the row, and the sum of the row's weights relative to it."""

    lanes: tuple[jax.Array, jax.Array]
    peak: jax.Array
    total: jax.Array


def list_shapes(rows: int) -> Lists:
    """Return the shapes of the lists of a call."""
    return Lists(jax.ShapeDtypeStruct((rows, LIST), jnp.float32), jax.ShapeDtypeStruct((rows, LIST), jnp.int32))


def compiler_params() -> plgpu.CompilerParams:
    """Return the options of a kernel that handles a row a program."""
    return plgpu.CompilerParams(num_warps=NUM_WARPS, num_stages=1)


def barrier(interpret: bool) -> None:
    """Make what the program has stored visible to all its threads; the interpreter needs and knows no barrier."""
    if not interpret:
        plgpu.debug_barrier()


def row_source(logits: Ref, row: jax.Array, edited: Ref | None = None, is_edited: Any = False) -> Source:
    """Return the logits of a row: those in `edited` if there are some and `is_edited`."""
    vocab = logits.shape[1]

    def load(tile: Any) -> tuple[jax.Array, jax.Array]:
        ids = tile * TILE + lax.iota(jnp.int32, TILE)
        inside = ids < vocab
        if edited is None:
            return plgpu.load(logits.at[row, ids], mask=inside, other=-jnp.inf), ids
        # Lanes whose mask is False read nothing: no branch is needed.
        raw = plgpu.load(logits.at[row, ids], mask=inside & jnp.logical_not(is_edited), other=-jnp.inf)
        return jnp.where(is_edited, plgpu.load(edited.at[row, ids], mask=inside & is_edited, other=-jnp.inf), raw), ids

    return Source(load, vocab)


def list_or_row(lists: Lists, row: jax.Array, count: jax.Array, whole: Source, in_list: jax.Array) -> Source:
    """Return the first `count` numbers of the row's list if `in_list`, else the `whole` row."""

    def load(tile: Any) -> tuple[jax.Array, jax.Array]:
        at = tile * TILE + lax.iota(jnp.int32, TILE)
        listed = in_list & (at < count)
        # Nothing of the row is read if the list holds all that is needed.
        x, ids = whole.load(tile + in_list.astype(jnp.int32) * pl.cdiv(whole.count, TILE))
        own = plgpu.load(lists.logits.at[row, at], mask=listed, other=-jnp.inf)
        own_ids = plgpu.load(lists.ids.at[row, at], mask=listed, other=NO_ID)
        return jnp.where(in_list, own, x), jnp.where(in_list, own_ids, ids)

    return Source(load, jnp.where(in_list, count, whole.count))


def fold(source: Source, step: Callable[..., Any], start: Any) -> Any:
    """Return the last state of `step(logits, ids, state)` over the tiles, each of which is loaded one step ahead."""

    def body(tile: jax.Array, carry: Any) -> Any:
        (x, ids), state = carry
        return source.load(tile + 1), step(x, ids, state)

    return lax.fori_loop(0, pl.cdiv(source.count, TILE), body, (source.load(0), start))[1]


def find_peaks(source: Source, scale: Any) -> Peaks:
    """Return the peaks of a row, and the sum of `exp((logit - peak) / scale)`, in one pass."""

    def step(x: jax.Array, _: jax.Array, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        first, second, total = state
        smaller = jnp.exp(-jnp.abs(x - first) / scale)
        total = jnp.where(x > first, total * smaller + 1.0, total + smaller)
        return jnp.maximum(first, x), jnp.maximum(second, jnp.minimum(first, x)), total

    lowest = jnp.full((TILE,), _LOWEST, jnp.float32)
    first, second, totals = fold(source, step, (lowest, lowest, jnp.zeros((TILE,), jnp.float32)))
    peak = jnp.max(first)
    return Peaks((first, second), peak, jnp.sum(totals * jnp.exp((first - peak) / scale)))


def measure(source: Source, value: Callable[[jax.Array], tuple[jax.Array, jax.Array]], bounds: list[Any]) -> list[Any]:
    """Return for each bound the sum of the values of logits whose key is at least the bound.

    `value` returns the keys and the values of logits.
    """

    def step(x: jax.Array, _: jax.Array, sums: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        keys, values = value(x)
        return tuple(total + jnp.where(keys >= bound, values, 0.0) for total, bound in zip(sums, bounds))

    return [jnp.sum(total) for total in fold(source, step, (jnp.zeros((TILE,), jnp.float32),) * len(bounds))]


def largest_bound(
    source: Source, value: Callable[[jax.Array], tuple[jax.Array, jax.Array]], wanted: Any, needed: Any
) -> jax.Array:
    """Return the largest bound whose `measure` is at least `wanted`; 0 if there is none or it isn't `needed`.

    Keys are from 0 to 2^30 - 1.
    """

    def refine(i: jax.Array, found: jax.Array) -> jax.Array:
        shift = _BITS - _DIGIT_BITS * (i + 1)
        # The larger a bound, the smaller its measure: those that measure enough come first.
        sums = measure(source, value, [found | (digit << shift) for digit in range(1, 1 << _DIGIT_BITS)])
        digit = sum((total >= wanted).astype(jnp.int32) for total in sums)
        return found | (digit << shift)

    return lax.fori_loop(0, needed.astype(jnp.int32) * (_BITS // _DIGIT_BITS), refine, jnp.int32(0))


def store_lanes(lists: Lists, row: jax.Array, lanes: tuple[jax.Array, jax.Array], *, interpret: bool) -> Source:
    """Store the largest logits of all lanes in the list of a row and return it."""
    for i, lane in enumerate(lanes):
        # A lane that has met nothing larger may hold nothing but -inf.
        at = i * TILE + lax.iota(jnp.int32, TILE)
        plgpu.store(lists.logits.at[row, at], jnp.where(lane > _LOWEST, lane, -jnp.inf))
    barrier(interpret)

    def load(tile: Any) -> tuple[jax.Array, jax.Array]:
        at = tile * TILE + lax.iota(jnp.int32, TILE)
        return plgpu.load(lists.logits.at[row, at], mask=at < LIST, other=-jnp.inf), at

    return Source(load, LIST)


def store_candidates(
    source: Source, keep: Callable[[jax.Array], jax.Array], lists: Lists, row: jax.Array, *, interpret: bool
) -> jax.Array:
    """Store the logits to `keep` in the list of a row; return how many there are, of which only `LIST` are stored."""

    def step(x: jax.Array, ids: jax.Array, count: jax.Array) -> jax.Array:
        kept = (keep(x) & (ids < source.count)).astype(jnp.int32)
        end = count + lax.cumsum(kept)
        there = (kept > 0) & (end <= LIST)
        # The interpreter writes something for lanes that store nothing: past the end it is dropped.
        at = jnp.where(there, end - 1, LIST)
        plgpu.store(lists.logits.at[row, at], x, mask=there)
        plgpu.store(lists.ids.at[row, at], ids, mask=there)
        return count + jnp.sum(kept)

    barrier(interpret)
    count = fold(source, step, jnp.int32(0))
    barrier(interpret)
    return count
