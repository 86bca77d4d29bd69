"""New tokens on Triton: one kernel takes the product of the query, key and value projections as it is.

It adds the bias, normalizes and rotates queries and keys, scales queries, writes keys and values into their pages in
place, and returns the queries. Each intermediate result is rounded to the product's dtype, as if every part were an
operation; only the product with a norm's weight in float32 takes what isn't rounded yet.
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

from pallas_kernels.paged_attention.arguments import Preparation
from pallas_kernels.paged_attention.layout import PagedKV
from pallas_kernels.paged_attention.triton.tiles import Ref, flat
from pallas_kernels.paged_attention.triton.write import to_pool

# Numbers that a program loads of keys and values: few enough for its registers.
_NUMBERS = 4096
_MAX_TOKENS = 16
_LANES_A_WARP = 64

_Halves = tuple[Array, Array]


@dataclasses.dataclass(frozen=True)
class _Facts:
    """The static facts of a call; a program takes `tokens` tokens of a query head, or of a KV head's key and value.

    The product has `members` heads for each KV head: its group, its key and, unless keys are values, its value.
    """

    group: int
    members: int
    head_dim: int
    layer_tokens: int
    pool_tokens: int
    tokens: int
    eps: float
    norm_values: bool

    @property
    def half(self) -> int:
        """The pairs that are rotated."""
        return self.head_dim // 2


class _QkvTokens(NamedTuple):
    qkv: Ref
    bias: Ref | None
    norms: tuple[Ref, Ref] | None
    rotation: tuple[Ref, Ref] | None
    query_scale: Ref | None
    slots: Ref
    scales: Ref | None
    layer: Ref


def write_qkv(
    qkv: Float[Array, "tokens width"],
    preparation: Preparation,
    kv: PagedKV,
    layer: int | Int[Array, ""],
    slots: Int[Array, " tokens"],
    *,
    interpret: bool,
) -> tuple[Float[Array, "tokens heads head_dim"], PagedKV, Int[Array, "tokens kv_heads"]]:
    """Return the queries, the pool with each token in its slot of the layer, and zeros, as `write` does.

    Tokens of negative slots are neither read nor written.
    """
    tokens, width = qkv.shape
    kv_heads, entries, page_size, head_dim = kv.keys.shape
    members = width // (kv_heads * head_dim)
    facts = _Facts(
        group=members - (1 if preparation.keys_as_values else 2),
        members=members,
        head_dim=head_dim,
        layer_tokens=kv.num_pages * page_size,
        pool_tokens=entries * page_size,
        tokens=_tokens_a_program(pl.next_power_of_2(2 * head_dim)),
        eps=preparation.eps,
        norm_values=preparation.norm_values,
    )
    warps = facts.tokens * pl.next_power_of_2(facts.half) // _LANES_A_WARP
    parts = preparation.bias, preparation.norms, preparation.rotation, preparation.query_scale
    new = _QkvTokens(qkv, *parts, slots, kv.scales, jnp.full((1,), layer, jnp.int32))
    pools = flat(kv.keys), flat(kv.values)
    q, keys, values, zeros = pl.pallas_call(
        functools.partial(_write_qkv, facts=facts),
        grid=(facts.group + 1, kv_heads, pl.cdiv(tokens, facts.tokens)),
        out_shape=(
            jax.ShapeDtypeStruct((tokens, kv_heads * facts.group, head_dim), qkv.dtype),
            *(jax.ShapeDtypeStruct(pool.shape, pool.dtype) for pool in pools),
            jax.ShapeDtypeStruct((tokens, kv_heads), jnp.int32),
        ),
        input_output_aliases={0: 1, 1: 2},
        compiler_params=plgpu.CompilerParams(num_warps=min(4, max(1, warps)), num_stages=1),
        interpret=interpret,
        name="paged_attention_write_qkv",
    )(*pools, new)
    return q, kv.with_pools([keys.reshape(kv.keys.shape), values.reshape(kv.values.shape)]), zeros


def _tokens_a_program(numbers: int) -> int:
    """Return a power of two; `numbers` are those of one token."""
    fitting = max(1, _NUMBERS // numbers)
    return min(_MAX_TOKENS, pl.next_power_of_2(fitting + 1) // 2)


def _write_qkv(
    _keys: Ref, _values: Ref, new: _QkvTokens, q: Ref, keys: Ref, values: Ref, zeros: Ref, *, facts: _Facts
) -> None:
    member, kv_head, layer = pl.program_id(0), pl.program_id(1), new.layer[0]
    token = pl.program_id(2) * facts.tokens + lax.iota(jnp.int32, facts.tokens)
    there = token < new.slots.shape[0]
    slot = plgpu.load(new.slots.at[token], mask=there, other=-1)
    live = slot >= 0
    lane = lax.broadcasted_iota(jnp.int32, (1, pl.next_power_of_2(facts.half)), 1)
    has_lane = lane < facts.half
    mask = live[:, None] & has_lane

    def rounded(x: Array) -> Array:
        return x.astype(q.dtype).astype(jnp.float32)

    def row(ref: Ref, at: Array) -> Array:
        return plgpu.load(ref.at[at], mask=has_lane, other=0.0).astype(jnp.float32)

    def tile(ref: Ref, at: Array) -> Array:
        return plgpu.load(ref.at[token[:, None], at], mask=mask, other=0.0).astype(jnp.float32)

    def load(member: Array | int) -> _Halves:
        start = (kv_head * facts.members + member) * facts.head_dim
        return half_head(start + lane), half_head(start + facts.half + lane)

    def half_head(at: Array) -> Array:
        x = tile(new.qkv, at)
        return x if new.bias is None else rounded(x + row(new.bias, at))

    def store(ref: Ref, at: tuple[Array, ...], halves: _Halves) -> None:
        for start, half in zip((0, facts.half), halves):
            plgpu.store(ref.at[(*(x[:, None] for x in at), start + lane)], half.astype(ref.dtype), mask=mask)

    def unit(halves: _Halves) -> _Halves:
        total = sum(jnp.sum(x * x, axis=1, keepdims=True) for x in halves)
        inverse = lax.rsqrt(total / facts.head_dim + facts.eps)
        first, second = halves
        return first * inverse, second * inverse

    def normed(halves: _Halves, which: int) -> _Halves:
        if new.norms is None:
            return halves
        weight = new.norms[which]
        first, second = unit(halves)
        if weight.dtype == q.dtype:
            first, second = rounded(first), rounded(second)
        return rounded(first * row(weight, lane)), rounded(second * row(weight, facts.half + lane))

    def rotated(halves: _Halves) -> _Halves:
        if new.rotation is None:
            return halves
        cos, sin = (tile(ref, lane) for ref in new.rotation)
        first, second = halves
        return rounded(first * cos - second * sin), rounded(second * cos + first * sin)

    def scaled(halves: _Halves) -> _Halves:
        if new.query_scale is None:
            return halves
        factor = plgpu.load(new.query_scale.at[token], mask=live, other=0.0)[:, None]
        first, second = halves
        return rounded(first * factor), rounded(second * factor)

    @pl.when(member < facts.group)
    def query() -> None:
        head = jnp.full_like(token, kv_head * facts.group + member)
        store(q, (token, head), scaled(rotated(normed(load(member), 0))))

    @pl.when(member == facts.group)
    def key_and_value() -> None:
        # Both are loaded before either is stored: a later load may not overtake the store.
        key, value = load(facts.group), load(facts.members - 1)
        if facts.norm_values:
            first, second = unit(value)
            value = rounded(first), rounded(second)
        at = jnp.where(live, kv_head * facts.pool_tokens + layer * facts.layer_tokens + slot, keys.shape[0])
        for which, (pool, halves) in enumerate(((keys, rotated(normed(key, 1))), (values, value))):
            scale = None if new.scales is None else new.scales[which, layer, kv_head]
            first, second = (to_pool(x, scale, pool.dtype) for x in halves)
            store(pool, (at,), (first, second))
        plgpu.store(zeros.at[token, kv_head], jnp.zeros_like(token), mask=there)
