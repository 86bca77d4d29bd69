"""The parts that the Triton kernels share: the scalars of a row, the inputs of the convolution, gates, products.

A program computes some columns of the values of one value head. Each of a slot's arrays is written by one program: keys
and the inputs of query and key by the first program of a key head, decays by the first of a value head, all else by the
program whose columns they are.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Float32, Int

from pallas_kernels.gated_delta.layout import BLOCK

NORM_EPS = 1e-6

# A reference into device memory; jax has no public type for it.
Ref = Any


@dataclasses.dataclass(frozen=True)
class Facts:
    """The static facts of a call; a program computes `columns` of the `value_dim` columns of a head."""

    group: int
    key_dim: int
    value_dim: int
    taps: int
    ring: int
    recent: int
    columns: int
    interpret: bool

    @property
    def parts(self) -> int:
        """The programs of a value head."""
        return self.value_dim // self.columns


class RowRefs(NamedTuple):
    """The arrays of `DeltaRows`, with `after` for `folded_after`, and the layer."""

    slots: Ref
    query_starts: Ref
    lens: Ref
    folded: Ref
    after: Ref
    sources: Ref
    targets: Ref
    snapshots: Ref
    snapshot_lens: Ref
    num_seqs: Ref
    layer: Ref


class StateRefs(NamedTuple):
    """The arrays of `DeltaStates`."""

    recurrent: Ref
    tails: Ref
    keys: Ref
    deltas: Ref
    decays: Ref
    inputs: Ref


class TokenRefs(NamedTuple):
    """The new tokens and the weights of a layer."""

    products: Ref
    gates: Ref
    conv: Ref
    rate: Ref
    bias: Ref


class Place(NamedTuple):
    """What a program computes: a row's scalars, of which `end` is its length after the step, and its columns."""

    layer: Array
    slot: Array
    token: Array
    lens: Array
    end: Array
    folded: Array
    after: Array
    source: Array
    head: Array
    key_head: Array
    member: Array
    part: Array
    column: Int[Array, " columns"]

    @property
    def writes_keys(self) -> Array:
        """Whether it is the program that writes what a key head's programs share."""
        return (self.member == 0) & (self.part == 0)


def place(rows: RowRefs, row: Array, program: Array, facts: Facts) -> Place:
    """Return what the program of this number computes of a row."""
    head, part = lax.div(program, facts.parts), lax.rem(program, facts.parts)
    token, lens = rows.query_starts[row], rows.lens[row]
    return Place(
        layer=rows.layer[0],
        slot=rows.slots[row],
        token=token,
        lens=lens,
        end=lens + rows.query_starts[row + 1] - token,
        folded=rows.folded[row],
        after=rows.after[row],
        source=rows.sources[row],
        head=head,
        key_head=lax.div(head, facts.group),
        member=lax.rem(head, facts.group),
        part=part,
        column=part * facts.columns + lax.iota(jnp.int32, facts.columns),
    )


def borders(rows: RowRefs, row: Array, at: Place) -> tuple[tuple[Array, Array, Array], ...]:
    """Return the borders at which a row's state is kept: whether, after how many tokens, and in which row."""
    after, target, snapshot = at.after, rows.targets[row], rows.snapshots[row]
    writes = (after > 0) & ((after != at.folded) | (target != at.source))
    return (writes, after, target), (snapshot >= 0, rows.snapshot_lens[row], snapshot)


def own_channels(at: Place, facts: Facts) -> tuple[tuple[Array | bool, Int[Array, " lanes"]], ...]:
    """Return the channels of the convolution whose inputs a program keeps, each with whether it does."""
    lane = lax.iota(jnp.int32, facts.key_dim)
    return (
        (at.writes_keys, lane),
        (at.writes_keys, lane + facts.key_dim),
        (at.part >= 0, value_channel(at, facts)),
    )


def value_channel(at: Place, facts: Facts) -> Int[Array, " columns"]:
    """Return the channels of a program's values."""
    return 2 * facts.key_dim + at.member * facts.value_dim + at.column


