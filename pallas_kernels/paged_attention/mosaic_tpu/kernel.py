"""The ragged kernel of the TPU backend: a loop over decodes and a loop over tiles of prefill chunks, by the same code.

For each tile, the new tokens are merged with the pool's tokens at the tile's own positions, and the queries attend to
all of these; then they attend to the row's earlier tokens, block after block. Everything is copied one step ahead
(`memory.py`): page table, queries and own positions of the next tile, pages of the next block.

Many query heads share a latent row, so a tile of prefill has many rows: they are multiplied part after part, so that
the scores of a part are as small as those of other pools.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Bool, Float

from pallas_kernels.paged_attention.mosaic_tpu.memory import (
    Copies,
    KernelOperands,
    KernelResults,
    LoopScratch,
    LoopSizes,
    Tile,
    TpuAttention,
    own_positions,
    scratch_types,
    start,
    wait,
)

_MASKED = -1e30


def attention_kernel(
    operands: KernelOperands,
    results: KernelResults,
    attention: TpuAttention,
    decode: LoopSizes | None,
    prefill: LoopSizes | None,
) -> None:
    """Run the kernel: decodes, then tiles of prefill chunks; the program may have only one of them."""
    for which, sizes in enumerate((decode, prefill)):
        if sizes is None:
            continue

        def run(*memory: Any, which: int = which, sizes: LoopSizes = sizes) -> None:
            scratch = LoopScratch(*memory)
            copies = Copies(attention, sizes, operands, results, scratch)
            _TileLoop(attention, sizes, operands, scratch, copies).run(operands.counts[which])

        pl.run_scoped(run, *scratch_types(attention, sizes, operands.page_table.shape[2]))


class _TilePart(NamedTuple):
    """The rows of a tile that are multiplied at once: some `queries` of some KV `heads`.

    `state` is their index in the softmax's state.
    """

    state: Any
    heads: Any
    queries: Any


@dataclasses.dataclass(frozen=True)
class _TileLoop:
    attention: TpuAttention
    sizes: LoopSizes
    operands: KernelOperands
    scratch: LoopScratch
    copies: Copies

    def run(self, count: Array) -> None:
        """Compute all tiles; the first copies of the next tile are in flight meanwhile."""

        @pl.when(count > 0)
        def _() -> None:
            self.copies.table(0, start)
            self.copies.table(0, wait)
            self.copies.inputs(self.copies.tile(0), start)
            self.copies.start_first_block(self.copies.tile(0), 0)

        pl.when(count > 1)(lambda: self.copies.table(1, start))
        lax.fori_loop(0, count, lambda i, blocks_before: self._step(i, count, blocks_before), jnp.int32(0))
        pl.when(count > 0)(lambda: self.copies.out(self.copies.tile(count - 1), wait))
        if not self.copies.chained:
            pl.when(count > 0)(lambda: self.copies.writes(self.copies.tile(count - 1), wait))

    def _step(self, i: Array, count: Array, blocks_before: Array) -> Array:
        """Compute one tile. Blocks alternate between two slots, so the number of blocks before gives the next slot."""
        copies = self.copies
        tile = copies.tile(i)
        pl.when(i + 2 < count)(lambda: copies.table(i + 2, start))
        if not copies.chained:
            pl.when(i > 0)(lambda: copies.writes(copies.tile(i - 1), wait))

        @pl.when(i + 1 < count)
        def _() -> None:
            copies.table(i + 1, wait)
            copies.inputs(copies.tile(i + 1), start)

        copies.inputs(tile, wait)
        self._each_part(lambda part: self._begin(tile, part))
        if self.attention.writes:
            self._each_heads(lambda heads: self._merge(tile, heads))
        copies.writes(tile, start)
        self._each_part(lambda part: self._attend_own(tile, part))

        def next_tile(slot: Array) -> None:
            if copies.chained:
                copies.writes(tile, wait)
            pl.when(i + 1 < count)(lambda: copies.start_first_block(copies.tile(i + 1), slot))

        def block(b: Array, carry: None) -> None:
            slot = (blocks_before + b) % 2
            at = tile.first_block + b
            pl.when(b + 1 < tile.num_blocks)(lambda: copies.past(tile, at + 1, 1 - slot, start))
            pl.when(b + 1 == tile.num_blocks)(lambda: next_tile(1 - slot))
            copies.past(tile, at, slot, wait)
            self._attend_past(tile, at, slot)

        lax.fori_loop(0, tile.num_blocks, block, None)
        pl.when(tile.num_blocks == 0)(lambda: next_tile(blocks_before % 2))
        self._each_part(lambda part: self._finish(tile, part))

        # Tiles are written whole: a row's last one also covers tokens of the next row, which then overwrites them.
        pl.when(i > 0)(lambda: copies.out(copies.tile(i - 1), wait))
        copies.out(tile, start)
        return blocks_before + tile.num_blocks

    # Arithmetic, some heads or one part at a time.

    def _each_heads(self, do: Callable[[Any], None]) -> None:
        size = self.sizes.heads
        lax.fori_loop(0, self.attention.kv_heads // size, lambda i, carry: do(pl.ds(i * size, size)), None)

    def _each_part(self, do: Callable[[_TilePart], None]) -> None:
        parts, queries = self.sizes.parts, self.sizes.queries // self.sizes.parts
        if parts == 1:
            self._each_heads(lambda heads: do(_TilePart(heads, heads, pl.ds(0, queries))))
            return

        def one(i: Array, carry: None) -> None:
            do(_TilePart(pl.ds(i, 1), pl.ds(0, 1), pl.ds(i * queries, queries)))

        lax.fori_loop(0, parts, one, None)

    def _by_rows(self, x: Float[Array, "queries heads group lanes"]) -> Float[Array, "heads rows lanes"]:
        """Return the rows of each KV head: its queries times its group. With several queries, `x` has one head."""
        if self.sizes.queries == 1:
            return x[0]
        return x[:, 0].astype(jnp.float32).reshape(1, -1, x.shape[3])

    def _begin(self, tile: Tile, part: _TilePart) -> None:
        attention, s, state = self.attention, self.scratch, part.state
        q = self._by_rows(s.q[tile.number % 2, part.queries, part.heads]).astype(jnp.float32) * attention.scale
        if self.operands.scales is not None:
            q = q * self.operands.scales[0, part.heads]
        s.queries[state] = q.astype(attention.dtype)
        s.sums[state] = jnp.zeros_like(s.sums[state])
        if self.operands.sinks is None:
            s.peaks[state] = jnp.full_like(s.peaks[state], _MASKED)
            s.totals[state] = jnp.zeros_like(s.totals[state])
            return
        # A sink counts as a key whose value is zero.
        sinks = self.operands.sinks[part.heads]
        spread = jnp.broadcast_to(sinks[None], (part.queries.size, *sinks.shape))
        s.peaks[state] = self._by_rows(spread)
        s.totals[state] = jnp.ones_like(s.totals[state])

    def _merge(self, tile: Tile, heads: Any) -> None:
        """Merge the new tokens with those that the pool held."""
        slot = tile.number % 2
        at = self._positions(tile.base, own_positions(self.attention, self.sizes), axis=0)
        is_new = (at >= tile.position) & (at < tile.end)
        for new_ref, own_ref in zip(self.scratch.new, self.scratch.own, strict=True):
            old = own_ref[slot, heads]
            if self.copies.chained:
                new = new_ref[slot, : at.shape[0], heads][:, 0].astype(jnp.float32).reshape(1, *at.shape[:1], -1)
            else:
                new = new_ref[slot, 0, heads].astype(jnp.float32)
            merged = jnp.where(is_new[None], new, old.astype(jnp.float32).reshape(old.shape[0], at.shape[0], -1))
            own_ref[slot, heads] = merged.astype(old.dtype).reshape(old.shape)

    def _attend_own(self, tile: Tile, part: _TilePart) -> None:
        attention, slot, size = self.attention, tile.number % 2, own_positions(self.attention, self.sizes)
        keys, values = self._keys_and_values(self.scratch.own, slot, part.heads)
        at = self._positions(tile.base, size, axis=0)
        held = at < tile.end
        if attention.window is not None:
            held &= at >= tile.first
        values = jnp.where(held[None], values, 0.0).astype(attention.dtype)
        ahead = self._positions(tile.base, size, axis=1) - tile.position
        query = lax.broadcasted_iota(jnp.int32, (self.scratch.queries.shape[1], 1), 0)
        if self.sizes.parts > 1:
            query = query + part.queries.start * attention.group
        seen = ahead * attention.group <= query
        self._attend(part.state, keys.astype(attention.dtype), values, self._within_window(seen, ahead))

    def _attend_past(self, tile: Tile, block: Array, slot: Array) -> None:
        attention = self.attention
        size = self.sizes.pages * attention.page_size
        begin = block * size
        past_values = self.scratch.past[-1]

        # Memory that was not copied to may hold NaN, which a weight of 0 would not remove from a sum.
        @pl.when((begin < tile.first) | (begin + size > tile.base))
        def _() -> None:
            at = self._positions(begin, size, axis=0)
            held = (at >= tile.first) & (at < tile.base)

            def clean(heads: Any) -> None:
                values = past_values[slot, heads]
                kept = jnp.where(held[None], self._tokens(values), 0.0)
                past_values[slot, heads] = kept.astype(values.dtype).reshape(values.shape)

            self._each_heads(clean)

        at = self._positions(begin, size, axis=1)
        seen = self._within_window(at < tile.base, at - tile.position)

        def attend(part: _TilePart) -> None:
            keys, values = self._keys_and_values(self.scratch.past, slot, part.heads)
            self._attend(part.state, keys.astype(attention.dtype), values.astype(attention.dtype), seen)

        self._each_part(attend)

    def _within_window(self, seen: Bool[Array, "rows keys"], ahead: Array) -> Bool[Array, "rows keys"]:
        """Mask positions outside the window. `ahead` is the distance of keys from the tile's first query."""
        if self.attention.window is None:
            return seen
        query = lax.broadcasted_iota(jnp.int32, (self.scratch.queries.shape[1], 1), 0)
        return seen & (query < (ahead + self.attention.window) * self.attention.group)

    def _attend(
        self,
        state: Any,
        keys: Float[Array, "heads keys lanes"],
        values: Float[Array, "heads keys out_lanes"],
        seen: Bool[Array, "rows keys"],
    ) -> None:
        """Add a block to the softmax; sums under the old peak are rescaled (Milakov, Gimelshein 2018)."""
        s, cap = self.scratch, self.attention.soft_cap
        precision = lax.Precision.HIGHEST if keys.dtype == jnp.float32 else lax.Precision.DEFAULT
        logits = jnp.einsum(
            "hrl,hkl->hrk", s.queries[state], keys, precision=precision, preferred_element_type=jnp.float32
        )
        if cap is not None:
            logits = cap * jnp.tanh(logits / cap)
        logits = jnp.where(seen[None], logits, _MASKED)
        old_peak = s.peaks[state][:, :, :1]
        peak = jnp.maximum(old_peak, logits.max(axis=2, keepdims=True))
        keep, weights = jnp.exp(old_peak - peak), jnp.exp(logits - peak)
        added = jnp.einsum(
            "hrk,hkl->hrl",
            weights.astype(values.dtype),
            values,
            precision=precision,
            preferred_element_type=jnp.float32,
        )
        s.sums[state] = s.sums[state] * keep + added
        s.totals[state] = s.totals[state] * keep + weights.sum(axis=2, keepdims=True)
        s.peaks[state] = jnp.broadcast_to(peak, s.peaks[state].shape)

    def _finish(self, tile: Tile, part: _TilePart) -> None:
        s, slot, lanes = self.scratch, tile.number % 2, self.attention.out_lanes
        out = s.sums[part.state] / s.totals[part.state][:, :, :1]
        if self.operands.scales is not None:
            out = out * self.operands.scales[1, part.heads][:, :, :lanes]
        if self.sizes.queries == 1:
            s.out[slot, 0, part.heads] = out.astype(s.out.dtype)
        else:
            shape = (part.queries.size, 1, self.attention.group, lanes)
            s.out[slot, part.queries, part.heads] = out.reshape(shape).astype(s.out.dtype)

    def _keys_and_values(
        self, arrays: tuple[Any, ...], slot: Array, heads: Any
    ) -> tuple[Float[Array, "heads tokens lanes"], Float[Array, "heads tokens out_lanes"]]:
        """Return the tokens of a buffer of pages or units. Latent rows are loaded once for both."""
        keys = self._tokens(arrays[0][slot, heads])
        if self.attention.value_lanes is not None:
            return keys, keys[:, :, : self.attention.value_lanes]
        return keys, self._tokens(arrays[-1][slot, heads])

    @staticmethod
    def _positions(begin: Array, size: int, *, axis: int) -> Array:
        """Return positions from `begin` on, as a column (axis 0) or a row (axis 1)."""
        return begin + lax.broadcasted_iota(jnp.int32, (size, 1) if axis == 0 else (1, size), axis)

    def _tokens(self, x: Array) -> Float[Array, "heads tokens lanes"]:
        """Return the tokens of pages or units in one dimension. 8-bit types are converted first: their memory tiles
        may be larger than a page."""
        x = x.astype(self.attention.dtype) if x.dtype.itemsize == 1 else x
        return x.reshape(x.shape[0], -1, x.shape[3])
