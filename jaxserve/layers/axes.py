"""The names of the mesh axes that layers exchange over; `runtime/devices/mesh.py` makes the mesh."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

STAGE_AXIS = "stage"
DATA_AXIS = "data"
EXPERT_AXIS, EXPERT_TENSOR_AXIS = "expert", "tensor"
TENSOR_AXES = (EXPERT_AXIS, EXPERT_TENSOR_AXIS)
"""The axes of a rank's shards: heads, MLP and vocabulary are split over both, experts over the first one."""


def sum_of_shards(x: Array) -> Array:
    """Return the sum of `x`, of any shape, over the shards of a rank.

    With one shard, that is `x` itself. On a CPU, XLA would run an all-reduce all the same, and convert bfloat16 for it.
    """
    return x if lax.axis_size(TENSOR_AXES) == 1 else lax.psum(x, TENSOR_AXES)


def tensor_rank() -> Array:
    """Return this shard's index among those of its rank."""
    return lax.axis_index(TENSOR_AXES).astype(jnp.int32)
