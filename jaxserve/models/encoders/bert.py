"""BERT, RoBERTa, XLM-RoBERTa, CamemBERT and DistilBERT: learned positions, biases, a norm after each block.

RoBERTa's positions begin after the row of the padding token. DistilBERT has no token types.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from jaxserve.errors import ConfigError
from jaxserve.layers.rope import RopeConfig
from jaxserve.model_source.fields import NORM_EPSILON, TOKEN_ID, Fields, Range
from jaxserve.models.encoders import common
from jaxserve.models.encoders.common import Config, LayerParams, Params, read_activation, refuse_decoder
from jaxserve.models.layout import LaidOutModel
from jaxserve.models.parameters import ParamSpecs
from jaxserve.models.read_fields import read_sizes, refuse

embed, layers = common.embed, common.layers

TYPES = Range(0, 1024)
_DISTIL = "DistilBertModel"
_AS_ROBERTA = ("CamembertModel", "RobertaModel", "XLMRobertaModel")
_DISTIL_FIELDS = {
    "dim": "hidden_size",
    "hidden_dim": "intermediate_size",
    "n_heads": "num_attention_heads",
    "n_layers": "num_hidden_layers",
    "activation": "hidden_act",
}
# Multilingual BERT says so much of the layer after its last one, of which the weights decide
_OF_POOLER = ("fc_size", "num_attention_heads", "num_fc_layers", "size_per_head", "type")


class _LayerNames(NamedTuple):
    """The names of a layer's tensors, under that of the layer: of attention's queries, keys, values and outputs, and of
    the norm after them; of the feed-forward block, and of the norm after it. `layer` is where they are."""

    layer: str
    attention: tuple[str, str, str, str]
    attention_norm: str
    mlp: tuple[str, str]
    mlp_norm: str


_BERT_NAMES = _LayerNames(
    "encoder.layer",
    ("attention.self.query", "attention.self.key", "attention.self.value", "attention.output.dense"),
    "attention.output.LayerNorm",
    ("intermediate.dense", "output.dense"),
    "output.LayerNorm",
)
_DISTIL_NAMES = _LayerNames(
    "transformer.layer",
    ("attention.q_lin", "attention.k_lin", "attention.v_lin", "attention.out_lin"),
    "sa_layer_norm",
    ("ffn.lin1", "ffn.lin2"),
    "output_layer_norm",
)
UNUSED = (
    "pooler.", "classifier.", "pre_classifier.", "cls.", "lm_head.", "linear.", "embeddings.position_ids",
    "vocab_transform.", "vocab_layer_norm.", "vocab_projector.",
)  # fmt: skip
"""What checkpoints have besides layers: heads, and the numbers of positions."""


def parse(fields: Fields) -> Config:
    """Read a config.json. Raises `ConfigError`."""
    architecture = (fields.texts("architectures") or [""])[0]
    if architecture == _DISTIL:
        fields.get("sinusoidal_pos_embds")  # They are stored as if they were learned
        fields = fields.renamed(_DISTIL_FIELDS, type_vocab_size=0, layer_norm_eps=1e-12)
    sizes = read_sizes(fields, max_position_embeddings=512, tie_word_embeddings=True)
    refuse(fields, position_embedding_type="absolute")
    refuse_decoder(fields)
    for name in _OF_POOLER:
        fields.get(f"pooler_{name}")
    rows = sizes["max_position_embeddings"]
    offset = fields.integer("pad_token_id", TOKEN_ID, 1) + 1 if architecture in _AS_ROBERTA else 0
    if offset >= rows:
        raise ConfigError(
            f"{fields.where}: positions begin at pad_token_id + 1 = {offset}, but max_position_embeddings is {rows}"
        )
    sizes["max_position_embeddings"] = rows - offset
    return Config(
        **sizes,
        norm_eps=fields.number("layer_norm_eps", NORM_EPSILON, 1e-12),
        rope=RopeConfig(),
        windows=(None,) * sizes["num_layers"],
        activation=read_activation(fields, "hidden_act"),
        position_rows=rows,
        position_offset=offset,
        token_types=fields.integer("type_vocab_size", TYPES, 2),
    )


def abstract(model: LaidOutModel[Config], dtype: np.dtype) -> Params:
    """Return the tree of parameters; each leaf is a `ParamSpec`."""
    config = model.config
    declare = ParamSpecs(model, dtype)
    names = _DISTIL_NAMES if config.architecture == _DISTIL else _BERT_NAMES

    def layer(name: str) -> LayerParams:
        up, down = names.mlp
        return LayerParams(
            declare.attention(name, config.rope, qkv_bias=True, output_bias=True, names=names.attention),
            declare.layer_norm(f"{name}.{names.attention_norm}", bias=True),
            declare.mlp(name, up, down=down, bias=True),
            declare.layer_norm(f"{name}.{names.mlp_norm}", bias=True),
        )

    return common.declare_encoder(declare, config, names.layer, layer, unused=UNUSED)
