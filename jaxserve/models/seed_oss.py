"""Seed-OSS: Llama's layers, with biases on the projections into attention and, if the config asks, out of it."""

from __future__ import annotations

import dataclasses
import functools

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxserve.layers import embedding
from jaxserve.layers.attention import AttentionParams, AttentionSettings, self_attention
from jaxserve.layers.batch import TokenBatch
from jaxserve.layers.mlp import MlpParams, mlp
from jaxserve.layers.norm import rms_norm
from jaxserve.layers.rope import RopeConfig, Rotation, rotation
from jaxserve.model_source.fields import NORM_EPSILON, Fields
from jaxserve.models.config import ModelConfig, read_sizes, refuse
from jaxserve.models.parameters import Declare, Params
from jaxserve.models.rope import read_rope
from pallas_kernels.paged_attention import Backend, PagedKV


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(ModelConfig):
    """The config of the family."""

    norm_eps: float
    rope: RopeConfig
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool


@flax.struct.dataclass
class LayerParams:
    """The weights of one decoder layer."""

    attention_norm: Array
    attention: AttentionParams
    mlp_norm: Array
    mlp: MlpParams


def parse(fields: Fields) -> Config:
    """Read a config.json. Raises `ConfigError`."""
    sizes = read_sizes(fields, num_key_value_heads=8, head_dim=128, max_position_embeddings=524288)
    refuse(fields, hidden_act="silu")
    return Config(
        **sizes,
        norm_eps=fields.number("rms_norm_eps", NORM_EPSILON, 1e-6),
        rope=read_rope(fields, sizes["max_position_embeddings"], sizes["head_dim"]),
        qkv_bias=fields.boolean("attention_bias", True),
        output_bias=fields.boolean("attention_out_bias", False),
        mlp_bias=fields.boolean("mlp_bias", False),
        windows=(None,) * sizes["num_layers"],
    )


def abstract(config: Config, dtype: np.dtype) -> Params:
    """Return the tree of parameters, with a `ParamSpec` in the place of each array."""
    declare = Declare(config, dtype)

    def layer(i: int) -> LayerParams:
        name = f"model.layers.{i}"
        return LayerParams(
            attention_norm=declare.vector(f"{name}.input_layernorm.weight"),
            attention=declare.attention(
                f"{name}.self_attn", config.rope, qkv_bias=config.qkv_bias, output_bias=config.output_bias
            ),
            mlp_norm=declare.vector(f"{name}.post_attention_layernorm.weight"),
            mlp=declare.mlp(f"{name}.mlp", bias=config.mlp_bias),
        )

    layers = tuple(layer(i) for i in range(config.num_layers))
    return Params(declare.embedding(), layers, declare.vector("model.norm.weight"), declare.head())


def embed(config: Config, params: Params, batch: TokenBatch) -> Float[Array, "tokens dim"]:
    """Return the embeddings of the batch's tokens."""
    return embedding.embed(batch.tokens, params.embedding)


def forward(
    config: Config, params: Params, x: Float[Array, "tokens dim"], batch: TokenBatch, kv: PagedKV, backend: Backend
) -> tuple[Float[Array, "tokens dim"], PagedKV]:
    """Apply the layers and the final norm to embeddings; return hidden states and the updated cache."""
    rope = rotation(batch, config.rope, config.head_dim)
    settings = AttentionSettings(config.norm_eps, backend)
    for i, layer in enumerate(params.layers):
        with jax.named_scope(f"layer_{i}"):
            x, kv = _layer(x, layer, batch, kv, jnp.int32(i), rope, settings)
    with jax.named_scope("final_norm"):
        return rms_norm(x, params.norm, config.norm_eps), kv


@functools.partial(jax.jit, static_argnames="settings")
def _layer(
    x: Float[Array, "tokens dim"],
    params: LayerParams,
    batch: TokenBatch,
    kv: PagedKV,
    index: Int[Array, ""],
    rope: Rotation,
    settings: AttentionSettings,
) -> tuple[Float[Array, "tokens dim"], PagedKV]:
    normed = rms_norm(x, params.attention_norm, settings.norm_eps)
    attended, kv = self_attention(normed, params.attention, batch, kv, index, rope, settings)
    x = x + attended
    return x + mlp(rms_norm(x, params.mlp_norm, settings.norm_eps), params.mlp), kv


def head(config: Config, params: Params, hidden: Float[Array, "rows dim"]) -> Float[Array, "rows vocab_shard"]:
    """Return the logits of hidden states, in float32."""
    return embedding.logits(hidden, params.embedding if params.output is None else params.output)
