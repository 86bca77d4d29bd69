"""How a gated feed-forward block joins the products of its gate and up matrices (Shazeer 2020)."""

from __future__ import annotations

import dataclasses
from typing import Literal

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32

Activation = Literal["silu", "gelu_pytorch_tanh"]


@dataclasses.dataclass(frozen=True)
class Gate:
    """The function `activation(gate) * (up + up_offset)`; a `limit` bounds `gate` from above, and `up` on both sides.

    `silu` is `gate * sigmoid(slope * gate)`.
    """

    activation: Activation = "silu"
    slope: float = 1.0
    limit: float | None = None
    up_offset: float = 0.0

    def join(self, gate: Float32[Array, "*shape"], up: Float32[Array, "*shape"]) -> Float32[Array, "*shape"]:
        """Return the inputs of the down matrix. Kernels call it, so it has only operations that every compiler has."""
        if self.limit is not None:
            limit = np.float32(self.limit)
            gate = jnp.minimum(gate, limit)
            up = jnp.minimum(jnp.maximum(up, -limit), limit)
        exponent = np.float32(self.slope) * gate
        if self.activation == "gelu_pytorch_tanh":
            # (1 + tanh(x)) / 2 = 1 / (1 + exp(-2 x)): GPUs' fast tanh has 11 bits, their exp has all.
            exponent = np.float32(2 * np.sqrt(2 / np.pi)) * (gate + np.float32(0.044715) * gate * gate * gate)
        active = gate / (1 + jnp.exp(-exponent))
        return active * (up + np.float32(self.up_offset) if self.up_offset else up)
