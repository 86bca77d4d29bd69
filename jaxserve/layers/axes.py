"""The names of the mesh axes that layers exchange over; `runtime/devices/mesh.py` makes the mesh."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

DATA_AXIS = "data"
EXPERT_AXIS, EXPERT_TENSOR_AXIS = "expert", "tensor"
TENSOR_AXES = (EXPERT_AXIS, EXPERT_TENSOR_AXIS)
"""The axes of a rank's shards: heads, MLP and vocabulary are split over both, experts over the first one."""


def tensor_rank() -> Array:
    """Return this shard's index among those of its rank."""
    return lax.axis_index(TENSOR_AXES).astype(jnp.int32)
