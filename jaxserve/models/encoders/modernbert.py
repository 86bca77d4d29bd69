"""ModernBERT: a norm before each block, rotary positions, gated blocks, and windows on most layers.

Layers with a window rotate by a base of their own. The first layer's attention has no norm before it.
"""

from __future__ import annotations

import dataclasses

import numpy as np
from jaxtyping import Array, Float

from jaxserve.layers.batch import TokenBatch
from jaxserve.layers.rope import RopeConfig
from jaxserve.model_source.fields import CONTEXT, LAYERS, NORM_EPSILON, ROPE_THETA, Fields
from jaxserve.models.decoder import ApplyLayer, LayerParams, layer_function
from jaxserve.models.encoders import common
from jaxserve.models.encoders.common import Params, read_activation, refuse_decoder
from jaxserve.models.layout import LaidOutModel
from jaxserve.models.parameters import ParamSpecs
from jaxserve.models.read_fields import FULL, SLIDING, read_sizes, read_windows
from jaxserve.models.rope import read_rope
from pallas_kernels.dispatch import Backend

embed = common.embed

_UNUSED = ("head.", "decoder.", "classifier.")
# They are for training, for kernels or for heads; one says that positions are absolute, and isn't read there either
_OTHER_FIELDS = (
    "classifier_activation", "classifier_bias", "classifier_pooling", "decoder_bias", "deterministic_flash_attn",
    "initializer_cutoff_factor", "layer_norm_eps", "mlp_dropout", "position_embedding_type", "repad_logits_with_grad",
)  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(common.Config):
    """The config of the family; `local_rope` is that of layers with a window."""

    local_rope: RopeConfig
    attention_bias: bool
    mlp_bias: bool
    norm_bias: bool


def parse(fields: Fields) -> Config:
    """Read a config.json. Raises `ConfigError`."""
    sizes = read_sizes(fields, max_position_embeddings=8192, tie_word_embeddings=True)
    refuse_decoder(fields)
    for name in _OTHER_FIELDS:
        fields.get(name)
    layers, limits = sizes["num_layers"], (sizes["max_position_embeddings"], sizes["head_dim"])
    # A window has as many positions on each side
    window = fields.integer("local_attention", CONTEXT, 128) // 2
    windowed = Fields({"sliding_window": window, "layer_types": fields.get("layer_types")}, fields.where)
    period = fields.integer("global_attn_every_n_layers", LAYERS, 3)
    full, local = (
        read_rope(fields, *limits, theta=fields.number(name, ROPE_THETA, theta), layer_type=kind)
        for name, theta, kind in (("global_rope_theta", 160_000.0, FULL), ("local_rope_theta", 10_000.0, SLIDING))
    )
    return Config(
        **sizes,
        norm_eps=fields.number("norm_eps", NORM_EPSILON, 1e-5),
        rope=full,
        local_rope=local,
        windows=read_windows(windowed, layers, [SLIDING if i % period else FULL for i in range(layers)]),
        activation=read_activation(fields, "hidden_activation"),
        attention_bias=fields.boolean("attention_bias", False),
        mlp_bias=fields.boolean("mlp_bias", False),
        norm_bias=fields.boolean("norm_bias", False),
    )


def abstract(model: LaidOutModel[Config], dtype: np.dtype) -> Params:
    """Return the tree of parameters; each leaf is a `ParamSpec`."""
    config = model.config
    declare = ParamSpecs(model, dtype)
    biased, names = config.attention_bias, ("", "", "", "Wo")

    def layer(name: str, *, first: bool) -> LayerParams:
        return LayerParams(
            attention_norm=None if first else declare.layer_norm(f"{name}.attn_norm", bias=config.norm_bias),
            attention=declare.attention(
                f"{name}.attn", config.rope, qkv_bias=biased, output_bias=biased, fused="Wqkv", names=names
            ),
            attended_norm=None,
            mlp_norm=declare.layer_norm(f"{name}.mlp_norm", bias=config.norm_bias),
            mlp=declare.mlp(f"{name}.mlp", fused="Wi", down="Wo", bias=config.mlp_bias),
            mlp_output_norm=None,
        )

    word = declare.embedding("model.embeddings.tok_embeddings.weight")
    return Params(
        dataclasses.replace(word, unused=_UNUSED),
        tuple(layer(f"model.layers.{i}", first=i == 0) for i in range(config.num_layers)),
        norm=declare.layer_norm("model.final_norm", bias=config.norm_bias),
        output=None,
        embedding_norm=declare.layer_norm("model.embeddings.norm", bias=config.norm_bias),
    )


def layers(
    model: LaidOutModel[Config], params: Params, x: Float[Array, "tokens dim"], batch: TokenBatch, backend: Backend
) -> ApplyLayer:
    """Return the function that applies a layer."""
    config = model.config
    full, local = (model.rotation(batch, rope) for rope in (config.rope, config.local_rope))
    ropes = [full if window is None else local for window in config.windows]
    return layer_function(model, batch, backend, ropes, activation=config.activation)
