"""NomicBERT: rotary positions, gated blocks without biases, a norm after each block.

The names of its tensors are those of Nomic AI, which transformers writes, too. Its config has their form or Nomic's.
"""

from __future__ import annotations

import dataclasses

import numpy as np
from jaxtyping import Array, Float

from jaxserve.errors import ConfigError
from jaxserve.layers.batch import TokenBatch
from jaxserve.model_source.fields import CONTEXT, NORM_EPSILON, ROPE_FACTOR, Fields
from jaxserve.models.decoder import ApplyLayer
from jaxserve.models.encoders import common
from jaxserve.models.encoders.bert import TYPES, UNUSED
from jaxserve.models.encoders.common import Config, LayerParams, Params, refuse_decoder
from jaxserve.models.layout import LaidOutModel
from jaxserve.models.parameters import ParamSpecs
from jaxserve.models.read_fields import read_sizes, refuse
from jaxserve.models.rope import read_rope
from pallas_kernels.dispatch import Backend

embed = common.embed

_FIELDS = {
    "n_embd": "hidden_size",
    "n_inner": "intermediate_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "layer_norm_epsilon": "layer_norm_eps",
    "rotary_emb_base": "rope_theta",
}
_OTHER_FIELDS = (
    "attn_pdrop", "fused_bias_fc", "pad_vocab_size_multiple", "parallel_block_tied_norm", "reorder_and_upcast_attn",
    "use_flash_attn",
)  # fmt: skip
_NAMES = ("", "", "", "out_proj")


def parse(fields: Fields) -> Config:
    """Read a config.json. Raises `ConfigError`."""
    if fields.get("num_experts") or fields.get("moe_every_n_layers"):
        raise ConfigError(f"{fields.where}: NomicBERT with a mixture of experts (num_experts) is not supported yet")
    fields = fields.renamed(_FIELDS)
    trained = fields.integer("n_positions", CONTEXT, 2048)
    trained = min(trained, fields.integer("max_trained_positions", CONTEXT, trained))
    sizes = read_sizes(fields, max_position_embeddings=trained, tie_word_embeddings=True)
    refuse_decoder(fields)
    refuse(
        fields,
        activation_function="swiglu",
        hidden_act="silu",
        mlp_fc1_bias=False,
        mlp_fc2_bias=False,
        qkv_proj_bias=False,
        parallel_block=False,
        prenorm=False,
        rotary_emb_fraction=1.0,
        rotary_emb_interleaved=False,
        rotary_emb_scale_base=None,
        scale_attn_by_inverse_layer_idx=False,
        scale_attn_weights=True,
        use_rms_norm=False,
        causal=False,
    )
    for name in _OTHER_FIELDS:
        fields.get(name)
    rope = read_rope(fields, sizes["max_position_embeddings"], sizes["head_dim"], theta=1000.0)
    if fields.get("rotary_scaling_factor") is not None:
        factor = fields.number("rotary_scaling_factor", ROPE_FACTOR)
        rope = dataclasses.replace(rope, kind="dynamic", factor=factor)
    return Config(
        **sizes,
        norm_eps=fields.number("layer_norm_eps", NORM_EPSILON, 1e-12),
        rope=rope,
        windows=(None,) * sizes["num_layers"],
        activation="silu",
        token_types=fields.integer("type_vocab_size", TYPES, 2),
    )


def abstract(model: LaidOutModel[Config], dtype: np.dtype) -> Params:
    """Return the tree of parameters; each leaf is a `ParamSpec`."""
    config = model.config
    declare = ParamSpecs(model, dtype)

    def layer(name: str) -> LayerParams:
        return LayerParams(
            declare.attention(f"{name}.attn", config.rope, fused="Wqkv", names=_NAMES),
            declare.layer_norm(f"{name}.norm1", bias=True),
            declare.mlp(f"{name}.mlp", "fc12", "fc11", down="fc2"),
            declare.layer_norm(f"{name}.norm2", bias=True),
        )

    return common.declare_encoder(declare, config, "encoder.layers", layer, unused=UNUSED, embedding_norm="emb_ln")


def layers(
    model: LaidOutModel[Config], params: Params, x: Float[Array, "tokens dim"], batch: TokenBatch, backend: Backend
) -> ApplyLayer:
    """Return the function that applies a layer."""
    return common.post_norm_layers(model, batch, backend, model.rotation(batch))
