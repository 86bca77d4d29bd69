"""Sends tokens to the experts of all ranks, and brings the experts' outputs back, in one of two ways.

Either all shards get all tokens in one all-gather, and a reduce-scatter adds the outputs: every network is fast at
these two exchanges. Or a ragged all-to-all sends each token only to shards that have one of its experts, and a second
one brings outputs back: this moves fewer bytes if tokens choose few of many shards. Neither way drops a token: a shard
has room for all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Int32, Shaped, UInt

from pallas_kernels.expert_routing import add_chosen, group_by_expert
from pallas_kernels.target import KernelTarget


class Routed(NamedTuple):
    """Tokens, with the ids and weights of the experts that they chose; an id of -1 stands for none."""

    x: Float[Array, "tokens dim"]
    ids: Int32[Array, "tokens choices"]
    weights: Float32[Array, "tokens choices"]


Outputs = tuple[Float[Array, "tokens dim"], Int32[Array, " experts"]]
"""The sums of the outputs of some experts, and how many tokens each of them computed."""


def exchange_all(own: Routed, axes: tuple[str, ...], compute: Callable[[Routed], Outputs]) -> Outputs:
    """Let all shards of the mesh `axes` compute all tokens.

    Returns the outputs for this shard's `own` tokens, and the loads of its experts.
    """
    words = lax.all_gather(_as_words(own), axes, tiled=True)
    out, loads = compute(_from_words(words, own.x.dtype, own.ids.shape[1]))
    return lax.psum_scatter(out, axes, scatter_dimension=0, tiled=True), loads


def exchange_chosen(
    own: Routed, axes: tuple[str, ...], compute: Callable[[Routed], Outputs], *, experts: int, target: KernelTarget
) -> Outputs:
    """Let each token be computed by the shards that have one of its experts, and return what `exchange_all` returns.

    Each shard has `experts` experts.
    """
    tokens, choices = own.ids.shape
    shards, me = lax.axis_size(axes), lax.axis_index(axes)
    owners = jnp.where(own.ids < 0, -1, own.ids // experts)
    earlier = jnp.tril(jnp.ones((choices, choices), bool), -1)
    again = ((owners[:, :, None] == owners[:, None, :]) & earlier).any(axis=2)
    groups = group_by_expert(jnp.where(again, -1, owners), shards, target)
    sizes = jnp.diff(groups.starts)
    sent = lax.all_gather(sizes, axes)  # Rows are senders, columns receivers
    arriving = sent[:, me]
    places = (jnp.cumsum(sent, axis=0) - sent)[me]
    words = _as_words(own)[groups.tokens]
    words = _ragged(words, shards * tokens, groups.starts[:-1], sizes, places, arriving, tokens, axes, target)
    arrived = _from_words(words, own.x.dtype, choices)
    is_token = jnp.arange(shards * tokens, dtype=jnp.int32) < arriving.sum()
    out, loads = compute(arrived._replace(ids=jnp.where(is_token[:, None], arrived.ids, -1)))
    starts, places = jnp.cumsum(arriving) - arriving, (jnp.cumsum(sent, axis=1) - sent)[:, me]
    back = _ragged(out, tokens * choices, starts, arriving, places, sizes, tokens, axes, target)
    summed = add_chosen(back, groups.places, jnp.ones(own.ids.shape, jnp.float32), target)
    return summed.astype(out.dtype), loads


def _ragged(
    rows: Shaped[Array, "rows _"],
    size: int,
    starts: Int32[Array, " shards"],
    sizes: Int32[Array, " shards"],
    places: Int32[Array, " shards"],
    coming: Int32[Array, " shards"],
    most: int,
    axes: tuple[str, ...],
    target: KernelTarget,
) -> Shaped[Array, "size _"]:
    """Send each shard its `sizes` rows from `starts` on, which it puts at `places`; `coming` rows come from each.

    No shard sends another more than `most` rows. The result has `size` rows, zero where none came.
    """
    zeros = jnp.zeros((size, rows.shape[1]), rows.dtype)
    if target.platform != "cpu":
        return lax.ragged_all_to_all(rows, zeros, starts, sizes, places, coming, axis_name=axes)
    # XLA has no ragged all-to-all for a CPU: every shard sends as many rows as the one with most
    row = jnp.arange(most, dtype=jnp.int32)
    blocks = lax.all_to_all(rows.at[starts[:, None] + row].get(mode="clip"), axes, 0, 0, tiled=True)
    own = lax.all_to_all(places, axes, 0, 0, tiled=True)
    at = jnp.where(row < coming[:, None], own[:, None] + row, size)
    return zeros.at[at].set(blocks, mode="drop")


def _as_words(columns: Sequence[Shaped[Array, "tokens _"]]) -> UInt[Array, "tokens words"]:
    """Return the bits of arrays as words of the size of the first array's numbers, which are the smallest."""
    size = columns[0].dtype.itemsize
    words = [lax.bitcast_convert_type(column, f"uint{8 * size}") for column in columns]
    return jnp.concatenate([column.reshape(len(column), -1) for column in words], axis=1)


def _from_words(words: UInt[Array, "tokens words"], dtype: jnp.dtype, choices: int) -> Routed:
    """Return the tokens, with ids and weights, from words that `_as_words` made of them."""
    per_number = 4 // dtype.itemsize
    dim = words.shape[1] - 2 * choices * per_number

    def numbers(first: int, dtype: Any) -> Array:
        part = words[:, first : first + choices * per_number]
        if per_number > 1:
            part = part.reshape(len(words), choices, per_number)
        return lax.bitcast_convert_type(part, dtype)

    x = lax.bitcast_convert_type(words[:, :dim], dtype)
    return Routed(x, numbers(dim, jnp.int32), numbers(dim + choices * per_number, jnp.float32))
