"""Runs the layers of a model one after another: the loop that all families share. A family supplies its layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxserve.layers.batch import KVLayer, KVPools, LayerOutput
from jaxserve.layers.norm import layer_norm, rms_norm
from jaxserve.models.layout import AnyModel
from jaxserve.models.parameters import LayerNormParams

ApplyLayer = Callable[[int, Float[Array, "tokens dim"], Any, KVPools, KVLayer], LayerOutput]
"""Applies the layer of an index to hidden states, with its weights, the pools, and the place of its keys and values."""


def apply_layers(
    model: AnyModel,
    apply: ApplyLayer,
    layers: Sequence[Any],
    x: Float[Array, "tokens dim"],
    kv: KVPools,
    indices: range | None = None,
) -> LayerOutput:
    """Apply the layers of these indices, all by default, of which `layers` are the weights.

    The loop is unrolled, so that each layer's pages are updated in place.
    """
    at = model.kv_layers()
    loads: list[Array] = []
    features: list[Array] = []
    for i, params in zip(range(model.config.num_layers) if indices is None else indices, layers, strict=True):
        features += [x] if i in model.taps else []
        with jax.named_scope(f"layer_{i}"):
            out = apply(i, x, params, kv, at[i])
        x, kv = out.hidden, out.kv
        loads += [] if out.expert_tokens is None else [out.expert_tokens]
    return LayerOutput(x, kv, jnp.stack(loads) if loads else None, tuple(features))


@jax.named_scope("final_norm")
def final_norm(x: Float[Array, "tokens dim"], params: Any, eps: float) -> Float[Array, "tokens dim"]:
    """Apply the norm after the last layer."""
    if isinstance(params, LayerNormParams):
        return layer_norm(x, params.weight, params.bias, eps)
    return rms_norm(x, params, eps)
