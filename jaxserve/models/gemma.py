"""Gemma 2 and 3: norms before and after each block, and windows on most layers.

Gemma 2 caps its scores and logits. Gemma 3 normalizes heads instead, and rotates layers with a window by a base of
their own.
"""

from __future__ import annotations

import dataclasses
from typing import Final

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxserve.layers import embedding
from jaxserve.layers.batch import TokenBatch
from jaxserve.layers.rope import RopeConfig
from jaxserve.model_source.fields import CONTEXT, LAYERS, NORM_EPSILON, POSITIVE, ROPE_THETA, Fields
from jaxserve.models.config import ModelConfig
from jaxserve.models.decoder import ApplyLayer, LayerParams, layer_function
from jaxserve.models.layout import LaidOutModel
from jaxserve.models.parameters import Params, ParamSpecs
from jaxserve.models.read_fields import FULL, SLIDING, periodic_layer_types, read_sizes, read_windows, refuse
from jaxserve.models.rope import read_rope
from pallas_kernels.paged_attention import Backend

ACTIVATION: Final = "gelu_pytorch_tanh"
_WINDOW = 4096


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(ModelConfig):
    """The config of the family; `local_rope` is that of layers with a window."""

    local_rope: RopeConfig
    attention_bias: bool
    attention_scale: float
    qk_norm: bool
    score_cap: float | None
    logit_cap: float | None


def parse(fields: Fields) -> Config:
    """Read a config.json; it may omit any field that has the default of Hugging Face's class. Raises `ConfigError`."""
    is_3 = (fields.texts("architectures") or [""])[0] == "Gemma3ForCausalLM"
    sizes = read_sizes(
        fields,
        vocab_size=262_208 if is_3 else 256_000,
        hidden_size=2304,
        intermediate_size=9216,
        num_hidden_layers=26,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=256,
        max_position_embeddings=131_072 if is_3 else 8192,
        tie_word_embeddings=True,
    )
    layers, max_position, head_dim = sizes["num_layers"], sizes["max_position_embeddings"], sizes["head_dim"]
    refuse(fields, hidden_activation=ACTIVATION, hidden_act=ACTIVATION)
    bidirectional = is_3 and fields.boolean("use_bidirectional_attention", False)
    if fields.raw.get("sliding_window", _WINDOW) is None:
        raise fields.error("sliding_window", "a number of tokens")
    refuse(fields, sliding_window_size=fields.integer("sliding_window", CONTEXT, _WINDOW))
    if is_3:
        refuse(fields, attn_logit_softcapping=None)
        period = fields.integer("sliding_window_pattern", LAYERS, fields.integer("_sliding_window_pattern", LAYERS, 6))
        rope = read_rope(fields, max_position, head_dim, theta=1e6, layer_type=FULL)
        local_rope = _local_rope(fields, max_position, head_dim)
    else:
        period = 2
        rope = local_rope = read_rope(fields, max_position, head_dim)
    windows = read_windows(fields, layers, periodic_layer_types(period, layers), _WINDOW)
    if bidirectional:  # Then half of a window is on each side
        windows = tuple(None if window is None else window // 2 for window in windows)
    return Config(
        **sizes,
        norm_eps=fields.number("rms_norm_eps", NORM_EPSILON, 1e-6),
        rope=rope,
        local_rope=local_rope,
        attention_bias=fields.boolean("attention_bias", False),
        attention_scale=fields.number("query_pre_attn_scalar", POSITIVE, 256) ** -0.5,
        qk_norm=is_3,
        score_cap=read_cap(fields, "attn_logit_softcapping", None if is_3 else 50.0),
        logit_cap=read_cap(fields, "final_logit_softcapping", None if is_3 else 30.0),
        windows=windows,
    )


def _local_rope(fields: Fields, max_position: int, head_dim: int) -> RopeConfig:
    """Return the rotation of layers with a window, which `rope_theta` and `rope_scaling` don't change."""
    own = {
        "rope_theta": fields.number("rope_local_base_freq", ROPE_THETA, 1e4),
        "rope_parameters": fields.object("rope_parameters").get(SLIDING),
    }
    return read_rope(Fields(own, fields.where), max_position, head_dim)


def read_cap(fields: Fields, name: str, default: float | None = None) -> float | None:
    """Return the bound of scores or logits; null means that there is none."""
    return None if fields.raw.get(name, default) is None else fields.number(name, POSITIVE, default)


def abstract(model: LaidOutModel[Config], dtype: np.dtype) -> Params:
    """Return the tree of parameters; each leaf is a `ParamSpec`."""
    config = model.config
    declare = ParamSpecs(model, dtype)
    biased, head_dim = config.attention_bias, config.head_dim

    def layer(name: str) -> LayerParams:
        q_norm, k_norm = (
            declare.offset_norm(f"{name}.self_attn.{x}_norm.weight", head_dim) if config.qk_norm else None for x in "qk"
        )
        return LayerParams(
            attention_norm=declare.offset_norm(f"{name}.input_layernorm.weight"),
            attention=declare.attention(
                f"{name}.self_attn", config.rope, qkv_bias=biased, output_bias=biased, q_norm=q_norm, k_norm=k_norm
            ),
            attended_norm=declare.offset_norm(f"{name}.post_attention_layernorm.weight"),
            mlp_norm=declare.offset_norm(f"{name}.pre_feedforward_layernorm.weight"),
            mlp=declare.mlp(f"{name}.mlp"),
            mlp_output_norm=declare.offset_norm(f"{name}.post_feedforward_layernorm.weight"),
        )

    return declare.decoder(layer, declare.offset_norm("model.norm.weight"))


def embed(model: LaidOutModel[Config], params: Params, batch: TokenBatch) -> Float[Array, "tokens dim"]:
    """Return the embeddings of the batch's tokens, multiplied by the root of the width rounded to their dtype."""
    x = embedding.embed(batch.tokens, params.embedding)
    return x * jnp.asarray(model.config.hidden_size**0.5, x.dtype)


def layers(
    model: LaidOutModel[Config], params: Params, x: Float[Array, "tokens dim"], batch: TokenBatch, backend: Backend
) -> ApplyLayer:
    """Return the function that applies a layer."""
    config = model.config
    full, local = (model.rotation(batch, rope) for rope in (config.rope, config.local_rope))
    return layer_function(
        model,
        batch,
        backend,
        [full if window is None else local for window in config.windows],
        scale=config.attention_scale,
        soft_cap=config.score_cap,
        activation=ACTIVATION,
    )


def head(
    model: LaidOutModel[Config],
    params: Params,
    hidden: Float[Array, "rows dim"],
    num_rows: Int[Array, ""] | None = None,
) -> Float[Array, "rows vocab_shard"]:
    """Return the logits of hidden states, in float32: of the first `num_rows` only, if it is given."""
    cap = model.config.logit_cap
    change = None if cap is None else lambda x: cap * jnp.tanh(x / cap)
    return embedding.logits(hidden, params.head, num_rows, change=change)
