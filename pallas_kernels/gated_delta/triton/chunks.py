"""Rows of many tokens on Triton: one kernel convolves, another computes each row's tokens, some blocks at a time.

In the second, a program holds some columns of a row's state. What its programs read and one of them writes is read by
other operations before: the convolution's inputs by the first kernel, keys and decays of a slot by XLA.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Bool, Float, Float32, Int

from pallas_kernels.gated_delta.layout import BLOCK
from pallas_kernels.gated_delta.triton.tiles import (
    Facts,
    Place,
    Ref,
    RowRefs,
    StateRefs,
    TokenRefs,
    barrier,
    borders,
    convolved,
    decay_of,
    dot,
    keep_inputs,
    keep_tails,
    place,
    totals_of,
    unit,
    value_channel,
)

# Tokens of a program of the convolution, and the most channels.
_TOKENS, _CHANNELS = 16, 128
# Of a block of this size, the inverse is a short product.
_LEAST = 8


class _Old(NamedTuple):
    """The keys and decays of the rows' slots before the step."""

    keys: Ref
    decays: Ref


class _TokenPlaces(NamedTuple):
    """The row and position of each token."""

    row: Ref
    position: Ref


class _Vectors(NamedTuple):
    """The numbers of a `Place` that `convolved` needs, for several tokens."""

    layer: Array
    slot: Array
    token: Array
    lens: Array
    folded: Array
    source: Array
    key_head: Array


def convolve(
    new: TokenRefs,
    states: StateRefs,
    rows: RowRefs,
    places: tuple[Int[Array, " tokens"], Int[Array, " tokens"]],
    facts: Facts,
) -> Float[Array, "tokens key_heads width"]:
    """Return the output of the convolution after the SiLU."""
    tokens, key_heads, width = new.products.shape
    channels = min(_CHANNELS, width & -width)
    return pl.pallas_call(
        functools.partial(_convolve, channels=channels, facts=facts),
        grid=(width // channels, key_heads, pl.cdiv(tokens, _TOKENS)),
        out_shape=jax.ShapeDtypeStruct(new.products.shape, new.products.dtype),
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=1),
        interpret=facts.interpret,
        name="gated_delta_convolution",
    )(new, states, rows, _TokenPlaces(*places))


def _convolve(
    new: TokenRefs,
    states: StateRefs,
    rows: RowRefs,
    places: _TokenPlaces,
    out: Ref,
    *,
    channels: int,
    facts: Facts,
) -> None:
    token = pl.program_id(2) * _TOKENS + lax.iota(jnp.int32, _TOKENS)
    live = token < rows.query_starts[rows.num_seqs[0]]
    channel = pl.program_id(0) * channels + lax.broadcasted_iota(jnp.int32, (1, channels), 1)

    def load(ref: Ref, index: Array) -> Array:
        return plgpu.load(ref.at[index], mask=live, other=0)

    row = load(places.row, token)
    of_row = (load(x, row)[:, None] for x in (rows.slots, rows.query_starts, rows.lens, rows.folded, rows.sources))
    at = _Vectors(rows.layer[0], *of_row, pl.program_id(1))
    found = convolved(load(places.position, token)[:, None], channel, at, new, states, facts, live[:, None])
    index = jnp.where(live, token, out.shape[0] + token)
    mask = jnp.broadcast_to(live[:, None], found.shape)
    plgpu.store(out.at[index[:, None], pl.program_id(1), channel], found, mask=mask)


def chunks(
    x: Float[Array, "tokens key_heads width"],
    new: TokenRefs,
    states: StateRefs,
    rows: RowRefs,
    chunk: int,
    facts: Facts,
    num_warps: int,
) -> tuple[Float[Array, "tokens value_heads value_dim"], StateRefs]:
    """Return the outputs and the states; `x` is the output of the convolution. A loop takes `chunk` tokens at once."""
    heads = states.deltas.shape[2]
    old = _Old(*(pool[rows.layer[0], rows.slots] for pool in (states.keys, states.decays)))
    out, *updated = pl.pallas_call(
        functools.partial(_chunks, chunk=chunk, facts=facts),
        grid=(heads * facts.parts, len(rows.lens)),
        out_shape=(
            jax.ShapeDtypeStruct((len(x), heads, facts.value_dim), x.dtype),
            *(jax.ShapeDtypeStruct(pool.shape, pool.dtype) for pool in states),
        ),
        input_output_aliases={i: 1 + i for i in range(len(states))},
        compiler_params=plgpu.CompilerParams(num_warps=num_warps, num_stages=1),
        interpret=facts.interpret,
        name="gated_delta_chunks",
    )(*states, x, new, old, rows)
    return out, StateRefs(*updated)


def _chunks(*refs: Any, chunk: int, facts: Facts) -> None:
    x, new, old, rows, out, *arrays = refs[len(StateRefs._fields) :]
    # Rows with chunks come last and take longest, so they begin first.
    states, program, row = StateRefs(*arrays), pl.program_id(0), rows.lens.shape[0] - 1 - pl.program_id(1)

    @pl.when(row < rows.num_seqs[0])
    def _() -> None:
        at = place(rows, row, program, facts)
        _ChunkRow(x, new, old, states, rows, out, facts, row, at, chunk).run()


