"""Calls the kernel of a CPU for packed weights."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32

from pallas_kernels.grouped_matmul.gate import Gate
from pallas_kernels.grouped_matmul.groups import Groups
from pallas_kernels.grouped_matmul.reference import join
from pallas_kernels.quantized_matmul import PackedWeight, unpack


def multiply_packed(
    x: Float[Array, "tokens_or_rows in_dim"],
    weight: PackedWeight,
    groups: Groups,
    *,
    bias: Float[Array, "experts out_dim"] | None,
    gate: Gate | None,
    of_tokens: bool,
) -> Float32[Array, "rows out_or_half"]:
    """See `api.grouped_matmul`."""
    values = x.astype(jnp.bfloat16).astype(jnp.float32)
    dense = unpack(weight).reshape(groups.num_experts, -1, x.shape[1])
    rows = values[groups.tokens] if of_tokens else values
    out = lax.ragged_dot(rows, dense.swapaxes(1, 2), jnp.diff(groups.starts))
    return join(out, groups, bias, gate)
