"""Gemma 4: layers with full attention have larger heads than those with a window, and their keys may be values too.

In the small models the last layers reuse keys and values of earlier ones, and each layer has vectors of its own for
tokens. A mixture has experts beside the MLP of each layer. "Unified" models differ in their encoders only.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxserve.errors import ConfigError
from jaxserve.layers import embedding
from jaxserve.layers.attention import AttentionSettings
from jaxserve.layers.batch import KVLayer, KVPools, TokenBatch
from jaxserve.layers.linear import linear
from jaxserve.layers.mixture import MixtureSettings
from jaxserve.layers.mlp import ACTIVATIONS, mlp
from jaxserve.layers.norm import rms_norm
from jaxserve.layers.rope import RopeConfig, Rotation, rotation
from jaxserve.model_source.fields import HEAD_DIM, HEADS, LAYERS, NORM_EPSILON, WIDTH, Fields, Range
from jaxserve.models import gemma, gemma4_mixture, parameters
from jaxserve.models.config import (
    FULL,
    SLIDING,
    ModelConfig,
    Sizes,
    periodic_layer_types,
    read_sizes,
    read_windows,
    refuse,
)
from jaxserve.models.mixtures.common import mixture_settings
from jaxserve.models.parameters import ParamSpecs
from jaxserve.models.rope import read_rope
from pallas_kernels.expert_routing import Routing
from pallas_kernels.paged_attention import Backend

embed, head = gemma.embed, gemma.head

_ROPES = {
    SLIDING: {"rope_theta": 1e4},
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(ModelConfig):
    """The config of the family; `num_kv_heads`, `head_dim` and `local_rope` are those of layers with a window.

    The last `num_reusing_layers` use the keys and values of the last earlier layer that has the same window.
    `per_layer_dim` is the size of the vectors that each layer has for tokens, 0 if there are none; their table has
    `per_layer_rows`.
    """

    norm_eps: float
    rope: RopeConfig
    local_rope: RopeConfig
    full_kv_heads: int
    full_head_dim: int
    keys_as_values: bool
    num_reusing_layers: int
    reusing_mlp_size: int
    per_layer_dim: int
    per_layer_rows: int
    attention_bias: bool
    logit_cap: float | None
    routing: Routing | None
    experts: int
    expert_width: int

    @property
    def num_experts(self) -> int:
        return self.experts

    @property
    def num_mixtures(self) -> int:
        return self.num_layers if self.routing else 0

    @property
    def experts_per_token(self) -> int:
        return self.routing.choices if self.routing else 0

    @property
    def expert_size(self) -> int:
        return self.expert_width

    def stored_heads(self, layer: int) -> tuple[int, int]:
        """Return the KV heads that a checkpoint has for a layer, and their size."""
        full = self.windows[layer] is None
        return (self.full_kv_heads, self.full_head_dim) if full else (self.num_kv_heads, self.head_dim)

    def kv_shape(self, layer: int) -> tuple[int, int]:
        kv_heads, head_dim = self.stored_heads(layer)
        return kv_heads * self.replicas_of(kv_heads), head_dim

    def kv_source(self, layer: int) -> int:
        own = self.num_layers - self.num_reusing_layers
        return layer if layer < own else max(i for i in range(own) if self.windows[i] == self.windows[layer])

    @property
    def widest_mlp(self) -> int:
        mixture = self.expert_width * self.routing.choices if self.routing else 0
        return max(self.intermediate_size, self.reusing_mlp_size if self.num_reusing_layers else 0, mixture)

    @property
    def held_per_token(self) -> int:
        return self.num_layers * self.per_layer_dim

    def splits_into(self, shards: int) -> bool:
        kv = self.full_kv_heads
        return super().splits_into(shards) and (kv % shards == 0 or shards % kv == 0)


@flax.struct.dataclass
class LayerVectorParams:
    """The weights that make the vectors of all layers, from tokens and from their embeddings."""

    embedding: Float[Array, "vocab layers_x_size"]
    projection: Float[Array, "layers_x_size dim"]
    norm: Float[Array, " size"]


@flax.struct.dataclass
class Params(parameters.Params):
    """All weights of a model."""

    layer_vectors: LayerVectorParams | None


@flax.struct.dataclass
class LayerInputParams:
    """The weights by which a layer takes in its vectors."""

    gate: Float[Array, "size dim"]
    projection: Float[Array, "dim size"]
    norm: Float[Array, " dim"]


@flax.struct.dataclass
class LayerParams(gemma.LayerParams):
    """The weights of one decoder layer."""

    mixture: gemma4_mixture.LayerMixtureParams | None
    layer_input: LayerInputParams | None
    scalar: Float[Array, " 1"]


def parse(fields: Fields) -> Config:
    """Read a config.json; it may omit any field that has the default of Hugging Face's class. Raises `ConfigError`."""
    unified = (fields.texts("architectures") or [""])[0] == "Gemma4UnifiedForCausalLM"
    sizes = read_sizes(
        fields,
        vocab_size=262_144,
        hidden_size=2304,
        intermediate_size=9216,
        num_hidden_layers=30,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=256,
        max_position_embeddings=262_144 if unified else 131_072,
        tie_word_embeddings=True,
    )
    layers, max_position = sizes["num_layers"], sizes["max_position_embeddings"]
    refuse(fields, hidden_activation=gemma.ACTIVATION, rope_theta=None, rope_scaling=None)
    refuse(fields, use_bidirectional_attention="vision")  # It only lets tokens of an image see later ones
    if "sliding_window" in fields.raw and fields.raw["sliding_window"] is None:
        raise fields.error("sliding_window", "a number of tokens")
    windows = read_windows(fields, layers, periodic_layer_types(6, layers), 1024 if unified else 512)
    windows = (*windows[:-1], None)  # As in Hugging Face, which overrides the type of the last layer
    full_kv_heads, full_head_dim = _full_heads(fields, sizes, windows)
    if sizes["num_heads"] % full_kv_heads:
        raise ConfigError(
            f"{fields.where}: num_attention_heads={sizes['num_heads']} is not a multiple of "
            f"num_global_key_value_heads={full_kv_heads}"
        )
    rows, least = fields.integer("vocab_size_per_layer_input", WIDTH, 262_144), sizes["vocab_size"]
    per_layer_dim = fields.integer("hidden_size_per_layer_input", Range(0, WIDTH.most), 0 if unified else 256)
    if per_layer_dim and rows < least:
        raise fields.error("vocab_size_per_layer_input", f"at least vocab_size={least}")
    if full_head_dim % 2:
        raise ConfigError(f"{fields.where}: global_head_dim={full_head_dim} is odd: rotation needs pairs")
    ropes = fields.object("rope_parameters") or _ROPES
    if not {SLIDING, FULL} <= ropes.keys():
        raise fields.error("rope_parameters", f"an object with {SLIDING} and {FULL}")
    own = Fields({"rope_parameters": ropes}, fields.where)
    wide = fields.boolean("use_double_wide_mlp", False)
    routing, experts, expert_width = gemma4_mixture.read(fields)
    return Config(
        **sizes,
        norm_eps=fields.number("rms_norm_eps", NORM_EPSILON, 1e-6),
        rope=read_rope(own, max_position, full_head_dim, layer_type=FULL),
        local_rope=read_rope(own, max_position, sizes["head_dim"], layer_type=SLIDING),
        full_kv_heads=full_kv_heads,
        full_head_dim=full_head_dim,
        keys_as_values=fields.boolean("attention_k_eq_v", False),
        num_reusing_layers=_reusing_layers(fields, windows),
        reusing_mlp_size=sizes["intermediate_size"] * (2 if wide else 1),
        per_layer_dim=per_layer_dim,
        per_layer_rows=rows if per_layer_dim else 0,
        attention_bias=fields.boolean("attention_bias", False),
        logit_cap=gemma.read_cap(fields, "final_logit_softcapping"),
        windows=windows,
        routing=routing,
        experts=experts,
        expert_width=expert_width,
    )


