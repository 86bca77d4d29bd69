"""The lookup in plain XLA: the contract of the kernel, and the fallback where there is none."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, UInt32

from pallas_kernels.ngram_lookup.index import GOLDEN, PRIME, NgramIndex, NgramLookup


def propose(
    index: NgramIndex,
    drafts: Int[Array, "slots max_drafts"],
    counts: Int[Array, " slots"],
    token_slots: Int[Array, " tokens"],
    positions: Int[Array, " tokens"],
    tokens: Int[Array, " tokens"],
    slots: Int[Array, " rows"],
    lookup: NgramLookup,
) -> tuple[NgramIndex, Int[Array, "slots max_drafts"], Int[Array, " slots"]]:
    """Add tokens to their sequences, then replace the drafts of `slots`; return index, drafts and counts.

    Invalid slots are dropped, as are positions past the end. Of n-grams of one call with the same entry of a table, any
    may be stored.
    """
    index = remember(index, token_slots, positions, tokens, lookup)
    found, valid = look_up(index, jnp.minimum(slots, len(counts) - 1), lookup)
    return index, drafts.at[slots].set(found, mode="drop"), counts.at[slots].set(valid, mode="drop")


@jax.named_scope("remember")
def remember(
    index: NgramIndex,
    slots: Int[Array, " tokens"],
    positions: Int[Array, " tokens"],
    tokens: Int[Array, " tokens"],
    lookup: NgramLookup,
) -> NgramIndex:
    """Add tokens to their sequences, and the n-grams that they follow to the tables. Invalid slots are dropped."""
    num_slots, max_tokens = index.history.shape
    slots = jnp.where((slots < 0) | (positions >= max_tokens), num_slots, slots)
    history = index.history.at[slots, positions].set(tokens, mode="drop")
    row = jnp.minimum(slots, num_slots - 1)
    before = positions[:, None] - 1 - jnp.arange(lookup.longest, dtype=jnp.int32)
    grams = history[row[:, None], jnp.maximum(before, 0)]
    own_hash, shared_hash = _hashes(grams, index.namespaces[row], lookup.sizes)
    size = jnp.arange(len(lookup.sizes), dtype=jnp.int32)[None]
    at = jnp.where(positions[:, None] >= jnp.asarray(lookup.sizes, jnp.int32), slots[:, None], num_slots)
    own = index.own.at[at, size, _entry(own_hash, index.own)].set(positions[:, None], mode="drop")
    shared_row, entry = _shared_entry(shared_hash, index.shared)
    flat = (row * max_tokens).astype(jnp.uint32) + positions.astype(jnp.uint32)
    shared_row = jnp.where(at < num_slots, shared_row, num_slots)
    shared = index.shared.at[shared_row, size, entry].set(flat[:, None], mode="drop")
    lengths = index.lengths.at[slots].max(positions + 1, mode="drop")
    return dataclasses.replace(index, history=history, lengths=lengths, own=own, shared=shared)


@jax.named_scope("look_up")
def look_up(
    index: NgramIndex, slots: Int[Array, " rows"], lookup: NgramLookup
) -> tuple[Int[Array, "rows max_drafts"], Int[Array, " rows"]]:
    """Return the drafts of slots, and how many tokens of each are valid."""
    max_tokens = index.history.shape[1]
    lengths = index.lengths[slots]
    back = jnp.arange(lookup.longest, dtype=jnp.int32)
    tail = index.history[slots[:, None], jnp.maximum(lengths[:, None] - 1 - back, 0)]
    own_hash, shared_hash = _hashes(tail, index.namespaces[slots], lookup.sizes)
    size = jnp.arange(len(lookup.sizes), dtype=jnp.int32)[None]
    own_at = index.own[slots[:, None], size, _entry(own_hash, index.own)]
    row, entry = _shared_entry(shared_hash, index.shared)
    flat = index.shared[row, size, entry]
    shared_slot, shared_at = (x.astype(jnp.int32) for x in (flat // max_tokens, flat % max_tokens))

    places = jnp.concatenate([own_at, shared_at], axis=1)
    where = jnp.concatenate([jnp.broadcast_to(slots[:, None], own_at.shape), shared_slot], axis=1)
    at = places[:, :, None] - 1 - back
    same = (index.history[where[:, :, None], jnp.maximum(at, 0)] == tail[:, None]) & (at >= 0)
    same &= (back < lengths[:, None])[:, None]
    matched = jnp.cumprod(same.astype(jnp.int32), axis=2).sum(axis=2)
    usable = (places < index.lengths[where]) & (index.namespaces[where] == index.namespaces[slots][:, None])
    matched = jnp.where(usable & (matched >= lookup.shortest), matched, 0)
    best = jnp.argmax(2 * matched + (where == slots[:, None]), axis=1)[:, None]
    found, slot, place = (jnp.take_along_axis(x, best, axis=1)[:, 0] for x in (matched, where, places))

    own = slot == slots
    left = jnp.maximum(index.lengths[slot] - place, 1)[:, None]
    ahead = jnp.arange(lookup.max_drafts, dtype=jnp.int32)
    # If the place is so near the end that the draft passes it, the draft repeats the tokens up to the end.
    at = place[:, None] + jnp.where(own[:, None], ahead % left, ahead)
    drafts = index.history[slot[:, None], jnp.minimum(at, max_tokens - 1)]
    counts = jnp.where(own, lookup.max_drafts, jnp.minimum(left[:, 0], lookup.max_drafts))
    return drafts, jnp.where(found > 0, counts, 0)


def _hashes(
    grams: Int[Array, "rows longest"], namespaces: Int[Array, " rows"], sizes: Sequence[int]
) -> tuple[UInt32[Array, "rows sizes"], UInt32[Array, "rows sizes"]]:
    """Return hashes of the n-grams that `grams` holds backwards, without and with their namespaces."""
    hashes, state = [], jnp.zeros(len(grams), jnp.uint32)
    for size in range(1, max(sizes) + 1):
        state = (state ^ grams[:, size - 1].astype(jnp.uint32)) * jnp.uint32(GOLDEN)
        state ^= state >> 15
        if size in sizes:
            hashes.append(state)
    own = jnp.stack(hashes, axis=1)
    shared = (own ^ namespaces[:, None].astype(jnp.uint32)) * jnp.uint32(PRIME)
    return own, shared ^ (shared >> 13)


def _entry(hashes: UInt32[Array, "rows sizes"], table: Array) -> Int[Array, "rows sizes"]:
    return (hashes % table.shape[2]).astype(jnp.int32)


def _shared_entry(hashes: UInt32[Array, "rows sizes"], table: Array) -> tuple[Array, Array]:
    """Return the places of entries in a table over all slots."""
    at = hashes % (table.shape[0] * table.shape[2])
    return (at // table.shape[2]).astype(jnp.int32), (at % table.shape[2]).astype(jnp.int32)
