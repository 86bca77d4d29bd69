"""Routing on NVIDIA GPUs in two kernels: one chooses experts, by a program per token; one groups pairs, by a program
per expert.

Each program does all the work of its token or expert, so that no sort, loop or scatter of XLA stands between the
router's product and the experts'.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Bool, Float32, Int32

from pallas_kernels.expert_routing.reference import TINY
from pallas_kernels.expert_routing.routing import Routing
from pallas_kernels.grouped_matmul.groups import Groups

# A reference into device memory; jax has no public type for it.
Ref = Any

_NONE = np.iinfo(np.int32).max
# The most pairs that a program reads at a time.
_PAIRS = 4096
_WARP = 32
_PAIRS_A_THREAD = 16


def choose_experts(
    logits: Float32[Array, "tokens experts"],
    correction: Float32[Array, " experts"] | None,
    routing: Routing,
    *,
    interpret: bool,
) -> tuple[Int32[Array, "tokens choices"], Float32[Array, "tokens choices"]]:
    """See `api.choose_experts`. A logit that is no number counts as the lowest one."""
    shape = len(logits), routing.choices
    ids, weights = pl.pallas_call(
        functools.partial(_choose, routing=routing),
        grid=(len(logits),),
        out_shape=(jax.ShapeDtypeStruct(shape, jnp.int32), jax.ShapeDtypeStruct(shape, jnp.float32)),
        # A warp has all logits of a token in registers, and exchanges only maxima.
        compiler_params=plgpu.CompilerParams(num_warps=1, num_stages=1),
        interpret=interpret,
        name="choose_experts",
    )(logits, correction)
    return ids, weights


def _choose(logits: Ref, correction: Ref | None, ids: Ref, weights: Ref, *, routing: Routing) -> None:
    token, experts = pl.program_id(0), logits.shape[1]
    lane = lax.iota(jnp.int32, pl.next_power_of_2(experts))
    there = lane < experts
    scores = plgpu.load(logits.at[token, lane], mask=there, other=-jnp.inf).astype(jnp.float32)
    if routing.scores == "softmax":
        scores = _softmax(scores)
    elif routing.scores == "sigmoid":
        scores = lax.logistic(scores)
    by = scores
    if correction is not None:
        by += plgpu.load(correction.at[lane], mask=there, other=0.0).astype(jnp.float32)
    by = jnp.where(by > -jnp.inf, by, -jnp.inf)
    if routing.groups > 1:
        by = jnp.where(_allowed(by, lane, experts // routing.groups, routing), by, -jnp.inf)
    choice = lax.iota(jnp.int32, pl.next_power_of_2(routing.choices))
    chosen, found = jnp.zeros(choice.shape, jnp.int32), jnp.full(choice.shape, -jnp.inf, jnp.float32)
    for i, expert in enumerate(_best(by, there, lane, routing.choices)):
        chosen = jnp.where(choice == i, expert, chosen)
        found = jnp.where(choice == i, jnp.where(lane == expert, scores, -jnp.inf).max(), found)
    if routing.scores == "softmax_of_chosen":
        found = _softmax(found)
    if routing.renormalize:
        total = jnp.where(choice < routing.choices, found, 0).sum()
        found /= total + (TINY if routing.scores == "sigmoid" else 0)
    plgpu.store(ids.at[token, choice], chosen, mask=choice < routing.choices)
    plgpu.store(weights.at[token, choice], found * np.float32(routing.scale), mask=choice < routing.choices)


def _softmax(x: Float32[Array, " lanes"]) -> Float32[Array, " lanes"]:
    weights = jnp.exp(x - x.max())
    return weights / weights.sum()


def _best(
    by: Float32[Array, " lanes"], free: Bool[Array, " lanes"], lane: Int32[Array, " lanes"], count: int
) -> list[Int32[Array, ""]]:
    """Return the lanes of the highest numbers among the `free` ones, in descending order, equal ones by lane."""
    found = []
    for _ in range(count):
        best = jnp.where(free, by, -jnp.inf).max()
        found.append(jnp.where(free & (by == best), lane, _NONE).min())
        free &= lane != found[-1]
    return found


def _allowed(
    by: Float32[Array, " lanes"], lane: Int32[Array, " lanes"], size: int, routing: Routing
) -> Bool[Array, " lanes"]:
    """Return which experts belong to the best groups, which have `size` experts each."""
    group = lax.iota(jnp.int32, pl.next_power_of_2(routing.groups))
    sums = jnp.full(group.shape, -jnp.inf, jnp.float32)
    for i in range(routing.groups):
        inside = (lane >= i * size) & (lane < (i + 1) * size)
        best = _best(by, inside, lane, min(routing.best_of_group, size))
        scores = [jnp.where(lane == one, by, -jnp.inf).max() for one in best]
        sums = jnp.where(group == i, sum(scores[1:], scores[0]), sums)
    allowed = lane < 0
    for chosen in _best(sums, group < routing.groups, group, routing.groups_chosen):
        allowed |= (lane >= chosen * size) & (lane < (chosen + 1) * size)
    return allowed


def group_by_expert(ids: Int32[Array, "tokens choices"], num_experts: int, *, interpret: bool) -> Groups:
    """See `api.group_by_expert`."""
    pairs = ids.size
    block = min(pl.next_power_of_2(pairs), _PAIRS)
    starts, tokens, places = pl.pallas_call(
        functools.partial(_group, experts=num_experts, choices=ids.shape[1], block=block),
        # The last program handles the pairs whose expert isn't here.
        grid=(num_experts + 1,),
        out_shape=[jax.ShapeDtypeStruct((size,), jnp.int32) for size in (num_experts + 1, pairs, pairs)],
        compiler_params=plgpu.CompilerParams(num_warps=max(1, block // (_WARP * _PAIRS_A_THREAD)), num_stages=1),
        interpret=interpret,
        name="group_by_expert",
    )(ids.reshape(-1))
    return Groups(starts, tokens, places.reshape(ids.shape))


def _group(ids: Ref, starts: Ref, tokens: Ref, places: Ref, *, experts: int, choices: int, block: int) -> None:
    """Count the pairs of lower experts, which are before the first row of this one, then give rows to its own."""
    own, (pairs,) = pl.program_id(0), ids.shape
    lane = lax.iota(jnp.int32, block)

    def load(i: Any) -> tuple[Int32[Array, " block"], Int32[Array, " block"]]:
        pair = i * block + lane
        expert = plgpu.load(ids.at[pair], mask=pair < pairs, other=0)
        expert = jnp.where((expert >= 0) & (expert < experts), expert, experts)
        return pair, jnp.where(pair < pairs, expert, experts + 1)

    def count(i: Any, carry: Any) -> Any:
        below, mine = carry
        _, expert = load(i)
        return below + (expert < own).astype(jnp.int32).sum(), mine + (expert == own).astype(jnp.int32).sum()

    def place(i: Any, first: Any) -> Any:
        pair, expert = load(i)
        mine = (expert == own).astype(jnp.int32)
        # The interpreter takes each index once, so pairs that aren't stored have indices after the last row.
        row = jnp.where(expert == own, first + jnp.cumsum(mine) - 1, pairs + lane)
        here = own < experts
        plgpu.store(tokens.at[row], jnp.where(here, lax.div(pair, choices), 0), mask=expert == own)
        plgpu.store(places.at[pair], jnp.where(here, row, pairs), mask=expert == own)
        return first + mine.sum()

    blocks, zero = pl.cdiv(pairs, block), jnp.int32(0)
    first, mine = lax.fori_loop(0, blocks, count, (zero, zero))
    plgpu.store(starts.at[own], first)
    lax.fori_loop(0, jnp.minimum(mine, 1) * blocks, place, first)
