"""Runs the layers of a model one after another, and has the layer that most families share; others supply their own."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxserve.layers.attention import AttentionParams, AttentionSettings, self_attention
from jaxserve.layers.batch import KVLayer, KVPools, LayerOutput, TokenBatch
from jaxserve.layers.delta_net import DeltaNetParams, delta_net
from jaxserve.layers.latent_attention import LatentAttentionParams, latent_attention
from jaxserve.layers.mixture import MixtureParams, MixtureSettings, mixture
from jaxserve.layers.mlp import MlpParams, mlp
from jaxserve.layers.norm import layer_norm, rms_norm
from jaxserve.layers.rope import Rotation
from jaxserve.models.layout import AnyModel
from jaxserve.models.parameters import LayerNormParams
from pallas_kernels.paged_attention import Backend

ApplyLayer = Callable[[int, Float[Array, "tokens dim"], Any, KVPools, KVLayer], LayerOutput]
"""Applies the layer of an index to hidden states, with its weights, the pools, and the place of its keys and values."""


@flax.struct.dataclass
class LayerParams:
    """The weights of one decoder layer. The norms before attention, and of the outputs of attention and feed-forward
    block, may be None."""

    attention_norm: Array | LayerNormParams | None
    attention: AttentionParams | LatentAttentionParams | DeltaNetParams
    attended_norm: Array | None
    mlp_norm: Array | LayerNormParams
    mlp: MlpParams | MixtureParams
    mlp_output_norm: Array | None


def apply_layers(
    model: AnyModel,
    apply: ApplyLayer,
    layers: Sequence[Any],
    x: Float[Array, "tokens dim"],
    kv: KVPools,
    indices: range | None = None,
) -> LayerOutput:
    """Apply the layers of these indices, by default all of the model, of which `layers` are the weights.

    The loop is unrolled, so that each layer's pages are updated in place.
    """
    at = model.kv_layers()
    loads: list[Array] = []
    features: list[Array] = []
    for i, params in zip(model.layers if indices is None else indices, layers, strict=True):
        features += [x] if i in model.taps else []
        with jax.named_scope(f"layer_{i}"):
            out = apply(i, x, params, kv, at[i])
        x, kv = out.hidden, out.kv
        loads += [] if out.expert_tokens is None else [out.expert_tokens]
    return LayerOutput(x, kv, jnp.stack(loads) if loads else None, tuple(features))


@functools.partial(jax.jit, static_argnames=("settings", "activation", "multiplier", "experts"))
def decoder_layer(
    x: Float[Array, "tokens dim"],
    params: LayerParams,
    batch: TokenBatch,
    kv: KVPools,
    at: KVLayer,
    rope: Rotation | None,
    settings: AttentionSettings,
    query_scale: Float[Array, " tokens"] | None = None,
    *,
    activation: str = "silu",
    multiplier: float | None = None,
    experts: MixtureSettings | None = None,
) -> LayerOutput:
    """Apply the layer that most families have: attention, then a feed-forward block or a mixture of `experts`.

    The outputs of both are multiplied by `multiplier`. It is jitted, so that equal layers are traced once; the compiler
    inlines it.
    """
    x, kv = attend(x, params, batch, kv, at, rope, settings, query_scale, multiplier)
    normed, load = norm(x, params.mlp_norm, settings.norm_eps), None
    if isinstance(params.mlp, MlpParams):
        out = mlp(normed, params.mlp, activation)
    else:
        assert experts is not None
        out, load = mixture(normed, params.mlp, batch.live, experts)
    return LayerOutput(x + _added(out, params.mlp_output_norm, settings.norm_eps, multiplier), kv, load)


def layer_function(
    model: AnyModel,
    batch: TokenBatch,
    backend: Backend,
    ropes: Sequence[Rotation | None] | None = None,
    *,
    layer: Callable[..., LayerOutput] = decoder_layer,
    scale: float | None = None,
    soft_cap: float | None = None,
    **options: Any,
) -> ApplyLayer:
    """Return the function that applies `layer` with the window and the rotation of each layer, and with these options.

    `ropes` are by layer; by default, all layers have the config's. `scale` and `soft_cap` are as in
    `AttentionSettings`.
    """
    config = model.config
    rotations = [model.rotation(batch)] * config.num_layers if ropes is None else ropes

    def apply(i: int, x: Array, params: Any, kv: KVPools, at: KVLayer) -> LayerOutput:
        settings = AttentionSettings(
            config.norm_eps, backend, config.windows[i], scale, soft_cap, bidirectional=config.bidirectional
        )
        return layer(x, params, batch, kv, at, rotations[i], settings, **options)

    return apply


def attend(
    x: Float[Array, "tokens dim"],
    params: LayerParams,
    batch: TokenBatch,
    kv: KVPools,
    at: KVLayer,
    rope: Rotation | None,
    settings: AttentionSettings,
    query_scale: Float[Array, " tokens"] | None = None,
    multiplier: float | None = None,
) -> tuple[Float[Array, "tokens dim"], KVPools]:
    """Add to `x` the output of a layer's attention, with the norms before and after it."""
    normed = norm(x, params.attention_norm, settings.norm_eps)
    if isinstance(params.attention, DeltaNetParams):
        attended, kv = delta_net(normed, params.attention, batch, kv, at, settings.norm_eps, settings.backend.target)
    elif isinstance(params.attention, LatentAttentionParams):
        assert rope is not None
        assert query_scale is None
        attended, kv = latent_attention(normed, params.attention, batch, kv, at, rope, settings)
    else:
        attended, kv = self_attention(normed, params.attention, batch, kv, at, rope, settings, query_scale)
    return x + _added(attended, params.attended_norm, settings.norm_eps, multiplier), kv


def _added(
    x: Float[Array, "tokens dim"], weight: Array | None, eps: float, multiplier: float | None
) -> Float[Array, "tokens dim"]:
    """Return the normalized and multiplied output of a block, as the layer adds it."""
    normed = x if weight is None else rms_norm(x, weight, eps)
    return normed if multiplier is None else times(normed, multiplier)


def norm(x: Float[Array, "tokens dim"], params: Any, eps: float) -> Float[Array, "tokens dim"]:
    """Apply a norm of a family: a layer norm if it has the weights of one, else a root mean square norm; none if there
    are no `params`."""
    if params is None:
        return x
    if isinstance(params, LayerNormParams):
        return layer_norm(x, params.weight, params.bias, eps)
    return rms_norm(x, params, eps)


def times(x: Array, factor: float) -> Array:
    """Multiply in float32, because a factor such as 0.22 loses digits in bfloat16."""
    return (x.astype(jnp.float32) * factor).astype(x.dtype)
