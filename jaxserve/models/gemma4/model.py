"""The weights and layers of Gemma 4."""

from __future__ import annotations

import functools

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxserve.layers import embedding
from jaxserve.layers.attention import AttentionSettings
from jaxserve.layers.batch import KVLayer, KVPools, LayerOutput, TokenBatch
from jaxserve.layers.linear import linear
from jaxserve.layers.mixture import MixtureSettings
from jaxserve.layers.mlp import ACTIVATIONS, MlpParams, mlp
from jaxserve.layers.norm import rms_norm
from jaxserve.layers.rope import Rotation
from jaxserve.models import decoder, gemma, parameters
from jaxserve.models.decoder import ApplyLayer
from jaxserve.models.gemma4 import mixture
from jaxserve.models.gemma4.config import Config
from jaxserve.models.layout import LaidOutModel
from jaxserve.models.mixtures.common import mixture_settings
from jaxserve.models.parameters import ParamSpecs
from pallas_kernels.paged_attention import Backend

embed, head = gemma.embed, gemma.head


@flax.struct.dataclass
class LayerVectorParams:
    """The weights that make the vectors of all layers, from tokens and from their embeddings."""

    embedding: Float[Array, "vocab layers_x_size"]
    projection: Float[Array, "layers_x_size dim"]
    norm: Float[Array, " size"]


@flax.struct.dataclass
class Params(parameters.Params):
    """All weights of a model."""

    layer_vectors: LayerVectorParams | None = None


@flax.struct.dataclass
class LayerInputParams:
    """The weights by which a layer takes in its vectors."""

    gate: Float[Array, "size dim"]
    projection: Float[Array, "dim size"]
    norm: Float[Array, " dim"]


@flax.struct.dataclass
class LayerParams(decoder.LayerParams):
    """The weights of one decoder layer."""

    mlp_norm: Array
    mlp: MlpParams
    mlp_output_norm: Array
    mixture: mixture.LayerMixtureParams | None
    layer_input: LayerInputParams | None
    scalar: Float[Array, " 1"]


def abstract(model: LaidOutModel[Config], dtype: np.dtype) -> Params:
    """Return the tree of parameters; each leaf is a `ParamSpec`."""
    config = model.config
    declare = ParamSpecs(model, dtype)
    dim, size, biased = config.hidden_size, config.per_layer_dim, config.attention_bias

    def layer(i: int) -> LayerParams:
        name, full, reuses = f"model.layers.{i}", config.windows[i] is None, config.kv_source(i) != i
        kv_heads, head_dim = config.kv_heads_of(i)
        q_norm, k_norm = (declare.wide_norm(f"{name}.self_attn.{x}_norm.weight", head_dim) for x in "qk")
        attention = declare.attention(
            f"{name}.self_attn",
            config.rope if full else config.local_rope,
            qkv_bias=biased,
            output_bias=biased,
            q_norm=q_norm,
            k_norm=None if reuses else k_norm,
            heads=(kv_heads, head_dim),
            projections="q" if reuses else "qk" if full and config.keys_as_values else "qkv",
        )
        return LayerParams(
            attention_norm=declare.wide_norm(f"{name}.input_layernorm.weight"),
            attention=attention,
            attended_norm=declare.wide_norm(f"{name}.post_attention_layernorm.weight"),
            mlp_norm=declare.wide_norm(f"{name}.pre_feedforward_layernorm.weight"),
            mlp=declare.mlp(f"{name}.mlp", width=config.reusing_mlp_size if reuses else None),
            mlp_output_norm=declare.wide_norm(f"{name}.post_feedforward_layernorm.weight"),
            mixture=mixture.declared(declare, name, config.experts) if config.routing else None,
            layer_input=layer_input(name) if size else None,
            scalar=declare.vector(f"{name}.layer_scalar", 1),
        )

    def layer_input(name: str) -> LayerInputParams:
        return LayerInputParams(
            gate=declare.matrix(f"{name}.per_layer_input_gate.weight", size, dim),
            projection=declare.matrix(f"{name}.per_layer_projection.weight", dim, size),
            norm=declare.wide_norm(f"{name}.post_per_layer_input_norm.weight"),
        )

    def layer_vectors(width: int) -> LayerVectorParams:
        return LayerVectorParams(
            embedding=declare.embedding("model.embed_tokens_per_layer.weight", (config.per_layer_rows, width)),
            projection=declare.matrix("model.per_layer_model_projection.weight", width, dim),
            norm=declare.wide_norm("model.per_layer_projection_norm.weight", size),
        )

    layers = tuple(layer(i) for i in range(config.num_layers))
    norm = declare.wide_norm("model.norm.weight")
    vectors = layer_vectors(config.num_layers * size) if size else None
    return Params(declare.embedding(), layers, norm, declare.head(), layer_vectors=vectors)


