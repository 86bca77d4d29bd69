"""The kernel of decodes: a step of its grid computes the one new token of a row, for all heads.

Products with a single vector leave a matrix unit idle, so they are sums over the vector unit's rows. XLA computes what
depends on decays alone.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float32

from pallas_kernels.gated_delta.arguments import DeltaRows
from pallas_kernels.gated_delta.layout import BLOCK
from pallas_kernels.gated_delta.mosaic_tpu.kernel import DeltaHeads, DeltaPools, Ref, dot
from pallas_kernels.gated_delta.reference import writes_target

# Entries that are written at a time.
_UNIT = 8


class _DecodeFacts(NamedTuple):
    """The scalars of each row. Rows of the pool and slots count those of all layers, -1 stands for none."""

    source: Array
    slot: Array
    folded: Array
    length: Array
    target: Array
    snapshot: Array


class DecayFactors(NamedTuple):
    """The numbers of each row and head that depend on decays: `[rows, value_heads, numbers]`.

    `left` is how much of each entry is left at the new token. `target` and `snapshot` are that at the border at which
    the state is stored, zero for entries after it. Of `scalars`, the first is beta, the others are how much of the
    state is left at the token and at the borders.
    """

    scalars: Array
    left: Array
    target: Array
    snapshot: Array


def max_ring(lanes: int) -> int:
    """Return how many entries a slot may have: a row's numbers of a head have to fit into lanes."""
    return (lanes - 4) // 3 // BLOCK * BLOCK


def factors_of(
    beta: Float32[Array, "rows value_heads"],
    decay: Float32[Array, "rows value_heads"],
    decays: Float32[Array, "slots value_heads ring"],
    rows: DeltaRows,
) -> tuple[DecayFactors, Float32[Array, "rows value_heads ring"]]:
    """Return the factors of each row, and the decays of its slot, to which that of the new token was added."""
    ring = decays.shape[2]
    position = rows.folded[:, None] + (jnp.arange(ring) - rows.folded[:, None]) % ring
    lens = rows.lens[:, None]
    old, new = (position < lens)[:, None], (position == lens)[:, None]
    known = jnp.where(old, decays.at[rows.slots].get(mode="clip"), 0)
    # Decays in the slot are summed from a block on.
    last = jnp.where((position == lens - 1)[:, None], known, 0).sum(axis=2)
    own = jnp.where(rows.lens[:, None] % BLOCK == 0, 0, last) + decay
    known = jnp.where(new, own[:, :, None], known)
    ends = jnp.where((position % BLOCK == BLOCK - 1)[:, None], known, 0)
    earlier = position[:, :, None] < (position // BLOCK * BLOCK)[:, None, :]
    totals = known + jnp.einsum("rhe,ref->rhf", ends, earlier.astype(jnp.float32), precision=lax.Precision.HIGHEST)
    total = jnp.where(new, totals, 0).sum(axis=2, keepdims=True)

    def at_border(border: Array) -> tuple[Array, Array]:
        before = jnp.where((position == border[:, None] - 1)[:, None], totals, 0).sum(axis=2, keepdims=True)
        inside = ((old | new)[:, 0] & (position < border[:, None]))[:, None]
        return jnp.exp(before), jnp.where(inside, jnp.exp(jnp.where(inside, before - totals, 0)), 0)

    left = jnp.where(old, jnp.exp(jnp.where(old, total - totals, 0)), 0)
    (of_target, target), (of_snapshot, snapshot) = (at_border(x) for x in (rows.folded_after, rows.snapshot_lens))
    scalars = jnp.concatenate([beta[:, :, None], jnp.exp(total), of_target, of_snapshot], axis=2)
    return DecayFactors(scalars, left, target, snapshot), known


def compute_decodes(
    q: Float32[Array, "rows key_heads key_dim"],
    k: Float32[Array, "rows key_heads key_dim"],
    v: Float32[Array, "rows value_heads value_dim"],
    factors: DecayFactors,
    pools: DeltaPools,
    rows: DeltaRows,
    heads: DeltaHeads,
    *,
    vmem_limit: int,
    interpret: bool,
) -> tuple[Float32[Array, "rows value_heads value_dim"], DeltaPools]:
    """Return the outputs of rows of one token, and the pools, updated in place."""
    ring = pools.keys.shape[2]
    facts = _DecodeFacts(
        source=jnp.where(rows.folded > 0, rows.sources, -1),
        slot=rows.slots,
        folded=rows.folded,
        length=rows.lens,
        target=jnp.where(writes_target(rows), rows.targets, -1),
        snapshot=rows.snapshots,
    )
    packed = jnp.concatenate(factors, axis=2)
    packed = jnp.pad(packed, ((0, 0), (0, 0), (0, -packed.shape[2] % 128)))

    def at_row(name: str, *shape: int) -> pl.BlockSpec:
        def index(i: Array, *facts: Ref) -> tuple[Any, ...]:
            return (jnp.maximum(getattr(_DecodeFacts(*facts), name)[i], 0), *(0,) * len(shape))

        return pl.BlockSpec((None, *shape), index)

    def of_row(x: Any) -> pl.BlockSpec:
        return pl.BlockSpec((None, *x.shape[1:]), lambda i, *_: (i, 0, 0))

    state = heads.value_heads, heads.key_dim, heads.value_dim
    kept = (heads.key_heads, ring, heads.key_dim), (heads.value_heads, ring, heads.value_dim)
    out = jax.ShapeDtypeStruct(v.shape, jnp.float32)
    tokens = q, k, v, packed
    results = pl.pallas_call(
        functools.partial(_kernel, ring=ring, heads=heads),
        out_shape=[out, *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in pools)],
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(facts),
            grid=(rows.num_seqs,),
            in_specs=[at_row("source", *state), *(at_row("slot", *x) for x in kept), *map(of_row, tokens)],
            out_specs=[of_row(out), *[pl.BlockSpec(memory_space=pl.ANY)] * len(pools)],
            scratch_shapes=[
                *(pltpu.VMEM(shape, jnp.float32) for shape in (state, *kept)),
                pltpu.SemaphoreType.DMA,
            ],
        ),
        input_output_aliases={len(facts) + i: 1 + i for i in range(len(pools))},
        interpret=pltpu.InterpretParams(detect_races=True) if interpret else False,
        compiler_params=pltpu.CompilerParams(vmem_limit_bytes=vmem_limit, dimension_semantics=("arbitrary",)),
        name="gated_delta_tpu_decode",
    )(*facts, *pools, *tokens)
    return results[0], DeltaPools(*results[1:])


