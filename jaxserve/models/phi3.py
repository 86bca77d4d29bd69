"""Phi-3, 3.5 and 4: a Llama whose projections are stored fused, with LongRoPE, partial rotation and windows."""

from __future__ import annotations

import dataclasses

import numpy as np

from jaxserve.errors import ConfigError
from jaxserve.layers.rope import RopeConfig
from jaxserve.model_source.fields import NORM_EPSILON, Fields
from jaxserve.models import llama
from jaxserve.models.config import ModelConfig, read_one_window, read_sizes, refuse
from jaxserve.models.parameters import Params, ParamSpecs
from jaxserve.models.rope import read_rope

embed, forward, head = llama.embed, llama.forward, llama.head


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(ModelConfig):
    """The config of the family."""

    norm_eps: float
    rope: RopeConfig


def parse(fields: Fields) -> Config:
    """Read a config.json. Raises `ConfigError`."""
    sizes = read_sizes(fields)
    refuse(fields, hidden_act="silu", full_attn_mod=1, interpolate_factor=1)
    rope = read_rope(
        fields,
        sizes["max_position_embeddings"],
        sizes["head_dim"],
        fraction=1.0,
        old_names={"su": "longrope", "yarn": "longrope"},
    )
    if rope.kind not in ("default", "longrope"):
        raise ConfigError(f"{fields.where}: rope_scaling of type {rope.kind!r} is not supported for Phi; longrope is")
    return Config(
        **sizes,
        norm_eps=fields.number("rms_norm_eps", NORM_EPSILON, 1e-5),
        rope=rope,
        windows=read_one_window(fields, sizes["num_layers"]),
    )


def abstract(config: Config, dtype: np.dtype) -> Params:
    """Return the tree of parameters; each leaf is a `ParamSpec`."""
    declare = ParamSpecs(config, dtype)

    def layer(i: int) -> llama.LayerParams:
        name = f"model.layers.{i}"
        return llama.LayerParams(
            attention_norm=declare.vector(f"{name}.input_layernorm.weight"),
            attention=declare.attention(f"{name}.self_attn", config.rope, fused="qkv_proj"),
            mlp_norm=declare.vector(f"{name}.post_attention_layernorm.weight"),
            mlp=declare.mlp(f"{name}.mlp", fused="gate_up_proj"),
        )

    layers = tuple(layer(i) for i in range(config.num_layers))
    return Params(declare.embedding(), layers, declare.vector("model.norm.weight"), declare.head())
