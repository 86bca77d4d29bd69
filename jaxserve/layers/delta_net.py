"""A gated delta net: projections, the kernel that keeps a state for each sequence, a gated norm, output."""

from __future__ import annotations

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

from jaxserve.layers.batch import KVLayer, KVPools, TokenBatch, replace_pool
from jaxserve.layers.linear import linear, row_parallel
from jaxserve.layers.norm import rms_norm
from pallas_kernels.gated_delta import DeltaProblem, DeltaStates, DeltaWeights, choose_backend, gated_delta
from pallas_kernels.quantized_matmul import HeldWeight
from pallas_kernels.target import KernelTarget


@flax.struct.dataclass
class DeltaNetParams:
    """The weights of one layer.

    `qkvz` stores each key head with its group of value heads, so that shards are split by key head: its `rows` are the
    query, the key, the values of the group, and the gates of their outputs. `gates` has the rows of beta and of the
    decay for each of them. `conv`, `rate` and `bias` are as in `DeltaWeights`. `norm` normalizes each head.
    """

    qkvz: Float[Array, "key_heads rows dim"] | HeldWeight
    gates: Float[Array, "key_heads two group dim"]
    conv: Float[Array, "key_heads width taps"]
    rate: Float32[Array, "key_heads group"]
    bias: Float32[Array, "key_heads group"]
    norm: Float[Array, " value_dim"]
    output: Float[Array, "dim key_heads group value_dim"] | HeldWeight


@jax.named_scope("delta_net")
def delta_net(
    x: Float[Array, "tokens dim"],
    params: DeltaNetParams,
    batch: TokenBatch,
    kv: KVPools,
    layer: KVLayer,
    norm_eps: float,
    target: KernelTarget,
) -> tuple[Float[Array, "tokens dim"], KVPools]:
    """Mix the batch's tokens with the states of their sequences, and update these in `kv`."""
    tokens = len(x)
    key_heads, rows, _ = params.qkvz.shape
    states, where = kv[layer.group], batch.states
    assert isinstance(states, DeltaStates)
    assert where is not None
    width, taps = params.conv.shape[1:]
    group, value_dim = params.rate.shape[1], params.norm.shape[0]
    products = linear(x, params.qkvz.reshape(key_heads * rows, -1)).reshape(tokens, key_heads, rows)
    gates = linear(x, params.gates.reshape(key_heads * 2 * group, -1)).reshape(tokens, key_heads, 2, group)
    problem = DeltaProblem(key_heads, key_heads * group, states.keys.shape[4], value_dim, taps, x.dtype)
    weights = DeltaWeights(params.conv, params.rate.reshape(-1), params.bias.reshape(-1))
    backend = choose_backend(target, problem)
    out, states = gated_delta(products[:, :, :width], gates, weights, states, layer.index, where, backend)
    z = products[:, :, width:].reshape(out.shape)
    mixed = _gated_norm(out, z, params.norm, norm_eps).reshape(tokens, -1)
    output = params.output.reshape(params.output.shape[0], -1)
    return row_parallel(mixed, output), replace_pool(kv, layer.group, states)


def _gated_norm(
    x: Float[Array, "tokens value_heads value_dim"],
    gate: Float[Array, "tokens value_heads value_dim"],
    weight: Float[Array, " value_dim"],
    eps: float,
) -> Float[Array, "tokens value_heads value_dim"]:
    """Scale each head to unit mean square, and multiply it by the weight and by the SiLU of its gate."""
    normed = rms_norm(x, weight, eps)
    return (normed.astype(jnp.float32) * jax.nn.silu(gate.astype(jnp.float32))).astype(x.dtype)