class _DecodeScratch(NamedTuple):
    state: Ref
    keys: Ref
    deltas: Ref
    done: Ref


def _kernel(*refs: Any, ring: int, heads: DeltaHeads) -> None:
    count = len(_DecodeFacts._fields)
    of = _DecodeFacts(*(ref[pl.program_id(0)] for ref in refs[:count]))
    before, (q, k, v, packed), out = DeltaPools(*refs[count : count + 3]), refs[count + 3 : count + 7], refs[count + 7]
    pools, scratch = DeltaPools(*refs[count + 8 : count + 11]), _DecodeScratch(*refs[count + 11 :])
    entry = lax.broadcasted_iota(jnp.int32, (ring, 1), 0)
    offset = lax.rem(entry - lax.rem(of.folded, ring) + ring, ring)
    old, own = offset < of.length - of.folded, offset == of.length - of.folded
    # What is a row of the memory here is a column of the state.
    queries, keys, numbers = q[...].T, k[...].T, packed[...].T

    def column(x: Array, head: Array) -> Array:
        lane = lax.broadcasted_iota(jnp.int32, x.shape, 1)
        return jnp.sum(jnp.where(lane == head, x, 0.0), axis=1, keepdims=True)

    def head(h: Array, _: None) -> None:
        j = lax.div(h, heads.group)
        key, query, state = k[pl.ds(j, 1)], q[pl.ds(j, 1)], before.recurrent[h]
        state = jnp.where(of.source >= 0, state, 0.0)
        number = column(numbers, h)
        beta, decay, left = number[0:1], number[1:2], number[4 : 4 + ring]
        kept, deltas = jnp.where(old, before.keys[j], 0.0), jnp.where(old, before.deltas[h], 0.0)

        def read(along: Array, down: Array) -> Array:
            seen = jnp.sum(kept * along, axis=1, keepdims=True) * left
            of_entries = jnp.sum(seen * deltas, axis=0, keepdims=True)
            return decay * jnp.sum(state * down, axis=0, keepdims=True) + of_entries

        delta = beta * (v[pl.ds(h, 1)] - read(key, column(keys, j)))
        score = jnp.sum(query * key, axis=1, keepdims=True)
        out[pl.ds(h, 1)] = read(query, column(queries, j)) + score * delta
        scratch.keys[j] = jnp.where(own, key, kept)
        scratch.deltas[h] = jnp.where(own, delta, deltas)

    lax.fori_loop(0, heads.value_heads, head, None)

    def copy(source: Ref, to: Ref) -> None:
        one = pltpu.make_async_copy(source, to, scratch.done)
        one.start()
        one.wait()

    unit = pl.ds(pl.multiple_of(lax.div(lax.rem(of.length, ring), _UNIT) * _UNIT, _UNIT), _UNIT)
    copy(scratch.keys.at[:, unit], pools.keys.at[of.slot, :, unit])
    copy(scratch.deltas.at[:, unit], pools.deltas.at[of.slot, :, unit])
    for which, to in enumerate((of.target, of.snapshot)):

        @pl.when(to >= 0)
        def _(which: int = which, to: Array = to) -> None:
            def fold(h: Array, _: None) -> None:
                state, number = jnp.where(of.source >= 0, before.recurrent[h], 0.0), column(numbers, h)
                first = 4 + (1 + which) * ring
                kept = scratch.keys[lax.div(h, heads.group)] * number[first : first + ring]
                scratch.state[h] = number[2 + which : 3 + which] * state + dot(kept.T, scratch.deltas[h])

            lax.fori_loop(0, heads.value_heads, fold, None)
            copy(scratch.state, pools.recurrent.at[to])
