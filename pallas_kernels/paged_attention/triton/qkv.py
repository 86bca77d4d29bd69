"""New tokens on Triton: one kernel takes the product of the query, key and value projections as it is.

It adds the bias, normalizes and rotates queries and keys, writes keys and values into their pages in place, and
returns the queries. Each intermediate result is rounded to the product's dtype, as if every part were an operation.
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

from pallas_kernels.paged_attention.layout import PagedKV
from pallas_kernels.paged_attention.triton.tiles import Ref, flat
from pallas_kernels.paged_attention.triton.write import to_pool
from pallas_kernels.paged_attention.write import token_slots

# Numbers that a program has in registers: few enough that a decode step has programs for every core.
_NUMBERS = 4096
_MAX_TOKENS = 16

_Halves = tuple[Array, Array]


@dataclasses.dataclass(frozen=True)
class _Facts:
    """The static facts of a call; a program takes `tokens` tokens of one KV head and its group of query heads."""

    group: int
    head_dim: int
    layer_tokens: int
    pool_tokens: int
    tokens: int
    eps: float

    @property
    def half(self) -> int:
        """The pairs that are rotated."""
        return self.head_dim // 2


class _NewTokens(NamedTuple):
    qkv: Ref
    bias: Ref | None
    norms: tuple[Ref, Ref] | None
    rotation: tuple[Ref, Ref]
    slots: Ref
    scales: Ref | None
    layer: Ref


def write_qkv(
    qkv: Float[Array, "tokens width"],
    bias: Float[Array, " width"] | None,
    norms: tuple[Float[Array, " head_dim"], Float[Array, " head_dim"]] | None,
    rotation: tuple[Float[Array, "tokens half"], Float[Array, "tokens half"]],
    kv: PagedKV,
    layer: int | Int[Array, ""],
    page_table: Int[Array, "rows max_pages"],
    query_starts: Int[Array, " rows_plus_1"],
    kv_lens: Int[Array, " rows"],
    num_seqs: Int[Array, ""],
    *,
    eps: float,
    interpret: bool,
) -> tuple[Float[Array, "tokens heads head_dim"], PagedKV]:
    """Compute `api.write_qkv`."""
    tokens, width = qkv.shape
    kv_heads, entries, page_size, head_dim = kv.keys.shape
    members = width // (kv_heads * head_dim)
    facts = _Facts(
        group=members - 2,
        head_dim=head_dim,
        layer_tokens=kv.num_pages * page_size,
        pool_tokens=entries * page_size,
        tokens=_tokens_a_program(members, head_dim),
        eps=eps,
    )
    slots = token_slots(tokens, page_size, page_table, query_starts, kv_lens, num_seqs)
    new = _NewTokens(qkv, bias, norms, rotation, slots, kv.scales, jnp.full((1,), layer, jnp.int32))
    pools = flat(kv.keys), flat(kv.values)
    q, keys, values = pl.pallas_call(
        functools.partial(_write_qkv, facts=facts),
        grid=(kv_heads, pl.cdiv(tokens, facts.tokens)),
        out_shape=(
            jax.ShapeDtypeStruct((tokens, kv_heads * facts.group, head_dim), qkv.dtype),
            *(jax.ShapeDtypeStruct(pool.shape, pool.dtype) for pool in pools),
        ),
        input_output_aliases={0: 1, 1: 2},
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="paged_attention_write_qkv",
    )(*pools, new)
    return q, kv.with_pools([keys.reshape(kv.keys.shape), values.reshape(kv.values.shape)])


def _tokens_a_program(members: int, head_dim: int) -> int:
    fitting = max(1, _NUMBERS // (members * pl.next_power_of_2(head_dim)))
    return min(_MAX_TOKENS, pl.next_power_of_2(fitting + 1) // 2)


def _write_qkv(
    _keys: Ref, _values: Ref, new: _NewTokens, q: Ref, keys: Ref, values: Ref, *, facts: _Facts
) -> None:
    kv_head, layer = pl.program_id(0), new.layer[0]
    token = pl.program_id(1) * facts.tokens + lax.iota(jnp.int32, facts.tokens)
    slot = plgpu.load(new.slots.at[token], mask=token < new.slots.shape[0], other=-1)
    live = slot >= 0
    lane = lax.broadcasted_iota(jnp.int32, (1, pl.next_power_of_2(facts.half)), 1)
    has_lane = lane < facts.half
    mask = live[:, None] & has_lane
    dtype = new.qkv.dtype

    def rounded(x: Array) -> Array:
        return x.astype(dtype).astype(jnp.float32)

    def row(ref: Ref, at: Array) -> Array:
        return plgpu.load(ref.at[at], mask=has_lane, other=0.0).astype(jnp.float32)

    def tile(ref: Ref, at: Array) -> Array:
        return plgpu.load(ref.at[token[:, None], at], mask=mask, other=0.0).astype(jnp.float32)

    def load(member: int) -> _Halves:
        first, second = ((kv_head * (facts.group + 2) + member) * facts.head_dim + at for at in (lane, lane + facts.half))
        if new.bias is None:
            return tile(new.qkv, first), tile(new.qkv, second)
        return tuple(rounded(tile(new.qkv, at) + row(new.bias, at)) for at in (first, second))

    def store(ref: Ref, at: tuple[Array, ...], halves: _Halves) -> None:
        for start, half in zip((0, facts.half), halves):
            plgpu.store(ref.at[(*(x[:, None] for x in at), start + lane)], half.astype(ref.dtype), mask=mask)

    def normed(halves: _Halves, which: int) -> _Halves:
        if new.norms is None:
            return halves
        total = sum(jnp.sum(x * x, axis=1, keepdims=True) for x in halves)
        inverse = lax.rsqrt(total / facts.head_dim + facts.eps)
        weights = (row(new.norms[which], at) for at in (lane, lane + facts.half))
        return tuple(rounded(rounded(x * inverse) * weight) for x, weight in zip(halves, weights))

    def rotated(halves: _Halves) -> _Halves:
        first, second = halves
        return rounded(first * cos - second * sin), rounded(second * cos + first * sin)

    # All loads come before the first store, which no later load may overtake.
    heads = [load(member) for member in range(facts.group + 2)]
    cos, sin = (tile(ref, lane) for ref in new.rotation)
    for member in range(facts.group):
        head = jnp.full_like(token, kv_head * facts.group + member)
        store(q, (token, head), rotated(normed(heads[member], 0)))
    at = jnp.where(live, kv_head * facts.pool_tokens + layer * facts.layer_tokens + slot, keys.shape[0])
    for which, (pool, halves) in enumerate(((keys, rotated(normed(heads[-2], 1))), (values, heads[-1]))):
        scale = None if new.scales is None else new.scales[which, layer, kv_head]
        store(pool, (at,), tuple(to_pool(x, scale, pool.dtype) for x in halves))
