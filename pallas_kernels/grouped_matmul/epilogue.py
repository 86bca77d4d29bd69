"""The operations that follow the sums of a grouped product."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

from pallas_kernels.grouped_matmul.gate import Gate
from pallas_kernels.grouped_matmul.groups import Groups


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Epilogue:
    """The bias that is added to the rows of an expert, and the `gate`, if any, which joins the halves of a row."""

    bias: Float[Array, "experts out_dim"] | None = None
    gate: Gate | None = dataclasses.field(default=None, metadata={"static": True})

    def apply(self, sums: Float32[Array, "rows out_dim"], groups: Groups) -> Float32[Array, "rows out_or_half"]:
        """Apply the epilogue in XLA, for backends whose kernels don't."""
        if self.bias is not None:
            sums += self.bias[groups.experts].astype(jnp.float32)
        if self.gate is None:
            return sums
        half = sums.shape[1] // 2
        return self.gate.join(sums[:, :half], sums[:, half:])
