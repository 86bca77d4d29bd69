"""Cohere 2 (Command R7B, Command A): attention and MLP side by side, and rotation only in layers with a window."""

from __future__ import annotations

import dataclasses
import functools

import flax.struct
import jax
import numpy as np
from jaxtyping import Array, Float, Int

from jaxserve.layers import embedding
from jaxserve.layers.attention import AttentionParams, AttentionSettings, self_attention
from jaxserve.layers.batch import KVLayer, KVPools, LayerOutput, TokenBatch
from jaxserve.layers.mlp import MlpParams, mlp
from jaxserve.layers.norm import layer_norm
from jaxserve.layers.rope import Rotation
from jaxserve.model_source.fields import LAYERS, NORM_EPSILON, POSITIVE, Fields
from jaxserve.models import llama
from jaxserve.models.config import ModelConfig
from jaxserve.models.decoder import ApplyLayer, layer_function
from jaxserve.models.layout import LaidOutModel
from jaxserve.models.parameters import LayerNormParams, Params, ParamSpecs
from jaxserve.models.read_fields import periodic_layer_types, read_sizes, read_windows, refuse
from jaxserve.models.rope import read_rope
from pallas_kernels.paged_attention import Backend

embed = llama.embed

_WINDOW = 4096


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(ModelConfig):
    """The config of the family."""

    attention_bias: bool
    logit_scale: float


@flax.struct.dataclass
class LayerParams:
    """The weights of one decoder layer."""

    norm: LayerNormParams
    attention: AttentionParams
    mlp: MlpParams


def parse(fields: Fields) -> Config:
    """Read a config.json. Raises `ConfigError`."""
    sizes = read_sizes(fields, max_position_embeddings=8192, tie_word_embeddings=True)
    period = fields.integer("sliding_window_pattern", LAYERS, 4)
    if fields.raw.get("sliding_window", _WINDOW) is None:
        raise fields.error("sliding_window", "a number of tokens")
    # Fields of Cohere's own: one value of each is supported here, and Hugging Face's code reads none of them
    refuse(
        fields,
        hidden_act="silu",
        layer_switch=period,
        order_of_interleaved_layers="local_attn_first",
        position_embedding_type="rope_gptj",
        rotary_pct=1.0,
        use_embedding_sharing=sizes["tie_word_embeddings"],
        use_gated_activation=True,
        use_parallel_block=True,
        use_qk_norm=False,
    )
    fields.boolean("use_parallel_embedding", True)  # It says how a table was split in training
    return Config(
        **sizes,
        norm_eps=fields.number("layer_norm_eps", NORM_EPSILON, 1e-5),
        rope=read_rope(fields, sizes["max_position_embeddings"], sizes["head_dim"], interleaved=True),
        attention_bias=fields.boolean("attention_bias", False),
        logit_scale=fields.number("logit_scale", POSITIVE, 0.0625),
        windows=read_windows(fields, sizes["num_layers"], periodic_layer_types(period, sizes["num_layers"]), _WINDOW),
    )


def abstract(model: LaidOutModel[Config], dtype: np.dtype) -> Params:
    """Return the tree of parameters; each leaf is a `ParamSpec`."""
    config = model.config
    declare = ParamSpecs(model, dtype)
    biased = config.attention_bias

    def layer(name: str) -> LayerParams:
        return LayerParams(
            norm=declare.layer_norm(f"{name}.input_layernorm", bias=False),
            attention=declare.attention(f"{name}.self_attn", config.rope, qkv_bias=biased, output_bias=biased),
            mlp=declare.mlp(f"{name}.mlp"),
        )

    return declare.decoder(layer, declare.layer_norm("model.norm", bias=False))


def layers(
    model: LaidOutModel[Config], params: Params, x: Float[Array, "tokens dim"], batch: TokenBatch, backend: Backend
) -> ApplyLayer:
    """Return the function that applies a layer."""
    rope = model.rotation(batch)
    ropes = [None if window is None else rope for window in model.config.windows]
    return layer_function(model, batch, backend, ropes, layer=_layer)


@functools.partial(jax.jit, static_argnames="settings")
def _layer(
    x: Float[Array, "tokens dim"],
    params: LayerParams,
    batch: TokenBatch,
    kv: KVPools,
    at: KVLayer,
    rope: Rotation | None,
    settings: AttentionSettings,
) -> LayerOutput:
    """Apply one decoder layer. It is jitted, so that all layers are traced once; the compiler inlines it."""
    normed = layer_norm(x, params.norm.weight, None, settings.norm_eps)
    attended, kv = self_attention(normed, params.attention, batch, kv, at, rope, settings)
    return LayerOutput(x + attended + mlp(normed, params.mlp), kv)


def head(
    model: LaidOutModel[Config],
    params: Params,
    hidden: Float[Array, "rows dim"],
    num_rows: Int[Array, ""] | None = None,
) -> Float[Array, "rows vocab_shard"]:
    """Return the logits of hidden states, in float32: of the first `num_rows` only, if it is given."""
    return embedding.logits(hidden, params.head, num_rows, change=lambda x: model.config.logit_scale * x)
