"""The contract of the kernels, in XLA."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Int32

from pallas_kernels.expert_routing.routing import Routing
from pallas_kernels.grouped_matmul.groups import Groups

TINY = 1e-20
"""It is added to the sum of weights that sigmoids give, as in DeepSeek-V3."""


def choose_experts(
    logits: Float32[Array, "tokens experts"], correction: Float32[Array, " experts"] | None, routing: Routing
) -> tuple[Int32[Array, "tokens choices"], Float32[Array, "tokens choices"]]:
    """See `api.choose_experts`."""
    scores = logits
    if routing.scores == "softmax":
        scores = jax.nn.softmax(logits, axis=-1)
    elif routing.scores == "sigmoid":
        scores = jax.nn.sigmoid(logits)
    by = scores if correction is None else scores + correction
    if routing.groups > 1:
        grouped = by.reshape(len(by), routing.groups, -1)
        best = lax.top_k(grouped, min(routing.best_of_group, grouped.shape[2]))[0].sum(axis=-1)
        chosen = lax.top_k(best, routing.groups_chosen)[1]
        allowed = (chosen[:, :, None] == jnp.arange(routing.groups)).any(axis=1)
        by = jnp.where(allowed[:, :, None], grouped, -jnp.inf).reshape(by.shape)
    ids = lax.top_k(by, routing.choices)[1]
    weights = jnp.take_along_axis(scores, ids, axis=-1)
    if routing.scores == "softmax_of_chosen":
        weights = jax.nn.softmax(weights, axis=-1)
    if routing.renormalize:
        weights /= weights.sum(axis=-1, keepdims=True) + (TINY if routing.scores == "sigmoid" else 0)
    return ids.astype(jnp.int32), weights * routing.scale


def group_by_expert(ids: Int32[Array, "tokens choices"], num_experts: int) -> Groups:
    """See `api.group_by_expert`."""
    tokens, choices = ids.shape
    flat = jnp.where((ids >= 0) & (ids < num_experts), ids, num_experts).reshape(-1)
    pairs = len(flat)
    order = jnp.argsort(flat, stable=True).astype(jnp.int32)
    starts = jnp.searchsorted(flat[order], jnp.arange(num_experts + 1)).astype(jnp.int32)
    place = jnp.zeros(pairs, jnp.int32).at[order].set(jnp.arange(pairs, dtype=jnp.int32), unique_indices=True)
    place = jnp.where(flat < num_experts, place, pairs)
    token_of_row = jnp.where(jnp.arange(pairs) < starts[-1], order // choices, 0)
    return Groups(starts, token_of_row, place.reshape(tokens, choices))


def add_chosen(
    out: Float[Array, "rows dim"], places: Int32[Array, "tokens choices"], weights: Float32[Array, "tokens choices"]
) -> Float32[Array, "tokens dim"]:
    """See `api.add_chosen`."""
    there = (places < len(out))[..., None]
    chosen = jnp.where(there, out.at[places].get(mode="clip"), 0)
    return (chosen.astype(jnp.float32) * weights[..., None]).sum(axis=1)
