"""Edits of logits on Triton: penalties, logit bias and forbidden stop ids, written only for rows that have any.

A program handles a part of a row. The counts of tokens are read by slot; nothing is gathered.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.sampling.parameters import COUNT_MASK, Edits, FloatColumn, IntColumn, SlotTable
from pallas_kernels.sampling.triton.rows import NUM_WARPS, Ref, barrier, compiler_params

# Lanes of a tile, 8 a thread: with more, compilers spill.
_TILE = 8 * 32 * NUM_WARPS
_TILES = 8
_PART = _TILE * _TILES


def edit_logits(
    logits: Float[Array, "rows vocab_shard"],
    lengths: Int[Array, " rows"],
    live: Bool[Array, " rows"],
    edits: Edits,
    table: SlotTable,
    *,
    interpret: bool,
) -> tuple[Float[Array, "rows vocab_shard"], Int[Array, " rows"]]:
    """Return edited logits, and 1 for each row that has edits: other rows are not written.

    Rows that aren't `live` have no edits. Stop ids may not be drawn while `lengths` is below `min_len`.
    """
    rows, vocab = logits.shape
    return pl.pallas_call(
        functools.partial(_edit, interpret=interpret),
        grid=(rows, pl.cdiv(vocab, _PART)),
        out_shape=(jax.ShapeDtypeStruct((rows, vocab), jnp.float32), jax.ShapeDtypeStruct((rows,), jnp.int32)),
        compiler_params=compiler_params(),
        interpret=interpret,
        name="edit_logits",
    )(logits, lengths, live.astype(jnp.int32), edits, table)


def _edit(
    logits: Ref,
    lengths: Ref,
    live: Ref,
    edits: Ref,
    table: SlotTable,
    edited: Ref,
    is_edited: Ref,
    *,
    interpret: bool,
) -> None:
    row, part = pl.program_id(0), pl.program_id(1)
    vocab, slot = logits.shape[1], table.slots[row]
    repetition = table.read(row, FloatColumn.REPETITION_PENALTY)
    frequency = table.read(row, FloatColumn.FREQUENCY_PENALTY)
    presence = table.read(row, FloatColumn.PRESENCE_PENALTY)
    is_penalized = (repetition != 1.0) | (frequency != 0.0) | (presence != 0.0)
    is_early = lengths[row] < table.read(row, IntColumn.MIN_LEN)
    is_biased = edits.bias_ids[slot, 0] >= 0
    wanted = (live[row] != 0) & (is_penalized | is_early | is_biased)

    @pl.when(part == 0)
    def flag() -> None:
        is_edited[row] = wanted.astype(jnp.int32)

    def pending_counts(ids: jax.Array) -> jax.Array | int:
        """Return how often each id is pending; only rows with penalties look."""
        pending = edits.pending
        if pending is None:
            return 0

        def add(i: jax.Array, count: jax.Array) -> jax.Array:
            # An unused id equals no lane's id.
            return count + (ids == pending[row, i] - edits.first[0]).astype(jnp.int32)

        most = is_penalized.astype(jnp.int32) * pending.shape[1]
        return lax.fori_loop(0, most, add, jnp.zeros(ids.shape, jnp.int32))

    def penalize(tile: jax.Array, _: None) -> None:
        ids = part * _PART + tile * _TILE + lax.iota(jnp.int32, _TILE)
        inside = ids < vocab
        x = plgpu.load(logits.at[row, ids], mask=inside, other=0.0)
        counts = plgpu.load(edits.counts.at[slot, ids], mask=inside & is_penalized, other=0).astype(jnp.int32)
        more = pending_counts(ids)
        times = ((counts & COUNT_MASK) + more).astype(jnp.float32)
        x = jnp.where((counts | more) != 0, jnp.where(x > 0, x / repetition, x * repetition), x)
        x = x - frequency * times - presence * (times > 0).astype(jnp.float32)
        plgpu.store(edited.at[row, ids], x, mask=inside)

    def own(ids: Ref, is_used: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return which of a slot's ids are in this part, where, and their numbers in the list."""
        width = ids.shape[1]
        number = lax.iota(jnp.int32, pl.next_power_of_2(width))
        token = plgpu.load(ids.at[slot, number], mask=is_used & (number < width), other=-1)
        at = token - edits.first[0]
        mine = (token >= 0) & (at >= part * _PART) & (at < jnp.minimum((part + 1) * _PART, vocab))
        return mine, jnp.where(mine, at, vocab), number

    @pl.when(wanted)
    def write() -> None:
        lax.fori_loop(0, _TILES, penalize, None)
        barrier(interpret)
        mine, at, number = own(edits.bias_ids, is_biased)
        value = plgpu.load(edits.bias_values.at[slot, number], mask=mine, other=0.0)
        x = plgpu.load(edited.at[row, at], mask=mine, other=0.0)
        plgpu.store(edited.at[row, at], x + value, mask=mine)
        barrier(interpret)
        mine, at, _ = own(edits.stop_ids, is_early)
        plgpu.store(edited.at[row, at], jnp.full(at.shape, -jnp.inf, jnp.float32), mask=mine)
