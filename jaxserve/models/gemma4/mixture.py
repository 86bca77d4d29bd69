"""The experts of Gemma 4's mixture, which are beside the MLP of each layer and have norms of their own."""

from __future__ import annotations

import dataclasses

import flax.struct
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from jaxserve.layers.batch import TokenBatch
from jaxserve.layers.mixture import MixtureParams, MixtureSettings, mixture
from jaxserve.layers.norm import rms_norm
from jaxserve.models import gemma
from jaxserve.models.parameters import ParamSpecs
from pallas_kernels.grouped_matmul import Gate

GATE = Gate(gemma.ACTIVATION)


@flax.struct.dataclass
class LayerMixtureParams:
    """The weights of a layer's mixture.

    `norm` precedes the experts, and `router_norm` the router. `output_norm` follows the experts, and `mlp_output_norm`
    the MLP beside them.
    """

    norm: Float[Array, " dim"]
    router_norm: Float[Array, " dim"]
    mixture: MixtureParams
    mlp_output_norm: Float[Array, " dim"]
    output_norm: Float[Array, " dim"]


def declared(declare: ParamSpecs, name: str, experts: int) -> LayerMixtureParams:
    """Return the weights of the mixture of the layer of this name; each leaf is a `ParamSpec`."""
    router = declare.router(f"{name}.router.proj", experts)
    scale = declare.vector(f"{name}.router.per_expert_scale", experts)
    return LayerMixtureParams(
        norm=declare.wide_norm(f"{name}.pre_feedforward_layernorm_2.weight"),
        router_norm=declare.wide_norm(f"{name}.router.scale"),
        mixture=MixtureParams(
            router=dataclasses.replace(router, scale=scale), experts=declare.stacked_experts(f"{name}.experts")
        ),
        mlp_output_norm=declare.wide_norm(f"{name}.post_feedforward_layernorm_1.weight"),
        output_norm=declare.wide_norm(f"{name}.post_feedforward_layernorm_2.weight"),
    )


def with_experts(
    x: Float[Array, "tokens dim"],
    out: Float[Array, "tokens dim"],
    params: LayerMixtureParams,
    batch: TokenBatch,
    experts: MixtureSettings,
    eps: float,
) -> tuple[Float[Array, "tokens dim"], Int32[Array, " experts"]]:
    """Return the sum of the outputs of the MLP, `out`, and of the experts, both normed; and the experts' loads."""
    routed_by = rms_norm(x, params.router_norm, eps) * jnp.asarray(x.shape[1] ** -0.5, x.dtype)
    mixed, load = mixture(rms_norm(x, params.norm, eps), params.mixture, batch.live, experts, routed_by=routed_by)
    return rms_norm(out, params.mlp_output_norm, eps) + rms_norm(mixed, params.output_norm, eps), load
