"""Mixtures of experts (Shazeer et al. 2017): a router chooses a few experts for each token, and adds their outputs."""

from __future__ import annotations

import dataclasses

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Float32

from jaxserve.layers.axes import EXPERT_AXIS, EXPERT_TENSOR_AXIS, TENSOR_AXES
from jaxserve.layers.linear import linear
from jaxserve.layers.mlp import MlpParams, partial_mlp
from pallas_kernels.expert_routing import Routing, choose_experts, group_by_expert
from pallas_kernels.grouped_matmul import Gate, grouped_matmul
from pallas_kernels.quantized_matmul import HeldWeight
from pallas_kernels.target import KernelTarget


@flax.struct.dataclass
class RouterParams:
    """The weights of a router. `correction` is added to scores before experts are chosen (see `Routing`); the weight of
    a chosen expert is multiplied by its entry of `scale`."""

    weight: Float[Array, "experts dim"]
    bias: Float[Array, " experts"] | None = None
    correction: Float32[Array, " experts"] | None = None
    scale: Float[Array, " experts"] | None = None


@flax.struct.dataclass
class ExpertParams:
    """The weights of a shard's experts; the two matrices of `up` are gate and up."""

    up: Float[Array, "experts 2 ffn dim"] | HeldWeight
    down: Float[Array, "experts dim ffn"] | HeldWeight
    up_bias: Float[Array, "experts 2 ffn"] | None = None
    down_bias: Float[Array, "experts dim"] | None = None


@flax.struct.dataclass
class MixtureParams:
    """The weights of a mixture. The `shared` block computes all tokens; its output is multiplied by the sigmoid of the
    product of the token and `shared_gate`, if there is one."""

    router: RouterParams
    experts: ExpertParams
    shared: MlpParams | None = None
    shared_gate: Float[Array, "1 dim"] | None = None


@dataclasses.dataclass(frozen=True)
class MixtureSettings:
    """The static settings of a mixture."""

    routing: Routing
    gate: Gate
    target: KernelTarget


@jax.named_scope("mixture")
def mixture(
    x: Float[Array, "tokens dim"],
    params: MixtureParams,
    live: Bool[Array, " tokens"],
    settings: MixtureSettings,
    *,
    routed_by: Float[Array, "tokens dim"] | None = None,
) -> Float[Array, "tokens dim"]:
    """Return the sum of the outputs of each token's experts, and of the shared block.

    Tokens that aren't `live` pad the batch: no expert computes them. The router sees `routed_by`, by default `x`.
    """
    logits = linear(x if routed_by is None else routed_by, params.router.weight, out_dtype=jnp.float32)
    if params.router.bias is not None:
        logits += params.router.bias.astype(jnp.float32)
    ids, weights = choose_experts(logits, params.router.correction, settings.routing, settings.target)
    if params.router.scale is not None:
        weights *= params.router.scale.astype(jnp.float32)[ids]
    out = _experts(x, params.experts, jnp.where(live[:, None], ids, -1), weights, settings)
    if params.shared is not None:
        shared = partial_mlp(x, params.shared, settings.gate.activation)
        if params.shared_gate is not None:
            shared *= jax.nn.sigmoid(linear(x, params.shared_gate))
        out += shared
    return lax.psum(out, TENSOR_AXES)


def _experts(
    x: Float[Array, "tokens dim"],
    params: ExpertParams,
    ids: Array,
    weights: Float32[Array, "tokens choices"],
    settings: MixtureSettings,
) -> Float[Array, "tokens dim"]:
    """Return what this shard's experts, and its part of each, add to the output."""
    count = params.up.shape[0]
    first = lax.axis_index(EXPERT_AXIS).astype(jnp.int32) * count
    groups = group_by_expert(jnp.where(ids < 0, -1, ids - first), count, settings.target)
    up_bias = None if params.up_bias is None else params.up_bias.reshape(count, -1)
    inner = grouped_matmul(
        x,
        params.up,
        groups,
        bias=up_bias,
        gate=settings.gate,
        of_tokens=True,
        out_dtype=x.dtype,
        target=settings.target,
    )
    down_bias = params.down_bias
    if down_bias is not None and lax.axis_size(EXPERT_TENSOR_AXIS) > 1:
        down_bias = jnp.where(lax.axis_index(EXPERT_TENSOR_AXIS) == 0, down_bias, 0)
    out = grouped_matmul(
        inner, params.down, groups, bias=down_bias, out_dtype=x.dtype, target=settings.target, one_pass=True
    )
    chosen = out.at[groups.places].get(mode="fill", fill_value=0)
    return (chosen.astype(jnp.float32) * weights[..., None]).sum(axis=1).astype(x.dtype)
