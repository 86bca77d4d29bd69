"""GTE, Alibaba's encoders ("NewModel"): rotary positions, gated blocks, a norm after each block."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from jaxserve.layers.rope import RopeConfig
from jaxserve.model_source.fields import NORM_EPSILON, ROPE_FACTOR, ROPE_THETA, Fields
from jaxserve.models.encoders import common, nomic
from jaxserve.models.encoders.bert import TYPES, UNUSED
from jaxserve.models.encoders.common import Config, LayerParams, Params, read_activation, refuse_decoder
from jaxserve.models.layout import LaidOutModel
from jaxserve.models.parameters import ParamSpecs
from jaxserve.models.read_fields import read_sizes, refuse
from jaxserve.models.rope import read_rope
from jaxserve.params import TensorPart

embed, layers = common.embed, nomic.layers

_THETA = 160_000.0


def parse(fields: Fields) -> Config:
    """Read a config.json. Raises `ConfigError`."""
    sizes = read_sizes(fields, max_position_embeddings=8192, tie_word_embeddings=True)
    refuse_decoder(fields)
    refuse(
        fields,
        layer_norm_type="layer_norm",
        logn_attention_scale=False,
        logn_attention_clip1=False,
        pack_qkv=True,
        position_embedding_type="rope",
    )
    fields.get("use_memory_efficient_attention")
    return Config(
        **sizes,
        norm_eps=fields.number("layer_norm_eps", NORM_EPSILON, 1e-12),
        rope=_read_rope(fields, sizes["max_position_embeddings"], sizes["head_dim"]),
        windows=(None,) * sizes["num_layers"],
        activation=read_activation(fields, "hidden_act"),
        token_types=fields.integer("type_vocab_size", TYPES, 1),
    )


def _read_rope(fields: Fields, max_position: int, head_dim: int) -> RopeConfig:
    """Return the rotation; `ntk` scales the base, and all frequencies so that the lowest is divided by the factor."""
    scaling = Fields(fields.object("rope_scaling"), f"{fields.where}: rope_scaling")
    if scaling.get("type", scaling.get("rope_type")) != "ntk":
        return read_rope(fields, max_position, head_dim, theta=_THETA)
    refuse(scaling, mixed_b=None)
    factor = scaling.number("factor", ROPE_FACTOR)
    theta = fields.number("rope_theta", ROPE_THETA, _THETA)
    return RopeConfig(theta * factor, "linear", factor=factor ** (2 / head_dim), max_position=max_position)


def abstract(model: LaidOutModel[Config], dtype: np.dtype) -> Params:
    """Return the tree of parameters; each leaf is a `ParamSpec`."""
    config = model.config
    declare = ParamSpecs(model, dtype)
    names = ("", "", "", "o_proj")

    def layer(name: str) -> LayerParams:
        return LayerParams(
            declare.attention(
                f"{name}.attention", config.rope, qkv_bias=True, output_bias=True, fused="qkv_proj", names=names
            ),
            declare.layer_norm(f"{name}.attn_ln", bias=True),
            _mlp(declare, config, f"{name}.mlp"),
            declare.layer_norm(f"{name}.mlp_ln", bias=True),
        )

    return common.declare_encoder(declare, config, "encoder.layer", layer, unused=UNUSED)


def _mlp(declare: ParamSpecs, config: Config, name: str) -> Any:
    """Return the weights of a feed-forward block whose tensor has the rows of the gate after the others."""
    found = declare.mlp(name, fused="up_gate_proj")
    width, dim = config.intermediate_size, config.hidden_size
    gate, up = (
        TensorPart(f"{name}.up_gate_proj.weight", (1, width, dim), (i, 0, 0), first_row=width * (1 - i))
        for i in range(2)
    )
    bias = declare.vector(f"{name}.down_proj.bias", init="zeros")
    return dataclasses.replace(found, up=dataclasses.replace(found.up, parts=(gate, up)), down_bias=bias)
