"""Rows of few tokens on Triton: one kernel reads each state once, and writes those whose block is completed.

Programs of a row read what one of them writes: keys, decays, and inputs of the convolution. No entry is both read and
written (`reads_and_writes_apart`), so they need no order.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Float32, Int

from pallas_kernels.gated_delta.layout import BLOCK, DeltaStates
from pallas_kernels.gated_delta.triton.tiles import (
    Facts,
    Place,
    Ref,
    RowRefs,
    StateRefs,
    TokenRefs,
    barrier,
    borders,
    decay_of,
    input_at,
    keep_inputs,
    keep_tails,
    place,
    totals_of,
    unit,
    value_channel,
)


class _Entries(NamedTuple):
    """The tokens after the border, by entry; `totals` are decays summed from the border on.

    `total` and `block` are the decays of the last token, summed from the border and from its block on.
    """

    keys: Float32[Array, "entries key_dim"]
    deltas: Float32[Array, "entries columns"]
    totals: Float32[Array, " entries"]
    total: Float32[Array, ""]
    block: Float32[Array, ""]


def reads_and_writes_apart(states: DeltaStates, taps: int, queries: int) -> bool:
    """Return whether rows of up to `queries` tokens write no entries that they read.

    A row reads the inputs of `taps - 1` tokens before its own, and entries of up to 15 tokens and its accepted drafts.
    """
    drafts = states.recent - taps
    return taps - 1 + queries <= states.recent and BLOCK - 1 + drafts + queries <= states.ring


def decode(
    new: TokenRefs,
    states: StateRefs,
    rows: RowRefs,
    queries: int,
    facts: Facts,
    num_warps: int,
) -> tuple[Float[Array, "tokens value_heads value_dim"], StateRefs]:
    """Return the outputs of rows of up to `queries` tokens, and the states."""
    heads = states.deltas.shape[2]
    out, *updated = pl.pallas_call(
        functools.partial(_decode, queries=queries, facts=facts),
        grid=(heads * facts.parts, len(rows.lens)),
        out_shape=(
            jax.ShapeDtypeStruct((len(new.products), heads, facts.value_dim), new.products.dtype),
            *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in states),
        ),
        input_output_aliases={i: 1 + i for i in range(len(states))},
        compiler_params=plgpu.CompilerParams(num_warps=num_warps, num_stages=1),
        interpret=facts.interpret,
        name="gated_delta_decode",
    )(*states, new, rows)
    return out, StateRefs(*updated)


def _decode(*refs: Any, queries: int, facts: Facts) -> None:
    new, rows, out, *arrays = refs[len(StateRefs._fields) :]
    states, program, row = StateRefs(*arrays), pl.program_id(0), pl.program_id(1)

    @pl.when(row < rows.num_seqs[0])
    def _() -> None:
        at = place(rows, row, program, facts)
        _DecodeRow(new, states, rows, out, facts, row, at).run(queries)


class _DecodeRow(NamedTuple):
    new: TokenRefs
    states: StateRefs
    rows: RowRefs
    out: Ref
    facts: Facts
    row: Array
    at: Place

    def run(self, queries: int) -> None:
        """Compute the row's tokens, and keep what is needed of them."""
        at, facts, states = self.at, self.facts, self.states
        lane = lax.iota(jnp.int32, facts.key_dim)
        entry = lax.iota(jnp.int32, pl.next_power_of_2(facts.ring))
        # The border is at a multiple of a block, as are the ends of the ring.
        position = at.folded + lax.rem(entry - lax.rem(at.folded, facts.ring) + facts.ring, facts.ring)
        position = jnp.where(entry < facts.ring, position, jnp.int32(2**30))
        state = self._state(lane)
        entries = self._entries(entry, position, lane)

        def step(i: Array, entries: _Entries) -> _Entries:
            return self._token(at.lens + i, entry, position, state, entries)

        if queries == 1:
            entries = step(jnp.int32(0), entries)
        else:
            entries = lax.fori_loop(0, at.end - at.lens, step, entries)
        keep_tails(self.rows, self.row, at, self.new.products, states, facts)
        barrier(facts)
        keep_inputs(at, self.new.products, states, facts)
        for wanted, border, to in reversed(borders(self.rows, self.row, at)):
            pl.when(wanted)(functools.partial(self._fold, border, to, position, entries))

    def _state(self, lane: Array) -> Float32[Array, "key_dim columns"]:
        """Load the program's part of the state."""
        at, facts = self.at, self.facts
        return plgpu.load(
            self.states.recurrent.at[at.layer, at.source, at.head, lane[:, None], at.column[None, :]],
            mask=jnp.broadcast_to(at.folded > 0, (facts.key_dim, facts.columns)),
            other=0.0,
        )

    def _fold(self, border: Array, to: Array, position: Array, entries: _Entries) -> None:
        """Store the state at a border.

        The state is loaded once more, as registers that held it until here would let fewer programs run at once.
        """
        at, facts, states = self.at, self.facts, self.states
        lane = lax.iota(jnp.int32, facts.key_dim)
        last = jnp.sum(jnp.where(position == border - 1, entries.totals, 0.0))

        def add(i: Array, state: Array) -> Array:
            entry = lax.rem(i, facts.ring)
            left = jnp.exp(last - jnp.sum(jnp.where(position == i, entries.totals, 0.0)))
            key = plgpu.load(states.keys.at[at.layer, at.slot, at.key_head, entry, lane])
            delta = plgpu.load(states.deltas.at[at.layer, at.slot, at.head, entry, at.column])
            return state + key[:, None] * (left * delta)[None, :]

        state = lax.fori_loop(at.folded, border, add, jnp.exp(last) * self._state(lane))
        plgpu.store(states.recurrent.at[at.layer, to, at.head, lane[:, None], at.column[None, :]], state)

    def _entries(self, entry: Array, position: Array, lane: Array) -> _Entries:
        """Load the entries that the slot has."""
        at, facts, states = self.at, self.facts, self.states
        there = position < at.lens

        def load(ref: Ref, head: Array, column: Array) -> Array:
            mask = jnp.broadcast_to(there[:, None], (len(entry), len(column)))
            return plgpu.load(ref.at[at.layer, at.slot, head, entry[:, None], column[None, :]], mask=mask, other=0.0)

        known = plgpu.load(states.decays.at[at.layer, at.slot, at.head, entry], mask=there, other=0.0)
        totals = known if facts.ring == BLOCK else totals_of(known, position, at.lens)
        last = position == at.lens - 1
        total = jnp.sum(jnp.where(last, totals, 0.0))
        block = jnp.sum(jnp.where(last, known, 0.0))
        keys, deltas = load(states.keys, at.key_head, lane), load(states.deltas, at.head, at.column)
        return _Entries(keys, deltas, totals, total, block)

    def _token(self, i: Array, entry: Array, position: Array, state: Array, entries: _Entries) -> _Entries:
        """Compute the token at position `i`."""
        at, facts, new, states = self.at, self.facts, self.new, self.states
        token = at.token + i - at.lens
        lane = lax.iota(jnp.int32, facts.key_dim)
        q, k = self._query_and_key(i)
        v = self._convolved(i, value_channel(at, facts)[None, None, :]).sum(axis=0).astype(jnp.float32)
        beta = lax.logistic(new.gates[token, at.key_head, 0, at.member].astype(jnp.float32))
        decay = decay_of(new.gates[token, at.key_head, 1, at.member], new.rate[at.head], new.bias[at.head])
        block = jnp.where(i & (BLOCK - 1) == 0, 0.0, entries.block) + decay
        total = entries.total + decay
        left = jnp.where(position < i, jnp.exp(total - entries.totals), 0.0)

        def read(x: Array) -> Array:
            """Return the product with the state before this token, decayed to it."""
            seen = jnp.sum(entries.keys * x[None, :], axis=1) * left
            of_entries = jnp.sum(entries.deltas * seen[:, None], axis=0)
            return jnp.exp(total) * jnp.sum(state * x[:, None], axis=0) + of_entries

        delta = beta * (v - read(k))
        result = read(q) + jnp.sum(q * k) * delta
        plgpu.store(self.out.at[token, at.head, at.column], result.astype(self.out.dtype))
        self._keep(i, k, delta, block)
        here = position == i
        return _Entries(
            jnp.where(here[:, None], k[None, :], entries.keys),
            jnp.where(here[:, None], delta[None, :], entries.deltas),
            jnp.where(here, total, entries.totals),
            total,
            block,
        )

    def _query_and_key(self, i: Array) -> tuple[Float32[Array, " key_dim"], Float32[Array, " key_dim"]]:
        """Return the query and the key at position `i`.

        They are computed as one array and then taken out of it: else Triton computes each as often as there are
        arrangements of threads in which it is used.
        """
        key_dim = self.facts.key_dim
        which, lane = (lax.broadcasted_iota(jnp.int32, (2, 1, key_dim), axis) for axis in (0, 2))
        both = unit(self._convolved(i, which * key_dim + lane))
        which = which[:, 0]
        q, k = (jnp.sum(jnp.where(which == member, both, 0.0), axis=0) for member in range(2))
        return q * key_dim**-0.5, k

    def _convolved(self, i: Array, channel: Int[Array, "some 1 lanes"]) -> Float[Array, "some lanes"]:
        """Return the convolution's output at position `i` after the SiLU, in the dtype of the products."""
        at, facts, new = self.at, self.facts, self.new
        tap = lax.broadcasted_iota(jnp.int32, (1, pl.next_power_of_2(facts.taps), 1), 1)
        live, shape = tap < facts.taps, jnp.broadcast_shapes(tap.shape, channel.shape)
        found = input_at(i - (facts.taps - 1) + tap, channel, at, new.products, self.states, facts, live)
        weight = plgpu.load(new.conv.at[at.key_head, channel, tap], mask=jnp.broadcast_to(live, shape), other=0.0)
        total = jnp.sum(found.astype(jnp.float32) * weight.astype(jnp.float32), axis=1)
        return (total * lax.logistic(total)).astype(new.products.dtype)

    def _keep(self, i: Array, k: Array, delta: Array, block: Array) -> None:
        """Store the entry of the token at position `i`.

        All programs of a key head store the same key, as each may read it when it stores the state.
        """
        at, states, entry = self.at, self.states, lax.rem(i, self.facts.ring)
        lane = lax.iota(jnp.int32, self.facts.key_dim)
        plgpu.store(states.keys.at[at.layer, at.slot, at.key_head, entry, lane], k)
        plgpu.store(states.deltas.at[at.layer, at.slot, at.head, entry, at.column], delta)
        plgpu.store(states.decays.at[at.layer, at.slot, at.head, entry], block)
