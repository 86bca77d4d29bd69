"""MiniMax-M2: experts chosen by corrected sigmoids, norms over all heads of a token, a part of each head rotated."""

from __future__ import annotations

from jaxserve.errors import ConfigError
from jaxserve.model_source.fields import HEAD_DIM, NORM_EPSILON, Fields, Range
from jaxserve.models.mixtures import common
from jaxserve.models.read_fields import DRAFTS, read_experts, read_sizes, refuse, unused_layers
from jaxserve.models.rope import read_rope
from pallas_kernels.expert_routing import Routing

abstract, embed, layers, head = common.abstract, common.embed, common.layers, common.head

_NAMES = common.Names(block="block_sparse_moe", correction="e_score_correction_bias", projections=("w1", "w3", "w2"))
# Fields of other models of the maker, or of layers that draft several tokens at once
_UNUSED = (
    "layernorm_full_attention_beta", "layernorm_linear_attention_beta", "layernorm_mlp_beta", "mlp_intermediate_size",
    "mtp_transformer_layers", "shared_moe_mode", "use_mtp",
)  # fmt: skip


def parse(fields: Fields) -> common.Config:
    """Read a config.json. Raises `ConfigError`."""
    sizes = read_sizes(fields, num_key_value_heads=8, head_dim=128, max_position_embeddings=196608)
    refuse(fields, hidden_act="silu", use_qk_norm=True, qk_norm_type="per_layer", scoring_func="sigmoid")
    refuse(fields, use_routing_bias=True, shared_intermediate_size=0, sliding_window=None)
    if any(kind != 1 for kind in fields.numbers("attn_type_list", Range(0, 1))):
        raise ConfigError(f"{fields.where}: attn_type_list with others than 1 is not supported: linear attention")
    for name in _UNUSED:
        fields.get(name)
    drafts = fields.integer("num_mtp_modules", DRAFTS, 0)
    layers, head_dim = sizes["num_layers"], sizes["head_dim"]
    experts, choices = read_experts(fields, "num_local_experts", "num_experts_per_tok", default=(256, 8))
    rotated = fields.integer("rotary_dim", Range(HEAD_DIM.least, head_dim), head_dim)
    return common.Config(
        **sizes,
        norm_eps=fields.number("rms_norm_eps", NORM_EPSILON, 1e-6),
        rope=read_rope(fields, sizes["max_position_embeddings"], head_dim, theta=5e6, fraction=rotated / head_dim),
        windows=(None,) * layers,
        routing=Routing(choices, "sigmoid", renormalize=True),
        experts=experts,
        expert_width=sizes["intermediate_size"],
        dense=(False,) * layers,
        names=_NAMES,
        qk_norm="all_heads",
        unused=("model.mtp.", *unused_layers(layers, drafts)),
    )
