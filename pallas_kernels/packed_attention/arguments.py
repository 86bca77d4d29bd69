"""The arguments of a call besides queries, keys and values: which texts there are, and how their tokens attend."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int


class Texts(NamedTuple):
    """Texts that follow each other: text r has the tokens `starts[r] : starts[r + 1]`, at least one.

    Texts from `num_texts` on are padding and have no tokens. Tokens past `starts[num_texts]` are padding.
    """

    starts: Int[Array, " texts_plus_1"]
    num_texts: Int[Array, ""]

    def of_tokens(self, tokens: int) -> Int[Array, " tokens"]:
        """Return the text of each token; for padding, one past the last."""
        token = jnp.arange(tokens, dtype=jnp.int32)
        found = jnp.searchsorted(self.starts[1:], token, side="right", method="compare_all").astype(jnp.int32)
        return jnp.where(token < self.starts[self.num_texts], found, len(self.starts) - 1)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PackedOptions:
    """How tokens attend.

    `scale` multiplies the products of queries and keys. A token sees those of its text that are at most `reach`
    positions before or after it, or all if it is None. `soft_cap` bounds logits by `cap * tanh(x / cap)`.
    `distance_bias[head, d + far]` is added to the logit of a key `d` positions after its query, with d cut to
    `-far ... far`: float32 `[heads, 2 * far + 1]`.
    """

    scale: float = dataclasses.field(metadata={"static": True})
    reach: int | None = dataclasses.field(default=None, metadata={"static": True})
    soft_cap: float | None = dataclasses.field(default=None, metadata={"static": True})
    distance_bias: Float[Array, "heads distances"] | None = None


@dataclasses.dataclass(frozen=True)
class PackedProblem:
    """The shapes and dtypes of a model's attention, known before anything is compiled."""

    heads: int
    kv_heads: int
    head_dim: int
    dtype: np.dtype
    has_bias: bool = False
