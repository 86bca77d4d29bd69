"""Ministral 3: Llama's layers, with queries that grow with the logarithm of their position."""

from __future__ import annotations

import dataclasses
import functools

import flax.struct
import jax
import numpy as np
from jaxtyping import Array, Float

from jaxserve.layers.attention import AttentionParams, AttentionSettings, self_attention
from jaxserve.layers.batch import KVLayer, KVPools, TokenBatch
from jaxserve.layers.mlp import MlpParams, mlp
from jaxserve.layers.norm import rms_norm
from jaxserve.layers.rope import RopeConfig, Rotation, query_scale, rotation
from jaxserve.model_source.fields import NON_NEGATIVE, NORM_EPSILON, Fields
from jaxserve.models import llama
from jaxserve.models.config import ModelConfig, read_one_window, read_sizes, refuse
from jaxserve.models.parameters import Params, ParamSpecs
from jaxserve.models.rope import read_rope
from pallas_kernels.paged_attention import Backend

embed, head = llama.embed, llama.head


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(ModelConfig):
    """The config of the family."""

    norm_eps: float
    rope: RopeConfig
    query_growth: float


@flax.struct.dataclass
class LayerParams:
    """The weights of one decoder layer."""

    attention_norm: Array
    attention: AttentionParams
    mlp_norm: Array
    mlp: MlpParams


def parse(fields: Fields) -> Config:
    """Read a config.json. Raises `ConfigError`."""
    sizes = read_sizes(fields, head_dim=128, num_key_value_heads=8, max_position_embeddings=262144)
    refuse(fields, hidden_act="silu", attention_bias=False)
    rope = fields.object("rope_parameters")
    growth = Fields(rope, f"{fields.where}: rope_parameters").number("llama_4_scaling_beta", NON_NEGATIVE, 0.0)
    return Config(
        **sizes,
        norm_eps=fields.number("rms_norm_eps", NORM_EPSILON, 1e-5),
        rope=read_rope(
            fields, sizes["max_position_embeddings"], sizes["head_dim"], theta=1e6, known=("llama_4_scaling_beta",)
        ),
        query_growth=growth,
        windows=read_one_window(fields, sizes["num_layers"]),
    )


def abstract(config: Config, dtype: np.dtype) -> Params:
    """Return the tree of parameters; each leaf is a `ParamSpec`."""
    declare = ParamSpecs(config, dtype)

    def layer(i: int) -> LayerParams:
        name = f"model.layers.{i}"
        return LayerParams(
            attention_norm=declare.vector(f"{name}.input_layernorm.weight"),
            attention=declare.attention(f"{name}.self_attn", config.rope),
            mlp_norm=declare.vector(f"{name}.post_attention_layernorm.weight"),
            mlp=declare.mlp(f"{name}.mlp"),
        )

    layers = tuple(layer(i) for i in range(config.num_layers))
    return Params(declare.embedding(), layers, declare.vector("model.norm.weight"), declare.head())


def forward(
    config: Config, params: Params, x: Float[Array, "tokens dim"], batch: TokenBatch, kv: KVPools, backend: Backend
) -> tuple[Float[Array, "tokens dim"], KVPools]:
    """Apply the layers and the final norm to embeddings; return hidden states and the updated cache."""
    rope = rotation(batch, config.rope, config.head_dim)
    scale = query_scale(batch.positions, config.query_growth, config.rope.original_max_position)
    at = config.kv_layers()
    for i, layer in enumerate(params.layers):
        settings = AttentionSettings(config.norm_eps, backend, config.windows[i])
        with jax.named_scope(f"layer_{i}"):
            x, kv = _layer(x, layer, batch, kv, at[i], rope, scale, settings)
    with jax.named_scope("final_norm"):
        return rms_norm(x, params.norm, config.norm_eps), kv


@functools.partial(jax.jit, static_argnames="settings")
def _layer(
    x: Float[Array, "tokens dim"],
    params: LayerParams,
    batch: TokenBatch,
    kv: KVPools,
    at: KVLayer,
    rope: Rotation,
    scale: Float[Array, " tokens"],
    settings: AttentionSettings,
) -> tuple[Float[Array, "tokens dim"], KVPools]:
    normed = rms_norm(x, params.attention_norm, settings.norm_eps)
    attended, kv = self_attention(normed, params.attention, batch, kv, at, rope, settings, scale)
    x = x + attended
    return x + mlp(rms_norm(x, params.mlp_norm, settings.norm_eps), params.mlp), kv