def input_at(
    position: Array, channel: Array, at: Any, products: Ref, states: StateRefs, facts: Facts, live: Array | bool = True
) -> Array:
    """Load inputs of the convolution: of this step, from the slot, from the state, or zeros before the first token.

    Position and channel have shapes that broadcast to each other. `at` is a `Place`, or has vectors like `position`.
    """
    shape = jnp.broadcast_shapes(jnp.shape(position), jnp.shape(channel))

    def load(ref: Ref, index: tuple[Any, ...], there: Array) -> Array:
        return plgpu.load(ref.at[(*index, channel)], mask=jnp.broadcast_to(there & live, shape), other=0.0)

    new, known = position >= at.lens, position >= at.folded
    inside = jnp.maximum(position, 0)
    before = jnp.clip(position - at.folded + facts.taps - 1, 0, facts.taps - 2)
    found = load(products, (at.token + position - at.lens, at.key_head), new)
    found += load(states.inputs, (at.layer, at.slot, at.key_head, lax.rem(inside, facts.recent)), ~new & known)
    return found + load(states.tails, (at.layer, at.source, at.key_head, before), ~known & (position >= 0))


def convolved(
    position: Array, channel: Array, at: Any, new: TokenRefs, states: StateRefs, facts: Facts, live: Array | bool = True
) -> Array:
    """Return the convolution's output after the SiLU, in the dtype of the products."""
    total = None
    for tap in range(facts.taps):
        one = input_at(position - (facts.taps - 1 - tap), channel, at, new.products, states, facts, live)
        weight = plgpu.load(new.conv.at[at.key_head, channel, tap]).astype(jnp.float32)
        term = one.astype(jnp.float32) * weight
        total = term if total is None else total + term
    assert total is not None
    return (total * lax.logistic(total)).astype(new.products.dtype)


def keep_tails(rows: RowRefs, row: Array, at: Place, products: Ref, states: StateRefs, facts: Facts) -> None:
    """Store the inputs of the convolution before each border at which the state is kept."""
    for wanted, border, to in borders(rows, row, at):
        for mine, channel in own_channels(at, facts):

            @pl.when(wanted & mine)
            def _(border: Array = border, to: Array = to, channel: Array = channel) -> None:
                for tap in range(facts.taps - 1):
                    found = input_at(border - (facts.taps - 1) + tap, channel, at, products, states, facts)
                    plgpu.store(states.tails.at[at.layer, to, at.key_head, tap, channel], found)


def keep_inputs(at: Place, products: Ref, states: StateRefs, facts: Facts) -> None:
    """Store the inputs of the convolution of the last new tokens in the slot."""

    def one(position: Array, _: None) -> None:
        for mine, channel in own_channels(at, facts):

            @pl.when(mine)
            def _(channel: Array = channel) -> None:
                found = plgpu.load(products.at[at.token + position - at.lens, at.key_head, channel])
                index = at.layer, at.slot, at.key_head, lax.rem(position, facts.recent), channel
                plgpu.store(states.inputs.at[index], found)

    lax.fori_loop(jnp.maximum(at.lens, at.end - facts.recent), at.end, one, None)


def decay_of(gate: Array, rate: Array, bias: Array) -> Array:
    """Return the logarithm of a decay."""
    x = gate.astype(jnp.float32) + bias
    return -jnp.exp(rate) * (jnp.maximum(x, 0.0) + jnp.log1p(jnp.exp(-jnp.abs(x))))


def unit(x: Float[Array, "*tokens key_dim"]) -> Float32[Array, "*tokens key_dim"]:
    """Return vectors of length 1, in float32."""
    x = x.astype(jnp.float32)
    return x * lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + NORM_EPS)


def totals_of(
    known: Float32[Array, " entries"], position: Int[Array, " entries"], end: Array
) -> Float32[Array, " entries"]:
    """Return the decays summed from the first entry on; those that are `known` are summed from their block on.

    Entries from `end` on aren't there.
    """
    last = jnp.where((position < end) & (position & (BLOCK - 1) == BLOCK - 1), known, 0.0)
    earlier = position[:, None] < (position & -BLOCK)[None, :]
    return known + jnp.sum(jnp.where(earlier, last[:, None], 0.0), axis=0)


def dot(a: Float32[Array, "m k"], b: Float32[Array, "k n"], facts: Facts) -> Float32[Array, "m n"]:
    """Multiply in float32: on tensor cores, by three products of parts of the operands."""
    precision: Any = lax.Precision.HIGHEST if facts.interpret else lax.DotAlgorithmPreset.BF16_BF16_F32_X3
    return jnp.dot(a, b, precision=precision, preferred_element_type=jnp.float32)


def barrier(facts: Facts) -> None:
    """Wait for all threads of the program, so that what was loaded before may be overwritten."""
    if not facts.interpret:
        plgpu.debug_barrier()
