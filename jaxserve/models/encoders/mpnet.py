"""MPNet: BERT's layers, and a bias of attention by the distance of tokens (Raffel et al. 2020, section 2.1)."""

from __future__ import annotations

import math

import numpy as np
from jaxtyping import Array, Float

from jaxserve.layers.batch import TokenBatch
from jaxserve.layers.rope import RopeConfig
from jaxserve.model_source.fields import NORM_EPSILON, Fields
from jaxserve.models.decoder import ApplyLayer
from jaxserve.models.encoders import common
from jaxserve.models.encoders.bert import UNUSED
from jaxserve.models.encoders.common import Config, LayerParams, Params, read_activation, refuse_decoder
from jaxserve.models.layout import LaidOutModel
from jaxserve.models.parameters import ParamSpecs
from jaxserve.models.read_fields import read_sizes, refuse
from pallas_kernels.dispatch import Backend

embed = common.embed

_OFFSET = 2
_RANGES, _FAR = 32, 128


def parse(fields: Fields) -> Config:
    """Read a config.json. Raises `ConfigError`."""
    sizes = read_sizes(fields, max_position_embeddings=512, tie_word_embeddings=True)
    refuse(fields, relative_attention_num_buckets=_RANGES)
    refuse_decoder(fields)
    rows = sizes["max_position_embeddings"]
    sizes["max_position_embeddings"] = rows - _OFFSET
    return Config(
        **sizes,
        norm_eps=fields.number("layer_norm_eps", NORM_EPSILON, 1e-12),
        rope=RopeConfig(),
        windows=(None,) * sizes["num_layers"],
        activation=read_activation(fields, "hidden_act"),
        position_rows=rows,
        position_offset=_OFFSET,
    )


def abstract(model: LaidOutModel[Config], dtype: np.dtype) -> Params:
    """Return the tree of parameters; each leaf is a `ParamSpec`."""
    config = model.config
    declare = ParamSpecs(model, dtype)
    names = ("attn.q", "attn.k", "attn.v", "attn.o")

    def layer(name: str) -> LayerParams:
        return LayerParams(
            declare.attention(f"{name}.attention", config.rope, qkv_bias=True, output_bias=True, names=names),
            declare.layer_norm(f"{name}.attention.LayerNorm", bias=True),
            declare.mlp(name, "intermediate.dense", down="output.dense", bias=True),
            declare.layer_norm(f"{name}.output.LayerNorm", bias=True),
        )

    bias = declare.wide(declare.table("encoder.relative_attention_bias.weight", _RANGES, config.num_heads))
    return common.declare_encoder(declare, config, "encoder.layer", layer, unused=UNUSED, distance_bias=bias)


def layers(
    model: LaidOutModel[Config], params: Params, x: Float[Array, "tokens dim"], batch: TokenBatch, backend: Backend
) -> ApplyLayer:
    """Return the function that applies a layer."""
    assert params.distance_bias is not None
    bias = params.distance_bias[ranges_of_distances()].T
    return common.post_norm_layers(model, batch, backend, None, bias)


def ranges_of_distances() -> np.ndarray:
    """Return the range of each distance of a key from its query, from `-_FAR` to `_FAR`.

    Small distances have one of their own; larger ones share ranges whose widths grow with the distance.
    """
    distance = np.arange(-_FAR, _FAR + 1)
    half, size = _RANGES // 2, np.abs(distance)
    exact = half // 2
    growth = np.log(np.maximum(size, 1).astype(np.float32) / np.float32(exact)) / np.float32(math.log(_FAR / exact))
    shared = exact + (growth * np.float32(half - exact)).astype(np.int32)
    found = np.where(size < exact, size, np.minimum(shared, half - 1))
    return np.where(distance > 0, half, 0) + found
