"""New latent rows on Triton: one kernel takes the product of the projections down as it is, and the queries.

It normalizes and rotates each row, writes it into its page in place, and rotates the queries' last numbers. Each
intermediate result is rounded to the product's dtype, as if every part were an operation; only the product with a
norm's weight in float32 takes what isn't rounded yet.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.paged_attention.arguments import LatentPreparation
from pallas_kernels.paged_attention.layout import PagedKV
from pallas_kernels.paged_attention.triton.tiles import Ref, flat
from pallas_kernels.paged_attention.triton.write import to_pool

# Tokens of a program, and heads of one that rotates queries.
_TOKENS = 4
_HEADS = 16


@dataclasses.dataclass(frozen=True)
class _LatentFacts:
    """The static facts of a call. Rows begin at `row_start` of the product, what queries rotate at `query_start`."""

    heads: int
    value_dim: int
    half: int
    row_start: int
    query_start: int
    layer_tokens: int
    items: int
    eps: float


class _NewRows(NamedTuple):
    down: Ref
    q: Ref
    norm: Ref
    rotation: tuple[Ref, Ref]
    slots: Ref
    scales: Ref | None
    layer: Ref


def write_latent(
    down: Float[Array, "tokens width"],
    q: Float[Array, "tokens heads query_dim"],
    preparation: LatentPreparation,
    kv: PagedKV,
    layer: int | Int[Array, ""],
    slots: Int[Array, " tokens"],
    items: int,
    *,
    interpret: bool,
) -> tuple[Float[Array, "tokens heads rest"], PagedKV, Int[Array, "tokens items"]]:
    """Return the rotated last numbers of the queries, the pool with each token in its slot of the layer, and zeros.

    The row of a token is the end of its `down`. Tokens of negative slots are neither read nor written.
    """
    assert kv.value_dim is not None
    tokens, heads, query_dim = q.shape
    page_size, head_dim = kv.keys.shape[2:]
    rest = head_dim - kv.value_dim
    facts = _LatentFacts(
        heads=heads,
        value_dim=kv.value_dim,
        half=rest // 2,
        row_start=down.shape[1] - head_dim,
        query_start=query_dim - rest,
        layer_tokens=kv.num_pages * page_size,
        items=items,
        eps=preparation.eps,
    )
    pool = flat(kv.keys)
    layers = jnp.full((1,), layer, jnp.int32)
    new = _NewRows(down, q, preparation.norm, preparation.rotation, slots, kv.scales, layers)
    rotated, keys, zeros = pl.pallas_call(
        functools.partial(_write_latent, facts=facts),
        grid=(pl.cdiv(heads, _HEADS) + 1, pl.cdiv(tokens, _TOKENS)),
        out_shape=(
            jax.ShapeDtypeStruct((tokens, heads, rest), q.dtype),
            jax.ShapeDtypeStruct(pool.shape, pool.dtype),
            jax.ShapeDtypeStruct((tokens, items), jnp.int32),
        ),
        input_output_aliases={0: 1},
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="paged_attention_write_latent",
    )(pool, new)
    return rotated, kv.with_pools([keys.reshape(kv.keys.shape)]), zeros


def _write_latent(_: Ref, new: _NewRows, rotated: Ref, keys: Ref, zeros: Ref, *, facts: _LatentFacts) -> None:
    part, layer, dtype = pl.program_id(0), new.layer[0], new.down.dtype
    first = pl.program_id(1) * _TOKENS
    lane = lax.broadcasted_iota(jnp.int32, (1, pl.next_power_of_2(facts.half)), 1)
    has_lane = lane < facts.half

    def rounded(x: Array) -> Array:
        return x.astype(dtype).astype(jnp.float32)

    def turned(ref: Ref, at: tuple[Array, ...], start: int, token: Array, live: Array) -> tuple[Array, Array]:
        """Load both halves of some rows and rotate them."""
        mask = live[:, None] & has_lane

        def load(ref: Ref, index: tuple[Array, ...]) -> Array:
            return plgpu.load(ref.at[index], mask=mask, other=0.0).astype(jnp.float32)

        index = tuple(x[:, None] for x in at)
        one, two = (load(ref, (*index, lane + start + i * facts.half)) for i in range(2))
        cos, sin = (load(x, (token[:, None], lane)) for x in new.rotation)
        return rounded(one * cos - two * sin), rounded(two * cos + one * sin)

    @pl.when(part == 0)
    def rows() -> None:
        token = first + lax.iota(jnp.int32, _TOKENS)
        there = token < new.slots.shape[0]
        slot = plgpu.load(new.slots.at[token], mask=there, other=-1)
        live = slot >= 0
        column = lax.broadcasted_iota(jnp.int32, (1, pl.next_power_of_2(facts.value_dim)), 1)
        has_column = column < facts.value_dim
        mask = live[:, None] & has_column
        x = plgpu.load(new.down.at[token[:, None], column + facts.row_start], mask=mask, other=0.0)
        x = x.astype(jnp.float32)
        x *= lax.rsqrt(jnp.sum(x * x, axis=1, keepdims=True) / facts.value_dim + facts.eps)
        if new.norm.dtype == dtype:
            x = rounded(x)
        weight = plgpu.load(new.norm.at[column], mask=has_column, other=0.0).astype(jnp.float32)
        value = rounded(x * weight)
        rest = turned(new.down, (token,), facts.row_start + facts.value_dim, token, live)
        at = jnp.where(live, layer * facts.layer_tokens + slot, keys.shape[0])[:, None]
        scale = None if new.scales is None else new.scales[0, layer, 0]
        plgpu.store(keys.at[at, column], to_pool(value, scale, keys.dtype), mask=mask)
        for i, half in enumerate(rest):
            index = lane + facts.value_dim + i * facts.half
            plgpu.store(keys.at[at, index], to_pool(half, scale, keys.dtype), mask=live[:, None] & has_lane)
        for item in range(facts.items):
            plgpu.store(zeros.at[token, item], jnp.zeros_like(token), mask=there)

    @pl.when(part > 0)
    def queries() -> None:
        pair = lax.iota(jnp.int32, _TOKENS * _HEADS)
        token = first + lax.div(pair, _HEADS)
        head = (part - 1) * _HEADS + lax.rem(pair, _HEADS)
        slot = plgpu.load(new.slots.at[token], mask=token < new.slots.shape[0], other=-1)
        live = (slot >= 0) & (head < facts.heads)
        for i, half in enumerate(turned(new.q, (token, head), facts.query_start, token, live)):
            index = (token[:, None], head[:, None], lane + i * facts.half)
            plgpu.store(rotated.at[index], half.astype(rotated.dtype), mask=live[:, None] & has_lane)
