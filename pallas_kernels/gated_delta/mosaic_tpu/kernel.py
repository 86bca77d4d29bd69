"""The kernel of the TPU backend: a step of its grid computes a block of a row, all heads of it, and keeps its state.

The blocks of a row follow each other, so the state stays in vector memory from one to the next.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Float32, Int

from pallas_kernels.gated_delta.inverse import inverse
from pallas_kernels.gated_delta.layout import BLOCK
from pallas_kernels.gated_delta.mosaic_tpu.blocks import BlockFacts

# A reference to memory inside a kernel.
Ref = Any


@dataclasses.dataclass(frozen=True)
class DeltaHeads:
    """The heads of a shard and their sizes."""

    key_heads: int
    group: int
    key_dim: int
    value_dim: int

    @property
    def value_heads(self) -> int:
        """The number of value heads."""
        return self.key_heads * self.group


class DeltaPools(NamedTuple):
    """The arrays of states that the kernel updates, with the rows or slots of all layers one after another."""

    recurrent: Any
    keys: Any
    deltas: Any


class BlockTokens(NamedTuple):
    """The new tokens of all blocks. `factors` has, for each token, beta and the decays summed from the block on."""

    q: Any
    k: Any
    v: Any
    factors: Any


class _DeltaScratch(NamedTuple):
    state: Ref
    kept: Ref
    keys: Ref
    deltas: Ref
    done: Ref


def compute_blocks(
    count: Int[Array, ""],
    facts: BlockFacts,
    tokens: BlockTokens,
    pools: DeltaPools,
    heads: DeltaHeads,
    *,
    vmem_limit: int,
    interpret: bool,
) -> tuple[Float[Array, "blocks value_heads block value_dim"], DeltaPools]:
    """Return the outputs of `count` blocks, and the pools, updated in place."""

    def at_row(names: str, *shape: int) -> pl.BlockSpec:
        """Return the block of a pool that the facts of these names index."""

        def index(i: Array, *facts: Ref) -> tuple[Any, ...]:
            of = BlockFacts(*facts)
            row = jnp.maximum(getattr(of, names)[i], 0)
            return (row, 0, of.part[i] if names == "slot" else 0, 0)

        return pl.BlockSpec((None, *shape), index)

    def of_block(x: Any) -> pl.BlockSpec:
        return pl.BlockSpec((None, *x.shape[1:]), lambda i, *_: (i, 0, 0, 0))

    state = heads.value_heads, heads.key_dim, heads.value_dim
    kept = (heads.key_heads, BLOCK, heads.key_dim), (heads.value_heads, BLOCK, heads.value_dim)
    spec = [at_row("source", *state), *(at_row("slot", *shape) for shape in kept), *map(of_block, tokens)]
    first, pools_first = len(facts), len(facts)
    out = jax.ShapeDtypeStruct((len(tokens.v), *kept[1]), tokens.v.dtype)
    results = pl.pallas_call(
        functools.partial(_kernel, heads=heads),
        out_shape=[out, *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in pools)],
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=first,
            grid=(count,),
            in_specs=spec,
            out_specs=[of_block(out), *[pl.BlockSpec(memory_space=pl.ANY)] * len(pools)],
            scratch_shapes=[
                *(pltpu.VMEM(shape, jnp.float32) for shape in (state, state, *kept)),
                pltpu.SemaphoreType.DMA,
            ],
        ),
        input_output_aliases={pools_first + i: 1 + i for i in range(len(pools))},
        interpret=pltpu.InterpretParams(detect_races=True) if interpret else False,
        compiler_params=pltpu.CompilerParams(vmem_limit_bytes=vmem_limit, dimension_semantics=("arbitrary",)),
        name="gated_delta_tpu",
    )(*facts, *pools, *tokens)
    return results[0], DeltaPools(*results[1:])


def _kernel(*refs: Any, heads: DeltaHeads) -> None:
    count = len(BlockFacts._fields)
    of, i = BlockFacts(*(ref[pl.program_id(0)] for ref in refs[:count])), count
    before, i = DeltaPools(*refs[i : i + 3]), i + 3
    tokens, i = BlockTokens(*refs[i : i + 4]), i + 4
    out, pools, scratch = refs[i], DeltaPools(*refs[i + 1 : i + 4]), _DeltaScratch(*refs[i + 4 :])

    def copy(source: Ref, to: Ref) -> None:
        one = pltpu.make_async_copy(source, to, scratch.done)
        one.start()
        one.wait()

    @pl.when(of.first == 1)
    def _() -> None:
        scratch.state[...] = jnp.where(of.source >= 0, before.recurrent[...], 0.0)

    pl.when(of.moved >= 0)(lambda: copy(scratch.state, pools.recurrent.at[of.moved]))
    lax.fori_loop(0, heads.value_heads, lambda h, _: _head(h, of, before, tokens, out, scratch, heads), None)
    pl.when(of.target >= 0)(lambda: copy(scratch.state, pools.recurrent.at[of.target]))
    pl.when(of.snapshot >= 0)(lambda: copy(scratch.state, pools.recurrent.at[of.snapshot]))

    @pl.when(of.keeps == 1)
    def _() -> None:
        entries = pl.ds(pl.multiple_of(of.part * BLOCK, BLOCK), BLOCK)
        copy(scratch.keys, pools.keys.at[of.slot, :, entries])
        copy(scratch.deltas, pools.deltas.at[of.slot, :, entries])


def _head(
    h: Array,
    of: BlockFacts,
    before: DeltaPools,
    tokens: BlockTokens,
    out: Ref,
    scratch: _DeltaScratch,
    heads: DeltaHeads,
) -> None:
    """Compute a value head of a block."""
    j = lax.div(h, heads.group)
    row = lax.broadcasted_iota(jnp.int32, (BLOCK, 1), 0)
    i, column = (lax.broadcasted_iota(jnp.int32, (BLOCK, BLOCK), axis) for axis in (0, 1))
    old = row < of.old
    k = jnp.where(old, before.keys[j], tokens.k[j])
    q, v, factors, state = tokens.q[j], tokens.v[h].astype(jnp.float32), tokens.factors[h], scratch.state[h]
    beta, total = factors[:, :1], factors[:, 1:2]
    # The same numbers along lanes.
    along = jnp.sum(jnp.where(i == column, total, 0.0), axis=0, keepdims=True)
    weight = jnp.exp(jnp.where(i >= column, total - along, -jnp.inf))
    decay = jnp.exp(total)
    of_keys = jnp.where(i > column, beta * weight * dot(k, k.T), 0.0)
    wanted = jnp.where(old, before.deltas[h], beta * (v - decay * dot(k, state)))
    delta = dot(inverse(of_keys, dot), wanted)
    out[h] = (decay * dot(q, state) + dot(weight * dot(q, k.T), delta)).astype(out.dtype)
    last = total[BLOCK - 1 :]
    scratch.state[h] = jnp.exp(last) * state + dot((k * jnp.exp(last - total)).T, delta)
    scratch.keys[j] = k
    scratch.deltas[h] = delta


def dot(a: Float32[Array, "m k"], b: Float32[Array, "k n"]) -> Float32[Array, "m n"]:
    return jnp.dot(a, b, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32)
