"""Which rows of a grouped product belong to which expert."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Groups:
    """Pairs of a token and one of its experts as rows, in the order of experts, then of tokens.

    - `starts`: int32 `[experts + 1]`. The rows of expert e are those from `starts[e]` up to `starts[e + 1]`. Rows from
      `starts[-1]` on have no pair: they are not computed, and a product holds undefined numbers there.
    - `tokens`: int32 `[rows]`, the token of each row; 0 for rows without a pair.
    - `places`: int32 `[tokens, choices]`, the row of each pair; `rows` if its expert isn't among these `experts`.
    - `share`: the share of the rows that probably have a pair. Kernels choose their tiles by it.
    """

    starts: Int32[Array, " experts_plus_1"]
    tokens: Int32[Array, " rows"]
    places: Int32[Array, "tokens choices"]
    share: float = dataclasses.field(default=1.0, metadata={"static": True})

    @property
    def num_rows(self) -> int:
        """The number of rows, those without a pair included."""
        return int(self.tokens.shape[0])

    @property
    def likely_rows(self) -> int:
        """The number of rows that probably have a pair."""
        return math.ceil(self.num_rows * self.share)

    @property
    def num_experts(self) -> int:
        """The number of experts."""
        return int(self.starts.shape[0]) - 1

    @property
    def experts(self) -> Int32[Array, " rows"]:
        """The expert of each row; the last one for rows without a pair."""
        rows = jnp.arange(self.num_rows, dtype=jnp.int32)
        passed = (rows[:, None] >= self.starts[None, 1:]).sum(axis=1, dtype=jnp.int32)
        return jnp.minimum(passed, self.num_experts - 1)
