"""GLM-4: half of each head rotated, biases on queries, keys and values; the 0414 models also norm what layers add."""

from __future__ import annotations

import dataclasses
from typing import Any

import flax.struct
import numpy as np
from jaxtyping import Array

from jaxserve.layers.attention import AttentionParams
from jaxserve.layers.mlp import MlpParams
from jaxserve.model_source.fields import NORM_EPSILON, Fields
from jaxserve.models import llama
from jaxserve.models.config import ModelConfig
from jaxserve.models.layout import LaidOutModel
from jaxserve.models.parameters import Params, ParamSpecs
from jaxserve.models.read_fields import read_sizes, refuse
from jaxserve.models.rope import read_rope

embed, layers, head = llama.embed, llama.layers, llama.head


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(ModelConfig):
    """The config of the family."""

    qkv_bias: bool
    post_norms: bool


@flax.struct.dataclass
class LayerParams:
    """The weights of one decoder layer; the norms of the outputs of its blocks are None if a model has none."""

    attention_norm: Array
    attention: AttentionParams
    attention_output_norm: Array | None
    mlp_norm: Array
    mlp: MlpParams
    mlp_output_norm: Array | None

    @property
    def attended_norm(self) -> Array | None:
        """The norm of attention's output, by the name that other families have for it."""
        return self.attention_output_norm


def parse(fields: Fields) -> Config:
    """Read a config.json. Raises `ConfigError`."""
    sizes = read_sizes(fields, num_key_value_heads=2, head_dim=128, max_position_embeddings=131072)
    refuse(fields, hidden_act="silu")
    return Config(
        **sizes,
        norm_eps=fields.number("rms_norm_eps", NORM_EPSILON, 1.5625e-7),
        rope=read_rope(fields, sizes["max_position_embeddings"], sizes["head_dim"], fraction=0.5, interleaved=True),
        qkv_bias=fields.boolean("attention_bias", True),
        post_norms=sizes["architecture"] == "Glm4ForCausalLM",
        windows=(None,) * sizes["num_layers"],
    )


def abstract(model: LaidOutModel[Config], dtype: np.dtype) -> Params:
    """Return the tree of parameters; each leaf is a `ParamSpec`."""
    config = model.config
    declare = ParamSpecs(model, dtype)

    def layer(name: str) -> LayerParams:
        def output_norm(kind: str) -> Any:
            return declare.vector(f"{name}.{kind}.weight") if config.post_norms else None

        return LayerParams(
            attention_norm=declare.vector(f"{name}.input_layernorm.weight"),
            attention=declare.attention(f"{name}.self_attn", config.rope, qkv_bias=config.qkv_bias),
            attention_output_norm=output_norm("post_self_attn_layernorm"),
            mlp_norm=declare.vector(f"{name}.post_attention_layernorm.weight"),
            mlp=declare.mlp(f"{name}.mlp", fused="gate_up_proj"),
            mlp_output_norm=output_norm("post_mlp_layernorm"),
        )

    return declare.decoder(layer)
