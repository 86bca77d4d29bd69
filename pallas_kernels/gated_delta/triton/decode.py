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
from jaxtyping import Array, Float, Float32

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
    convolved,
    decay_of,
    dot,
    keep_tails,
    own_channels,
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
        state = plgpu.load(
            states.recurrent.at[at.layer, at.source, at.head, lane[:, None], at.column[None, :]],
            mask=jnp.broadcast_to(at.folded > 0, (facts.key_dim, facts.columns)),
            other=0.0,
        )
        entries = self._entries(entry, position, lane)
        keep_tails(self.rows, self.row, at, self.new.products, states, facts)
        barrier(facts)

        def step(i: Array, entries: _Entries) -> _Entries:
            return self._token(at.lens + i, entry, position, state, entries)

        if queries == 1:
            entries = step(jnp.int32(0), entries)
        else:
            entries = lax.fori_loop(0, at.end - at.lens, step, entries)
        for wanted, border, to in borders(self.rows, self.row, at):

            @pl.when(wanted)
            def _(border: Array = border, to: Array = to) -> None:
                last = jnp.sum(jnp.where(position == border - 1, entries.totals, 0.0))
                left = jnp.where(position < border, jnp.exp(last - entries.totals), 0.0)
                then = jnp.exp(last) * state + dot((entries.keys * left[:, None]).T, entries.deltas, facts)
                index = at.layer, to, at.head, lane[:, None], at.column[None, :]
                plgpu.store(states.recurrent.at[index], then)

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
        q, k, v = (
            convolved(i, channel, at, new, states, facts)
            for channel in (lane, lane + facts.key_dim, value_channel(at, facts))
        )
        q, k, v = unit(q) * facts.key_dim**-0.5, unit(k), v.astype(jnp.float32)
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

    def _keep(self, i: Array, k: Array, delta: Array, block: Array) -> None:
        """Store the entry of the token at position `i`, unless the state has it, and its input of the convolution."""
        at, facts, states = self.at, self.facts, self.states
        token, entry = at.token + i - at.lens, lax.rem(i, facts.ring)
        for mine, channel in own_channels(at, facts):

            @pl.when(mine)
            def _(channel: Array = channel) -> None:
                found = plgpu.load(self.new.products.at[token, at.key_head, channel])
                plgpu.store(states.inputs.at[at.layer, at.slot, at.key_head, lax.rem(i, facts.recent), channel], found)

        kept = i >= at.after
        lane = lax.iota(jnp.int32, facts.key_dim)

        @pl.when(kept)
        def _() -> None:
            plgpu.store(states.deltas.at[at.layer, at.slot, at.head, entry, at.column], delta)

        @pl.when(kept & at.writes_keys)
        def _() -> None:
            plgpu.store(states.keys.at[at.layer, at.slot, at.key_head, entry, lane], k)

        @pl.when(kept & (at.part == 0))
        def _() -> None:
            plgpu.store(states.decays.at[at.layer, at.slot, at.head, entry], block)
