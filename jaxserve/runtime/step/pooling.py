"""The vectors of pooled sequences: the last hidden state of each, or the mean of all, and the layers that follow."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jaxserve.layers.linear import linear
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
        state, vectors = _means(hidden, inputs, state, target)
    else:
        last = jnp.maximum(inputs.batch.query_starts[1:] - 1, 0)
        vectors = hidden.at[last].get(mode="promise_in_bounds").astype(jnp.float32)
    for layer, params in zip(pooling.layers, layers, strict=True):
        vectors = linear(vectors.astype(hidden.dtype), params.weight, params.bias, out_dtype=jnp.float32)
        vectors = _ACTIVATIONS[layer.activation](vectors[:, : layer.outputs])
    return state, vectors


def _means(
    hidden: Float[Array, "tokens dim"], inputs: StepInput, state: DeviceState, target: KernelTarget
) -> tuple[DeviceState, Float[Array, "rows dim"]]:
    """Add the hidden states of each row to the sum of its sequence, which begins with the sequence's first token.

    A CPU adds them in the order of tokens, so that the bits don't depend on where chunks end.
    """
    assert state.pooled is not None
    starts, batch, num_slots = inputs.batch.query_starts, inputs.batch, len(state.seq_lens)
    begins = batch.kv_lens == starts[1:] - starts[:-1]
    before = state.pooled[jnp.minimum(inputs.slots, num_slots - 1)]
    before = jnp.where(begins[:, None], 0.0, before)
    row = jnp.where(batch.live, inputs.token_row, len(before))
    added = hidden.astype(jnp.float32)
    if target.platform == "cpu":
        sums = before.at[row].add(added, mode="drop")
    else:
        of_row = (row == jnp.arange(len(before), dtype=row.dtype)[:, None]).astype(jnp.float32)
        sums = before + jnp.dot(of_row, jnp.where(batch.live[:, None], added, 0.0), precision=lax.Precision.HIGHEST)
    state = dataclasses.replace(state, pooled=state.pooled.at[inputs.slots].set(sums, mode="drop"))
    return state, sums / jnp.maximum(batch.kv_lens, 1)[:, None].astype(jnp.float32)
