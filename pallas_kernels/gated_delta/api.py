"""The public function: one contract, several backends."""

from __future__ import annotations

import jax
from jaxtyping import Array, Float, Int

from pallas_kernels.dispatch import Backend
from pallas_kernels.gated_delta.arguments import DeltaRows, DeltaWeights
from pallas_kernels.gated_delta.backends import BACKENDS
from pallas_kernels.gated_delta.layout import DeltaStates

REFERENCE = Backend(reason="the default of this function")


def gated_delta(
    products: Float[Array, "tokens key_heads width"],
    gates: Float[Array, "tokens key_heads two group"],
    weights: DeltaWeights,
    states: DeltaStates,
    layer: int | Int[Array, ""],
    rows: DeltaRows,
    backend: Backend = REFERENCE,
) -> tuple[Float[Array, "tokens value_heads value_dim"], DeltaStates]:
    """Compute a gated delta net (Yang et al. 2024) of ragged rows, and update the states of their sequences.

    `products` are the raw products of the projections: for each key head its query, its key and the values of its
    group. `gates` are those of beta and of the decay, by value head of the group. For each token, in float32:

    - x = silu(conv(products)), over the last `taps` tokens of the sequence, zeros before its first one; rounded to the
      dtype of the products
    - q, k = x / sqrt(sum(x^2) + 1e-6), q also times key_dim ** -0.5; v = x
    - beta = sigmoid(gates[0]), g = -exp(rate) * softplus(gates[1] + bias)
    - S = exp(g) * S; delta = beta * (v - S.T @ k); S = S + outer(k, delta); output = S.T @ q

    The state S is `[key_dim, value_dim]`, one for each value head. `layout` says what is kept of it, and `DeltaRows`
    where. With G the sum of g from the first token of a block on, and S the state before the block,

    - delta_i = beta_i * (v_i - exp(G_i) * S.T @ k_i - sum over j < i of exp(G_i - G_j) * (k_i @ k_j) * delta_j)
    - output_i = exp(G_i) * S.T @ q_i + sum over j <= i of exp(G_i - G_j) * (q_i @ k_j) * delta_j
    - after the block: S = exp(G_last) * S + sum over j of exp(G_last - G_j) * outer(k_j, delta_j)

    Entries of other slots, rows of the pool that are named nowhere, and entries of a slot for tokens that it doesn't
    have, are never used and may be NaN. The output of padding tokens is unspecified.

    Returns the outputs in the dtype of `products`, and the states, updated in place.
    """
    with jax.named_scope("gated_delta"):
        out, states = BACKENDS.module(backend.name).gated_delta(products, gates, weights, states, layer, rows, backend)
    return out, states
