"""Mixtures of experts (Shazeer et al. 2017): a router chooses a few experts for each token, and adds their outputs."""

from __future__ import annotations

import dataclasses
import functools

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Float32

from jaxserve.layers.axes import DATA_AXIS, EXPERT_AXIS, EXPERT_TENSOR_AXIS, sum_of_shards
from jaxserve.layers.exchange import Outputs, Routed, exchange_all, exchange_chosen
from jaxserve.layers.linear import linear
from jaxserve.layers.mlp import MlpParams, partial_mlp
from pallas_kernels.expert_routing import Routing, add_chosen, choose_experts, group_by_expert
from pallas_kernels.grouped_matmul import Gate, grouped_matmul
from pallas_kernels.quantized_matmul import HeldWeight
from pallas_kernels.target import KernelTarget


@flax.struct.dataclass
class RouterParams:
    """The weights of a router, followed by rows of zeros.

    `correction` is added to scores before experts are chosen (see `Routing`). The weight of a chosen expert is
    multiplied by its entry of `scale`.
    """

    weight: Float[Array, "rows dim"] | HeldWeight
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
    product of the token and the first row of `shared_gate`, if there is one."""

    router: RouterParams
    experts: ExpertParams
    shared: MlpParams | None = None
    shared_gate: Float[Array, "rows dim"] | HeldWeight | None = None


@dataclasses.dataclass(frozen=True)
class MixtureSettings:
    """The static settings of a mixture.

    Experts are divided among the shards of a rank, or of all if `over_ranks`. If `ragged`, a token is then sent only to
    shards that have one of its experts, else to all.
    """

    experts: int
    routing: Routing
    gate: Gate
    target: KernelTarget
    over_ranks: bool = False
    ragged: bool = False

    @property
    def part_axes(self) -> tuple[str, ...]:
        """The mesh axes that divide experts."""
        return (DATA_AXIS, EXPERT_AXIS) if self.over_ranks else (EXPERT_AXIS,)


@jax.named_scope("mixture")
def mixture(
    x: Float[Array, "tokens dim"],
    params: MixtureParams,
    live: Bool[Array, " tokens"],
    settings: MixtureSettings,
    *,
    routed_by: Float[Array, "tokens dim"] | None = None,
) -> Outputs:
    """Return the sum of the outputs of each token's experts, and of the shared block; and how many tokens each of this
    shard's experts computed.

    Tokens that aren't `live` pad the batch: no expert computes them. The router sees `routed_by`, by default `x`.
    """
    logits = linear(x if routed_by is None else routed_by, params.router.weight, out_dtype=jnp.float32)
    logits = logits[:, : settings.experts]
    if params.router.bias is not None:
        logits += params.router.bias.astype(jnp.float32)
    ids, weights = choose_experts(logits, params.router.correction, settings.routing, settings.target)
    if params.router.scale is not None:
        weights *= params.router.scale.astype(jnp.float32)[ids]
    ids = jnp.where(live[:, None], ids, -1)
    compute = _exchanged if settings.over_ranks else _experts
    out, loads = compute(Routed(x, ids, weights), params.experts, settings)
    if params.shared is not None:
        shared = partial_mlp(x, params.shared, settings.gate.activation)
        if params.shared_gate is not None:
            shared *= jax.nn.sigmoid(linear(x, params.shared_gate)[:, :1])
        out += shared
    return sum_of_shards(out), loads


def _exchanged(routed: Routed, params: ExpertParams, settings: MixtureSettings) -> Outputs:
    """Return this shard's part of the output if ranks have different experts.

    Each shard takes a part of its rank's tokens, and has the shards of all ranks compute it (see `exchange`).
    """
    tokens, dim = routed.x.shape
    shards = lax.axis_size(EXPERT_AXIS)
    size = -(-tokens // shards)
    first = lax.axis_index(EXPERT_AXIS) * size
    padding = ((0, shards * size - tokens), (0, 0))
    padded = (jnp.pad(column, padding, constant_values=fill) for column, fill in zip(routed, (0, -1, 0)))
    own = Routed(*(lax.dynamic_slice_in_dim(column, first, size) for column in padded))
    compute = functools.partial(_experts, params=params, settings=settings)
    if settings.ragged:
        experts = params.up.shape[0]
        out, loads = exchange_chosen(own, settings.part_axes, compute, experts=experts, target=settings.target)
    else:
        out, loads = exchange_all(own, settings.part_axes, compute)
    if shards == 1:
        return out, loads
    whole = jnp.zeros((shards * size, dim), out.dtype)
    return lax.dynamic_update_slice_in_dim(whole, out, first, axis=0)[:tokens], loads


def _experts(routed: Routed, params: ExpertParams, settings: MixtureSettings) -> Outputs:
    """Return the weighted sums of the outputs of this shard's experts or parts of experts, and their loads."""
    x, ids, weights = routed
    count = params.up.shape[0]
    first = lax.axis_index(settings.part_axes).astype(jnp.int32) * count
    groups = group_by_expert(jnp.where(ids < 0, -1, ids - first), count, settings.target)
    groups = dataclasses.replace(groups, share=count / settings.experts)
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
        # The norm's output goes to the router, too, so that it can't be joined with this
        one_pass=True,
    )
    down_bias = params.down_bias
    if down_bias is not None and lax.axis_size(EXPERT_TENSOR_AXIS) > 1:
        down_bias = jnp.where(lax.axis_index(EXPERT_TENSOR_AXIS) == 0, down_bias, 0)
    # A CPU's kernel has float32 already
    dtype = jnp.float32 if settings.target.platform == "cpu" else x.dtype
    out = grouped_matmul(
        inner, params.down, groups, bias=down_bias, out_dtype=dtype, target=settings.target, one_pass=True
    )
    return add_chosen(out, groups.places, weights, settings.target).astype(x.dtype), jnp.diff(groups.starts)