def _full_heads(fields: Fields, sizes: Sizes, windows: tuple[int | None, ...]) -> tuple[int, int]:
    """Return the KV heads of layers with full attention, and their size."""
    kv_heads, head_dim = sizes["num_kv_heads"], sizes["head_dim"]
    number = fields.integer("num_global_key_value_heads", HEADS, kv_heads)
    size = fields.integer("global_head_dim", HEAD_DIM, 512)
    if fields.get("per_layer_config") is None:
        return number if fields.boolean("attention_k_eq_v", False) else kv_heads, size
    # Since 5.23, transformers writes what layers have of their own, by their index
    by_layer = Fields(fields.object("per_layer_config"), f"{fields.where}: per_layer_config")
    full = [str(i) for i, window in enumerate(windows) if window is None]
    first, *others = (by_layer.object(i) for i in full)
    if (
        by_layer.raw.keys() - by_layer.read
        or first.keys() - {"num_key_value_heads", "head_dim"}
        or any(each != first for each in others)
    ):
        raise fields.error("per_layer_config", "heads alone, the same for all layers with full attention and no others")
    own = Fields(first, by_layer.where)
    return own.integer("num_key_value_heads", HEADS, kv_heads), own.integer("head_dim", HEAD_DIM, head_dim)


def _reusing_layers(fields: Fields, windows: tuple[int | None, ...]) -> int:
    """Return the number of layers that reuse keys and values. Raises `ConfigError` if one has nothing to reuse."""
    reusing = fields.integer("num_kv_shared_layers", Range(0, LAYERS.most), 0)
    if not set(windows) <= set(windows[: max(0, len(windows) - reusing)]):
        raise ConfigError(
            f"{fields.where}: num_kv_shared_layers={reusing} is too large for {len(windows)} layers: of each type, one "
            "needs keys and values of its own"
        )
    return reusing