class _Tile(NamedTuple):
    """Consecutive tokens of a row; `old` ones have entries, `new` ones are of this step, the others aren't there.

    `totals` are decays summed from the first one on.
    """

    position: Int[Array, " chunk"]
    old: Bool[Array, " chunk"]
    new: Bool[Array, " chunk"]
    keys: Float32[Array, "chunk key_dim"]
    totals: Float32[Array, " chunk"]


class _ChunkRow(NamedTuple):
    x: Ref
    new: TokenRefs
    old: _Old
    states: StateRefs
    rows: RowRefs
    out: Ref
    facts: Facts
    row: Array
    at: Place
    chunk: int

    def run(self) -> None:
        """Compute the row's tokens, and keep what is needed of them."""
        at, facts, states = self.at, self.facts, self.states
        keep_tails(self.rows, self.row, at, self.new.products, states, facts)
        barrier(facts)
        keep_inputs(at, self.new.products, states, facts)
        state = plgpu.load(
            states.recurrent.at[self._columns_of(at.source)],
            mask=jnp.broadcast_to(at.folded > 0, (facts.key_dim, facts.columns)),
            other=0.0,
        )
        writes, border, target = borders(self.rows, self.row, at)[0]

        @pl.when(writes & (border == at.folded))
        def _() -> None:
            plgpu.store(states.recurrent.at[self._columns_of(target)], state)

        def step(i: Array, state: Array) -> Array:
            return self._step(at.folded + i * self.chunk, state)

        lax.fori_loop(0, pl.cdiv(at.end - at.folded, self.chunk), step, state)

    def _columns_of(self, row: Array) -> tuple[Any, ...]:
        """Return the index of the program's part of a state."""
        lane = lax.iota(jnp.int32, self.facts.key_dim)
        return self.at.layer, row, self.at.head, lane[:, None], self.at.column[None, :]

    def _step(self, start: Array, state: Float32[Array, "key_dim columns"]) -> Array:
        """Compute the tokens from position `start` on, and return the state after them."""
        at, facts = self.at, self.facts
        tile = self._tile(start)
        deltas = self._deltas(tile, state)
        self._attend(tile, deltas, state)
        self._keep_entries(tile, deltas)

        def state_at(border: Array) -> Array:
            last = jnp.sum(jnp.where(tile.position == border - 1, tile.totals, 0.0))
            left = jnp.where(tile.position < border, jnp.exp(last - tile.totals), 0.0)
            return jnp.exp(last) * state + dot((tile.keys * left[:, None]).T, deltas, facts)

        for wanted, border, to in borders(self.rows, self.row, at):

            @pl.when(wanted & (border > start) & (border <= start + self.chunk))
            def _(border: Array = border, to: Array = to) -> None:
                plgpu.store(self.states.recurrent.at[self._columns_of(to)], state_at(border))

        return state_at(start + self.chunk)

    def _tile(self, start: Array) -> _Tile:
        at, facts = self.at, self.facts
        lane = lax.iota(jnp.int32, facts.key_dim)
        position = start + lax.iota(jnp.int32, self.chunk)
        old, new = position < at.lens, (position >= at.lens) & (position < at.end)
        entry, token = lax.rem(position, facts.ring), at.token + position - at.lens
        mask = jnp.broadcast_to(old[:, None], (self.chunk, facts.key_dim))
        kept = plgpu.load(self.old.keys.at[self.row, at.key_head, entry[:, None], lane[None, :]], mask=mask, other=0.0)
        keys = kept + unit(self._load_new(token, new, lane + facts.key_dim))
        known = plgpu.load(self.old.decays.at[self.row, at.head, entry], mask=old, other=0.0)
        if self.chunk > BLOCK:
            known = totals_of(known, position, at.lens)
        gate = plgpu.load(self.new.gates.at[token, at.key_head, 1, at.member], mask=new, other=0.0)
        decay = jnp.where(new, decay_of(gate, self.new.rate[at.head], self.new.bias[at.head]), 0.0)
        before = jnp.sum(jnp.where(position == at.lens - 1, known, 0.0))
        return _Tile(position, old, new, keys, jnp.where(old, known, before + jnp.cumsum(decay)))

    def _load_new(self, token: Array, new: Array, channel: Array) -> Array:
        """Load outputs of the convolution, zeros for other tokens than new ones."""
        mask = jnp.broadcast_to(new[:, None], (len(token), len(channel)))
        return plgpu.load(self.x.at[token[:, None], self.at.key_head, channel[None, :]], mask=mask, other=0.0)

    def _deltas(self, tile: _Tile, state: Array) -> Float32[Array, "chunk columns"]:
        """Return the deltas of all tokens: those of old ones are known, those of new ones depend on each other."""
        at, facts = self.at, self.facts
        token, entry = at.token + tile.position - at.lens, lax.rem(tile.position, facts.ring)
        values = self._load_new(token, tile.new, value_channel(at, facts)).astype(jnp.float32)
        mask = jnp.broadcast_to(tile.old[:, None], values.shape)
        index = at.layer, at.slot, at.head, entry[:, None], at.column[None, :]
        known = plgpu.load(self.states.deltas.at[index], mask=mask, other=0.0)
        gate = plgpu.load(self.new.gates.at[token, at.key_head, 0, at.member], mask=tile.new, other=0.0)
        beta = jnp.where(tile.new, lax.logistic(gate.astype(jnp.float32)), 0.0)
        read = jnp.exp(tile.totals)[:, None] * dot(tile.keys, state, facts)
        wanted = jnp.where(tile.old[:, None], known, beta[:, None] * (values - read))
        of_earlier = beta[:, None] * self._decayed(tile, dot(tile.keys, tile.keys.T, facts), own=False)
        return dot(_inverse(of_earlier, facts), wanted, facts)

    def _decayed(self, tile: _Tile, scores: Float32[Array, "chunk chunk"], *, own: bool) -> Array:
        """Return the scores of earlier tokens, and of a token's `own` key, times the decay since then."""
        index = lax.iota(jnp.int32, self.chunk)
        seen = index[:, None] >= index[None, :] if own else index[:, None] > index[None, :]
        return jnp.where(seen, scores * jnp.exp(jnp.where(seen, tile.totals[:, None] - tile.totals[None, :], 0.0)), 0.0)

    def _attend(self, tile: _Tile, deltas: Array, state: Array) -> None:
        """Store the outputs of the new tokens."""
        at, facts = self.at, self.facts
        token = at.token + tile.position - at.lens
        q = unit(self._load_new(token, tile.new, lax.iota(jnp.int32, facts.key_dim))) * facts.key_dim**-0.5
        read = jnp.exp(tile.totals)[:, None] * dot(q, state, facts)
        result = read + dot(self._decayed(tile, dot(q, tile.keys.T, facts), own=True), deltas, facts)
        index = jnp.where(tile.new, token, self.out.shape[0] + lax.iota(jnp.int32, self.chunk))
        mask = jnp.broadcast_to(tile.new[:, None], result.shape)
        plgpu.store(self.out.at[index[:, None], at.head, at.column[None, :]], result.astype(self.out.dtype), mask=mask)

    def _keep_entries(self, tile: _Tile, deltas: Array) -> None:
        """Store the entries of new tokens that the state doesn't have."""
        at, facts, states = self.at, self.facts, self.states
        kept = tile.new & (tile.position >= at.after)
        lane = lax.iota(jnp.int32, facts.key_dim)
        entry = jnp.where(kept, lax.rem(tile.position, facts.ring), facts.ring + lax.iota(jnp.int32, self.chunk))

        def store(ref: Ref, head: Array, column: Array, values: Array, mine: Array | bool) -> None:
            mask = jnp.broadcast_to((kept & mine)[:, None], values.shape)
            plgpu.store(ref.at[at.layer, at.slot, head, entry[:, None], column[None, :]], values, mask=mask)

        @pl.when(jnp.max(kept.astype(jnp.int32)) > 0)
        def _() -> None:
            totals = tile.totals
            if self.chunk > BLOCK:
                before = tile.position[:, None] == ((tile.position & -BLOCK) - 1)[None, :]
                totals = totals - jnp.sum(jnp.where(before, totals[:, None], 0.0), axis=0)
            store(states.deltas, at.head, at.column, deltas, True)
            store(states.keys, at.key_head, lane, tile.keys, at.writes_keys)
            plgpu.store(states.decays.at[at.layer, at.slot, at.head, entry], totals, mask=kept & (at.part == 0))


def _inverse(below: Float32[Array, "n n"], facts: Facts) -> Float32[Array, "n n"]:
    """Return the inverse of 1 + `below`, which is zero on and above the diagonal.

    The inverse of small blocks on the diagonal is a product of powers. Those of blocks of twice the size follow from
    it, until there is one block. Powers of larger blocks would be large, and their sums inaccurate.
    """
    size = below.shape[0]
    row, column = lax.broadcasted_iota(jnp.int32, below.shape, 0), lax.broadcasted_iota(jnp.int32, below.shape, 1)

    def same(block: int) -> Array:
        return lax.div(row, block) == lax.div(column, block)

    one = jnp.where(row == column, 1.0, 0.0)
    power = jnp.where(same(_LEAST), below, 0.0)
    inverse = one - power
    for _ in range(2):
        power = dot(power, power, facts)
        inverse = dot(inverse, one + power, facts)
    block = _LEAST
    while block < size:
        across = jnp.where(same(2 * block) & ~same(block), below, 0.0)
        inverse = inverse - dot(dot(inverse, across, facts), inverse, facts)
        block *= 2
    return inverse
