"""The public functions."""

from __future__ import annotations

import functools

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32

from pallas_kernels import dispatch
from pallas_kernels.expert_routing import cpu, reference
from pallas_kernels.expert_routing.routing import Routing
from pallas_kernels.grouped_matmul.groups import Groups
from pallas_kernels.target import KernelTarget


def choose_experts(
    logits: Float32[Array, "tokens experts"],
    correction: Float32[Array, " experts"] | None,
    routing: Routing,
    target: KernelTarget,
) -> tuple[Int32[Array, "tokens choices"], Float32[Array, "tokens choices"]]:
    """Return the experts that each token chooses, the best first, and their weights (see `Routing`)."""
    choose = dispatch.triton_kernel("expert_routing", "choose_experts", target) or reference.choose_experts
    chosen: tuple[Array, Array] = choose(logits, correction, routing)
    return chosen


def group_by_expert(ids: Int32[Array, "tokens choices"], num_experts: int, target: KernelTarget) -> Groups:
    """Sort the pairs of tokens and experts by expert; ids that aren't from 0 to `num_experts - 1` give no pair."""
    groups: Groups
    if kernel := dispatch.triton_kernel("expert_routing", "group_by_expert", target):
        groups = kernel(ids, num_experts)
        return groups
    of_cpu, otherwise = (
        functools.partial(module.group_by_expert, num_experts=num_experts) for module in (cpu, reference)
    )
    groups = dispatch.on_cpu(of_cpu if target.platform == "cpu" else None, otherwise, ids)
    return groups


def add_chosen(
    out: Float[Array, "rows dim"],
    places: Int32[Array, "tokens choices"],
    weights: Float32[Array, "tokens choices"],
    target: KernelTarget,
) -> Float32[Array, "tokens dim"]:
    """Return the weighted sums of the rows at the places of each token; a place beyond the last row adds nothing."""
    is_supported = target.platform == "cpu" and out.dtype == jnp.float32 and out.shape[1] % 16 == 0
    return dispatch.on_cpu(cpu.add_chosen if is_supported else None, reference.add_chosen, out, places, weights)
