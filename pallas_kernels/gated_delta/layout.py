"""What a gated delta net keeps of a sequence: the state after its last whole block, and the tokens after that.

A state changes with every token, but here it is written once for `BLOCK` tokens. A slot keeps what each token after the
last whole block adds to it: its key, its delta and its decay. The outputs of later tokens follow from the state and
these (the WY form of Yang et al. 2024 over a block that is not full yet). So

- a decode reads the state and writes it only when it completes a block,
- draft tokens that are rejected are forgotten by not counting them,
- the numbers of a token don't depend on how its sequence is divided into chunks, if a backend computes them in order,
- a slot always has the state at a border of blocks, where a cached prefix can end.

States are rows of a pool: a row is the whole of what a cached prefix needs, and has all layers.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int

BLOCK = 16
"""Tokens of a block. Blocks begin at multiples of it in the sequence."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DeltaStates:
    """The states of a group of layers.

    By row of the pool: `recurrent`, the state after whole blocks, and `tails`, the last inputs of the convolution
    before that border (fewer by one than it has taps).

    By slot: of each token after the border, in entry `position % ring`, its normalized key, its delta, and the sum of
    the logarithms of the decays of its block up to it; and the `inputs` of the convolution of the last tokens, in entry
    `position % recent`. Inputs of tokens before the border are not there.
    """

    recurrent: Float32[Array, "layers states value_heads key_dim value_dim"]
    tails: Float[Array, "layers states key_heads taps_before width"]
    keys: Float32[Array, "layers slots key_heads ring key_dim"]
    deltas: Float32[Array, "layers slots value_heads ring value_dim"]
    decays: Float32[Array, "layers slots value_heads ring"]
    inputs: Float[Array, "layers slots key_heads recent width"]

    @property
    def pools(self) -> tuple[jax.Array, ...]:
        """The arrays that have rows of the pool."""
        return self.recurrent, self.tails

    @property
    def ring(self) -> int:
        """The number of entries of a slot."""
        return int(self.keys.shape[3])

    @property
    def recent(self) -> int:
        """The number of inputs of the convolution that a slot has."""
        return int(self.inputs.shape[3])

    @property
    def num_layers(self) -> int:
        """The number of layers."""
        return int(self.recurrent.shape[0])

    @property
    def num_states(self) -> int:
        """The number of rows of the pool."""
        return int(self.recurrent.shape[1])


@dataclasses.dataclass(frozen=True)
class DeltaLayout:
    """The shapes of a group's arrays, over all shards.

    A key head has a group of value heads. `taps` is the size of the convolution's kernel, `dtype` that of its inputs,
    and `max_drafts` the most draft tokens of a row.
    """

    num_layers: int
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int
    dtype: np.dtype
    max_drafts: int = 0

    @property
    def group(self) -> int:
        """The value heads of a key head."""
        return self.value_heads // self.key_heads

    @property
    def width(self) -> int:
        """The inputs of the convolution for a key head: its query, its key, and the values of its group."""
        return 2 * self.key_dim + self.group * self.value_dim

    @property
    def ring(self) -> int:
        """The entries of a slot: a block that isn't full yet, and drafts after it."""
        return BLOCK * (1 + -(-self.max_drafts // BLOCK))

    @property
    def recent(self) -> int:
        """The number of inputs of the convolution that a slot keeps. A decode reads some entries and writes others."""
        return self.taps + self.max_drafts

    def pool_shapes(self, num_states: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the shapes of `DeltaStates.pools`."""
        layers = self.num_layers
        recurrent = layers, num_states, self.value_heads, self.key_dim, self.value_dim
        return recurrent, (layers, num_states, self.key_heads, self.taps - 1, self.width)

    def slot_shapes(self, num_slots: int) -> tuple[tuple[int, ...], ...]:
        """Return the shapes of the arrays by slot, in the order of `DeltaStates`."""
        slots = self.num_layers, num_slots
        return (
            (*slots, self.key_heads, self.ring, self.key_dim),
            (*slots, self.value_heads, self.ring, self.value_dim),
            (*slots, self.value_heads, self.ring),
            (*slots, self.key_heads, self.recent, self.width),
        )

    @property
    def state_bytes(self) -> int:
        """Bytes of a row of the pool over all shards: of a cached prefix."""
        recurrent, tails = self.pool_shapes(1)
        return int(np.prod(recurrent)) * 4 + int(np.prod(tails)) * self.dtype.itemsize

    @property
    def slot_bytes(self) -> int:
        """Bytes that a slot has over all shards, besides its row."""
        *entries, inputs = self.slot_shapes(1)
        return sum(int(np.prod(shape)) for shape in entries) * 4 + int(np.prod(inputs)) * self.dtype.itemsize


def read_state(states: DeltaStates, row: Int[Array, ""]) -> tuple[jax.Array, ...]:
    """Return a row of the pool with all layers, from each of `DeltaStates.pools`."""
    return tuple(jax.lax.dynamic_index_in_dim(pool, row, axis=1, keepdims=False) for pool in states.pools)


def write_state(states: DeltaStates, row: Int[Array, ""], values: tuple[jax.Array, ...]) -> DeltaStates:
    """Return the states with another content of a row of the pool. A row below 0 is skipped."""
    at = jnp.where(row < 0, states.num_states, row)
    recurrent, tails = (
        pool.at[:, at].set(value, mode="drop", wrap_negative_indices=False)
        for pool, value in zip(states.pools, values, strict=True)
    )
    return dataclasses.replace(states, recurrent=recurrent, tails=tails)
