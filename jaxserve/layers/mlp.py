"""The gated feed-forward block (Shazeer 2020)."""

from __future__ import annotations

import jax
from jaxtyping import Array, Float

from jaxserve.layers.linear import linear, row_parallel
from pallas_kernels.packed_matmul import PackedWeight


@jax.named_scope("mlp")
def gated_mlp(
    x: Float[Array, "tokens dim"],
    gate_up: Float[Array, "2 ffn_shard dim"] | PackedWeight,
    down: Float[Array, "dim ffn_shard"] | PackedWeight,
    gate_up_bias: Float[Array, "2 ffn_shard"] | None = None,
    down_bias: Float[Array, " dim"] | None = None,
) -> Float[Array, "tokens dim"]:
    """Return `down(silu(gate(x)) * up(x))`; gate and up are one product."""
    width = gate_up.shape[1]
    bias = None if gate_up_bias is None else gate_up_bias.reshape(-1)
    both = linear(x, gate_up.reshape(2 * width, -1), bias)
    return row_parallel(jax.nn.silu(both[:, :width]) * both[:, width:], down, down_bias)
