"""StarCoder2: layer norms, biases on all projections, a feed-forward block without a gate, windows."""

from __future__ import annotations

import dataclasses

import numpy as np
from jaxtyping import Array, Float

from jaxserve.layers.batch import TokenBatch
from jaxserve.model_source.fields import NORM_EPSILON, Fields
from jaxserve.models import llama
from jaxserve.models.config import ModelConfig
from jaxserve.models.decoder import ApplyLayer, LayerParams, layer_function
from jaxserve.models.layout import LaidOutModel
from jaxserve.models.parameters import Params, ParamSpecs
from jaxserve.models.read_fields import read_one_window, read_sizes, refuse
from jaxserve.models.rope import read_rope
from pallas_kernels.paged_attention import Backend

embed, head = llama.embed, llama.head

_ACTIVATION = "gelu_pytorch_tanh"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(ModelConfig):
    """The config of the family."""

    bias: bool


def parse(fields: Fields) -> Config:
    """Read a config.json. Raises `ConfigError`."""
    sizes = read_sizes(fields, num_key_value_heads=2, max_position_embeddings=4096, tie_word_embeddings=True)
    norm_eps = fields.number("norm_epsilon", NORM_EPSILON, 1e-5)
    refuse(
        fields,
        hidden_act=_ACTIVATION,
        mlp_type="default",
        norm_type="layer_norm",
        layer_norm_epsilon=norm_eps,
        attention_softmax_in_fp32=True,
        scale_attention_softmax_in_fp32=True,
        scale_attn_weights=True,
    )
    return Config(
        **sizes,
        norm_eps=norm_eps,
        rope=read_rope(fields, sizes["max_position_embeddings"], sizes["head_dim"]),
        bias=fields.boolean("use_bias", True),
        windows=read_one_window(fields, sizes["num_layers"]),
    )


def abstract(model: LaidOutModel[Config], dtype: np.dtype) -> Params:
    """Return the tree of parameters; each leaf is a `ParamSpec`."""
    config = model.config
    declare = ParamSpecs(model, dtype)

    def layer(name: str) -> LayerParams:
        return LayerParams(
            attention_norm=declare.layer_norm(f"{name}.input_layernorm", bias=True),
            attention=declare.attention(
                f"{name}.self_attn", config.rope, qkv_bias=config.bias, output_bias=config.bias
            ),
            attended_norm=None,
            mlp_norm=declare.layer_norm(f"{name}.post_attention_layernorm", bias=True),
            mlp=declare.mlp(f"{name}.mlp", "c_fc", down="c_proj", bias=config.bias),
            mlp_output_norm=None,
        )

    return declare.decoder(layer, declare.layer_norm("model.norm", bias=True))


def layers(
    model: LaidOutModel[Config], params: Params, x: Float[Array, "tokens dim"], batch: TokenBatch, backend: Backend
) -> ApplyLayer:
    """Return the function that applies a layer."""
    return layer_function(model, batch, backend, activation=_ACTIVATION)