def abstract(config: Config, dtype: np.dtype) -> Params:
    """Return the tree of parameters; each leaf is a `ParamSpec`."""
    declare = ParamSpecs(config, dtype)
    dim, size, biased = config.hidden_size, config.per_layer_dim, config.attention_bias

    def layer(i: int) -> LayerParams:
        name, full, reuses = f"model.layers.{i}", config.windows[i] is None, config.kv_source(i) != i
        kv_heads, head_dim = config.stored_heads(i)
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
            mixture=gemma4_mixture.declared(declare, name, config.experts) if config.routing else None,
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
    return Params(declare.embedding(), layers, norm, declare.head(), vectors)


def forward(
    config: Config,
    params: Params,
    x: Float[Array, "tokens dim"],
    batch: TokenBatch,
    kv: KVPools,
    backend: Backend,
) -> tuple[Any, ...]:
    """Apply the layers and the final norm to embeddings.

    Returns hidden states and the updated cache, and of a mixture how many tokens each of this shard's experts computed.
    """
    full = rotation(batch, config.rope, config.full_head_dim)
    local = rotation(batch, config.local_rope, config.head_dim)
    experts = None
    if config.routing is not None:
        experts = mixture_settings(config, config.routing, gemma4_mixture.GATE, batch, backend.target)
    loads: list[Array] = []
    vectors = None if params.layer_vectors is None else _layer_vectors(config, params.layer_vectors, x, batch)
    at = config.kv_layers()
    for i, layer in enumerate(params.layers):
        window, vector = config.windows[i], None if vectors is None else vectors[:, i]
        settings = AttentionSettings(
            config.norm_eps,
            backend,
            window,
            scale=1.0,
            norm_values=True,
            keys_as_values=window is None and config.keys_as_values,
        )
        with jax.named_scope(f"layer_{i}"):
            rope = full if window is None else local
            x, kv, *load = _layer(x, layer, vector, batch, kv, at[i], rope, settings, experts)
        loads += load
    with jax.named_scope("final_norm"):
        normed = rms_norm(x, params.norm, config.norm_eps)
    return (normed, kv, jnp.stack(loads)) if loads else (normed, kv)


@jax.named_scope("layer_vectors")
def _layer_vectors(
    config: Config, params: LayerVectorParams, x: Float[Array, "tokens dim"], batch: TokenBatch
) -> Float[Array, "tokens layers size"]:
    """Return each layer's vectors for the batch's tokens, whose embeddings are `x`."""
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
) -> tuple[Any, ...]:
    """Apply one decoder layer. Jitted so that it is traced once for equal layers; the compiler inlines it."""
    x, kv = gemma.attend(x, params, batch, kv, at, rope, settings)
    out = mlp(rms_norm(x, params.mlp_norm, settings.norm_eps), params.mlp, gemma.ACTIVATION)
    load: list[Array] = []
    if params.mixture is not None and experts is not None:
        out, *load = gemma4_mixture.with_experts(x, out, params.mixture, batch, experts, settings.norm_eps)
    x = x + rms_norm(out, params.mlp_output_norm, settings.norm_eps)
    if params.layer_input is not None and vector is not None:
        gated = ACTIVATIONS[gemma.ACTIVATION](linear(x, params.layer_input.gate)) * vector
        x = x + rms_norm(linear(gated, params.layer_input.projection), params.layer_input.norm, settings.norm_eps)
    return x * params.scalar, kv, *load
