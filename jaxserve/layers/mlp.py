"""Feed-forward blocks: gated (Shazeer 2020) and plain."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping

import flax.struct
import jax
from jaxtyping import Array, Float

from jaxserve.layers.linear import linear, row_parallel
from pallas_kernels.activation import gated_silu, gelu
from pallas_kernels.quantized_matmul import HeldWeight

_tanh_gelu = functools.partial(jax.nn.gelu, approximate=True)
ACTIVATIONS: Mapping[str, Callable[[Array], Array]] = {
    "silu": jax.nn.silu,
    "relu": jax.nn.relu,
    "gelu": gelu,
    "gelu_new": _tanh_gelu,
    "gelu_fast": _tanh_gelu,
    "gelu_pytorch_tanh": _tanh_gelu,
}
"""The activations by Hugging Face's names."""


@flax.struct.dataclass
class MlpParams:
    """The weights of a feed-forward block; `up` has one matrix, or two if the block is gated: gate and up."""

    up: Float[Array, "matrices ffn dim"] | HeldWeight
    down: Float[Array, "dim ffn"] | HeldWeight
    up_bias: Float[Array, "matrices ffn"] | None
    down_bias: Float[Array, " dim"] | None


@jax.named_scope("mlp")
def mlp(x: Float[Array, "tokens dim"], params: MlpParams, activation: str = "silu") -> Float[Array, "tokens dim"]:
    """Return `down(act(gate(x)) * up(x))`, or `down(act(up(x)))` without a gate; gate and up are one product."""
    return row_parallel(_inner(x, params, activation), params.down, params.down_bias)


def partial_mlp(x: Float[Array, "tokens dim"], params: MlpParams, activation: str) -> Float[Array, "tokens dim"]:
    """Return this shard's part of the sum that is the output of a block without biases."""
    assert params.down_bias is None
    return linear(_inner(x, params, activation), params.down, one_pass=True)


def _inner(x: Float[Array, "tokens dim"], params: MlpParams, activation: str) -> Float[Array, "tokens ffn"]:
    matrices, width, _ = params.up.shape
    bias = None if params.up_bias is None else params.up_bias.reshape(-1)
    both = linear(x, params.up.reshape(matrices * width, -1), bias)
    if matrices == 2 and activation == "silu":
        return gated_silu(both)
    inner = ACTIVATIONS[activation](both[:, :width])
    if matrices == 2:
        inner *= both[:, width:]
    return inner