def layers(
    model: LaidOutModel[Config], params: Params, x: Float[Array, "tokens dim"], batch: TokenBatch, backend: Backend
) -> ApplyLayer:
    """Return the function that applies a layer; each layer's vectors are made from the embeddings `x`."""
    config = model.config
    full = model.rotation(batch, config.rope, config.full_head_dim)
    local = model.rotation(batch, config.local_rope, config.head_dim)
    experts = None
    if config.routing is not None:
        experts = mixture_settings(model, config.routing, mixture.GATE, batch, backend.target)
    vectors = None if params.layer_vectors is None else _layer_vectors(model, params.layer_vectors, x, batch)

    def apply(i: int, x: Array, params: LayerParams, kv: KVPools, at: KVLayer) -> LayerOutput:
        window, vector = config.windows[i], None if vectors is None else vectors[:, i]
        settings = AttentionSettings(
            config.norm_eps,
            backend,
            window,
            scale=1.0,
            norm_values=True,
            keys_as_values=window is None and config.keys_as_values,
        )
        return _layer(x, params, vector, batch, kv, at, full if window is None else local, settings, experts)

    return apply


@jax.named_scope("layer_vectors")
def _layer_vectors(
    model: LaidOutModel[Config], params: LayerVectorParams, x: Float[Array, "tokens dim"], batch: TokenBatch
) -> Float[Array, "tokens layers size"]:
    """Return each layer's vectors for the batch's tokens, whose embeddings are `x`."""
    config = model.config
    shape = batch.num_tokens, config.num_layers, config.per_layer_dim
    dim_scale, size_scale, half = (
        jnp.asarray(scale, x.dtype) for scale in (config.hidden_size**-0.5, config.per_layer_dim**0.5, 0.5**0.5)
    )
    of_tokens = embedding.embed(batch.tokens, params.embedding).reshape(shape) * size_scale
    projected = (linear(x, params.projection) * dim_scale).reshape(shape)
    return (rms_norm(projected, params.norm, config.norm_eps) + of_tokens) * half


@functools.partial(jax.jit, static_argnames=("settings", "experts"))
def _layer(
    x: Float[Array, "tokens dim"],
    params: LayerParams,
    vector: Float[Array, "tokens size"] | None,
    batch: TokenBatch,
    kv: KVPools,
    at: KVLayer,
    rope: Rotation,
    settings: AttentionSettings,
    experts: MixtureSettings | None,
) -> LayerOutput:
    """Apply one decoder layer. It is jitted, so that equal layers are traced once; the compiler inlines it."""
    x, kv = decoder.attend(x, params, batch, kv, at, rope, settings)
    out = mlp(rms_norm(x, params.mlp_norm, settings.norm_eps), params.mlp, gemma.ACTIVATION)
    load = None
    if params.mixture is not None and experts is not None:
        out, load = mixture.with_experts(x, out, params.mixture, batch, experts, settings.norm_eps)
    x = x + rms_norm(out, params.mlp_output_norm, settings.norm_eps)
    if params.layer_input is not None and vector is not None:
        gated = ACTIVATIONS[gemma.ACTIVATION](linear(x, params.layer_input.gate)) * vector
        x = x + rms_norm(linear(gated, params.layer_input.projection), params.layer_input.norm, settings.norm_eps)
    return LayerOutput(x * params.scalar, kv, load)
