"""The OLMo family: OLMo 2, and OLMo 3 (windows in three of four layers, and a rotation of its own for these).

Norms follow attention and MLP instead of preceding them, and one norm covers all query heads of a token, one all its
KV heads. Norms multiply by their weights in float32.
"""

from __future__ import annotations

import dataclasses
import functools

import flax.struct
import jax
import numpy as np
from jaxtyping import Array, Float

from jaxserve.errors import ConfigError
from jaxserve.layers.attention import AttentionParams, AttentionSettings, self_attention
from jaxserve.layers.batch import KVLayer, KVPools, LayerOutput, TokenBatch
from jaxserve.layers.mlp import MlpParams, mlp
from jaxserve.layers.norm import rms_norm
from jaxserve.layers.rope import RopeConfig, Rotation
from jaxserve.model_source.fields import NORM_EPSILON, Fields
from jaxserve.models import llama
from jaxserve.models.config import ModelConfig
from jaxserve.models.decoder import ApplyLayer, layer_function
from jaxserve.models.layout import LaidOutModel
from jaxserve.models.parameters import Params, ParamSpecs
from jaxserve.models.read_fields import FULL, SLIDING, periodic_layer_types, read_sizes, read_windows, refuse
from jaxserve.models.rope import read_rope
from pallas_kernels.paged_attention import Backend

embed, head = llama.embed, llama.head

_OLMO3_THETA = 500_000.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(ModelConfig):
    """The config of the family; `sliding_rope` rotates the layers that have a window."""

    sliding_rope: RopeConfig
    bias: bool


@flax.struct.dataclass
class LayerParams:
    """The weights of one decoder layer."""

    attention: AttentionParams
    attention_norm: Array
    mlp: MlpParams
    mlp_norm: Array


def parse(fields: Fields) -> Config:
    """Read a config.json. Raises `ConfigError`."""
    sizes = read_sizes(fields)
    refuse(fields, hidden_act="silu")
    layers = sizes["num_layers"]
    rope_of = functools.partial(read_rope, fields, sizes["max_position_embeddings"], sizes["head_dim"])
    windows: tuple[int | None, ...] = (None,) * layers
    if sizes["architecture"] == "Olmo2ForCausalLM":
        rope = sliding_rope = rope_of()
    else:
        windows = read_windows(fields, layers, periodic_layer_types(4, layers), default_window=4096)
        rope = rope_of(theta=_OLMO3_THETA, layer_type=FULL)
        # Parameters that aren't given by type of layer scale the layers of full attention only.
        by_type = SLIDING in fields.object("rope_parameters")
        if not by_type and rope.theta != _OLMO3_THETA:
            raise ConfigError(
                f"{fields.where}: rope_theta={rope.theta:g} is not supported for OLMo 3, unless rope_parameters has it "
                "for each type of layer: transformers 4 and 5 disagree on the layers it is for"
            )
        sliding_rope = rope_of(theta=_OLMO3_THETA, layer_type=SLIDING) if by_type else RopeConfig(rope.theta)
    return Config(
        **sizes,
        windows=windows,
        norm_eps=fields.number("rms_norm_eps", NORM_EPSILON, 1e-5),
        rope=rope,
        sliding_rope=sliding_rope,
        bias=fields.boolean("attention_bias", False),
    )


def abstract(model: LaidOutModel[Config], dtype: np.dtype) -> Params:
    """Return the tree of parameters; each leaf is a `ParamSpec`."""
    config = model.config
    declare = ParamSpecs(model, dtype)

    def layer(name: str) -> LayerParams:
        return LayerParams(
            attention=declare.attention(
                f"{name}.self_attn",
                config.rope,
                qkv_bias=config.bias,
                output_bias=config.bias,
                q_norm=declare.norm_of_heads(f"{name}.self_attn.q_norm.weight", queries=True, rope=config.rope),
                k_norm=declare.norm_of_heads(f"{name}.self_attn.k_norm.weight", queries=False, rope=config.rope),
            ),
            attention_norm=declare.wide_norm(f"{name}.post_attention_layernorm.weight"),
            mlp=declare.mlp(f"{name}.mlp"),
            mlp_norm=declare.wide_norm(f"{name}.post_feedforward_layernorm.weight"),
        )

    return declare.decoder(layer, declare.wide_norm("model.norm.weight"))


def layers(
    model: LaidOutModel[Config], params: Params, x: Float[Array, "tokens dim"], batch: TokenBatch, backend: Backend
) -> ApplyLayer:
    """Return the function that applies a layer."""
    config = model.config
    full, sliding = (model.rotation(batch, rope) for rope in (config.rope, config.sliding_rope))
    ropes = [full if window is None else sliding for window in config.windows]
    return layer_function(model, batch, backend, ropes, layer=norms_last)


@functools.partial(jax.jit, static_argnames="settings")
def norms_last(
    x: Float[Array, "tokens dim"],
    params: LayerParams,
    batch: TokenBatch,
    kv: KVPools,
    at: KVLayer,
    rope: Rotation | None,
    settings: AttentionSettings,
) -> LayerOutput:
    """Apply a layer whose norms follow its blocks. It is jitted, so that all layers are traced once."""
    attended, kv = self_attention(x, params.attention, batch, kv, at, rope, settings)
    x = x + rms_norm(attended, params.attention_norm, settings.norm_eps)
    return LayerOutput(x + rms_norm(mlp(x, params.mlp), params.mlp_norm, settings.norm_eps), kv)
