"""The vectors of pooled sequences: a hidden state of each, or the mean of all, and the layers that follow."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxserve.layers.batch import TokenBatch
from jaxserve.layers.linear import linear
from jaxserve.layers.norm import layer_norm
from jaxserve.model_source.pooling import LayerActivation, Pooling
from jaxserve.runtime.step.batch import StepInput
from jaxserve.runtime.step.state import DeviceState
from pallas_kernels.target import KernelTarget

_ACTIVATIONS: Mapping[LayerActivation, Callable[[Array], Array]] = {
    "none": lambda x: x,
    "tanh": jnp.tanh,
    "relu": jax.nn.relu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "silu": jax.nn.silu,
    "sigmoid": jax.nn.sigmoid,
}


@jax.named_scope("pool")
def pool(
    pooling: Pooling,
    layers: tuple[Any, ...],
    hidden: Float[Array, "tokens dim"],
    inputs: StepInput,
    state: DeviceState,
    target: KernelTarget,
) -> tuple[DeviceState, Float[Array, "rows size"]]:
    """Return the vector of each row's sequence after its last token of this step, and the state with running sums.

    `layers` are the weights of the layers after pooling, `hidden` the states after the last norm.
    """
    if pooling.method == "mean":
        state, vectors = _running_means(hidden, inputs, state, target)
    else:
        assert pooling.method == "last"
        vectors = _rows_of(hidden, jnp.maximum(inputs.batch.query_starts[1:] - 1, 0))
    return state, _after(pooling, layers, vectors, hidden.dtype)


@jax.named_scope("pool")
def pool_texts(
    pooling: Pooling,
    layers: tuple[Any, ...],
    hidden: Float[Array, "tokens dim"],
    batch: TokenBatch,
    text: Int[Array, " tokens"],
    target: KernelTarget,
) -> Float[Array, "vectors size"]:
    """Return the vector of each of the whole texts of a batch, or of each token; `text` is that of each token.

    `layers` are the weights of the layers after pooling, `hidden` the states after the last norm.
    """
    match pooling.method:
        case "all":
            vectors = hidden.astype(jnp.float32)
        case "mean":
            none = jnp.zeros((len(batch.kv_lens), hidden.shape[1]), jnp.float32)
            sums = _add(none, hidden, text, batch, target)
            vectors = sums / jnp.maximum(batch.kv_lens, 1)[:, None].astype(jnp.float32)
        case "cls":
            # A text of padding begins past the last one
            vectors = _rows_of(hidden, jnp.minimum(batch.query_starts[:-1], len(hidden) - 1))
        case "last":
            vectors = _rows_of(hidden, jnp.maximum(batch.query_starts[1:] - 1, 0))
    return _after(pooling, layers, vectors, hidden.dtype)


def _rows_of(hidden: Float[Array, "tokens dim"], at: Int[Array, " rows"]) -> Float[Array, "rows dim"]:
    return hidden.at[at].get(mode="promise_in_bounds").astype(jnp.float32)


def _after(
    pooling: Pooling, layers: tuple[Any, ...], vectors: Float[Array, "rows dim"], dtype: Any
) -> Float[Array, "rows size"]:
    """Apply the layers after pooling."""
    for layer, params in zip(pooling.layers, layers, strict=True):
        vectors = linear(vectors.astype(dtype), params.weight, params.bias, out_dtype=jnp.float32)
        vectors = _ACTIVATIONS[layer.activation](vectors[:, : layer.outputs])
        if params.norm is not None:
            vectors = layer_norm(vectors, params.norm.weight, params.norm.bias, layer.norm_eps)
    return vectors


def _running_means(
    hidden: Float[Array, "tokens dim"], inputs: StepInput, state: DeviceState, target: KernelTarget
) -> tuple[DeviceState, Float[Array, "rows dim"]]:
    """Add the hidden states of each row to the sum of its sequence, which begins with the sequence's first token."""
    assert state.pooled is not None
    starts, batch, num_slots = inputs.batch.query_starts, inputs.batch, len(state.seq_lens)
    begins = batch.kv_lens == starts[1:] - starts[:-1]
    before = state.pooled[jnp.minimum(inputs.slots, num_slots - 1)]
    before = jnp.where(begins[:, None], 0.0, before)
    sums = _add(before, hidden, inputs.token_row, batch, target)
    state = dataclasses.replace(state, pooled=state.pooled.at[inputs.slots].set(sums, mode="drop"))
    return state, sums / jnp.maximum(batch.kv_lens, 1)[:, None].astype(jnp.float32)


def _add(
    sums: Float[Array, "rows dim"],
    hidden: Float[Array, "tokens dim"],
    token_row: Int[Array, " tokens"],
    batch: TokenBatch,
    target: KernelTarget,
) -> Float[Array, "rows dim"]:
    """Add the hidden states of each row's tokens to its sum.

    A CPU adds them in the order of tokens, so that the bits don't depend on where chunks end, nor on other rows.
    """
    row = jnp.where(batch.live, token_row, len(sums))
    added = hidden.astype(jnp.float32)
    if target.platform == "cpu":
        return sums.at[row].add(added, mode="drop")
    of_row = (row == jnp.arange(len(sums), dtype=row.dtype)[:, None]).astype(jnp.float32)
    return sums + jnp.dot(of_row, jnp.where(batch.live[:, None], added, 0.0), precision=lax.Precision.HIGHEST)
