"""The public functions."""

from __future__ import annotations

import functools

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32

from pallas_kernels.cpu import kernel_or_fallback
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
    if _has_kernels(target):
        # Only GPUs need this compiler's front end.
        from pallas_kernels.expert_routing import triton

        return triton.choose_experts(logits, correction, routing, interpret=False)
    return reference.choose_experts(logits, correction, routing)


def group_by_expert(ids: Int32[Array, "tokens choices"], num_experts: int, target: KernelTarget) -> Groups:
    """Sort the pairs of tokens and experts by expert; ids that aren't from 0 to `num_experts - 1` give no pair."""
    if _has_kernels(target):
        from pallas_kernels.expert_routing import triton

        return triton.group_by_expert(ids, num_experts, interpret=False)
    if target.platform != "cpu":
        return reference.group_by_expert(ids, num_experts)
    kernel, otherwise = (
        functools.partial(module.group_by_expert, num_experts=num_experts) for module in (cpu, reference)
    )
    groups: Groups = kernel_or_fallback(kernel, otherwise, ids)
    return groups


def add_chosen(
    out: Float[Array, "rows dim"],
    places: Int32[Array, "tokens choices"],
    weights: Float32[Array, "tokens choices"],
    target: KernelTarget,
) -> Float32[Array, "tokens dim"]:
    """Return the weighted sums of the rows at the places of each token; a place beyond the last row adds nothing."""
    if target.platform == "cpu" and out.dtype == jnp.float32 and out.shape[1] % 16 == 0:
        return kernel_or_fallback(cpu.add_chosen, reference.add_chosen, out, places, weights)
    return reference.add_chosen(out, places, weights)


def _has_kernels(target: KernelTarget) -> bool:
    return target.platform in ("cuda", "gpu") and (target.capability or (0, 0)) >= (8, 0)
