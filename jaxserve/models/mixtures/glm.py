"""GLM-4.5 and 4.6: experts chosen by corrected sigmoids and by groups, a shared expert, dense first layers."""

from __future__ import annotations

from jaxserve.errors import ConfigError
from jaxserve.model_source.fields import EXPERTS, LAYERS, NON_NEGATIVE, NORM_EPSILON, WIDTH, Fields, Range
from jaxserve.models.mixtures import common
from jaxserve.models.read_fields import DRAFTS, read_experts, read_sizes, refuse, unused_layers
from jaxserve.models.rope import read_rope
from pallas_kernels.expert_routing import Routing

abstract, embed, layers, head = common.abstract, common.embed, common.layers, common.head

_NAMES = common.Names(correction="gate.e_score_correction_bias")
_DRAFTS = ("num_nextn_predict_layers", "num_mtp_layers")


def parse(fields: Fields) -> common.Config:
    """Read a config.json. Raises `ConfigError`."""
    sizes = read_sizes(fields, num_key_value_heads=8, max_position_embeddings=131072)
    refuse(fields, hidden_act="silu")
    layers = sizes["num_layers"]
    experts, choices = read_experts(fields, "n_routed_experts", "num_experts_per_tok", default=(128, 8))
    groups = fields.integer("n_group", EXPERTS, 1)
    best = fields.integer("topk_group", EXPERTS, 1)
    if experts % groups or best > groups or best * (experts // groups) < choices:
        raise ConfigError(
            f"{fields.where}: n_group={groups} and topk_group={best} don't fit {experts} experts of which a token "
            f"chooses {choices}"
        )
    width = fields.integer("moe_intermediate_size", WIDTH, 1408)
    dense = fields.integer("first_k_dense_replace", Range(0, LAYERS.most), 1)
    drafts = max(fields.integer(name, DRAFTS, 0) for name in _DRAFTS)
    return common.Config(
        **sizes,
        norm_eps=fields.number("rms_norm_eps", NORM_EPSILON, 1e-5),
        rope=read_rope(fields, sizes["max_position_embeddings"], sizes["head_dim"], fraction=0.5),
        windows=(None,) * layers,
        routing=Routing(
            choices,
            "sigmoid",
            renormalize=fields.boolean("norm_topk_prob", True),
            scale=fields.number("routed_scaling_factor", NON_NEGATIVE, 1.0),
            groups=groups,
            groups_chosen=best,
        ),
        experts=experts,
        expert_width=width,
        dense=tuple(i < dense for i in range(layers)),
        names=_NAMES,
        qkv_bias=fields.boolean("attention_bias", False),
        qk_norm="head" if fields.boolean("use_qk_norm", False) else "none",
        shared_size=width * fields.integer("n_shared_experts", Range(0, 64), 1),
        unused=unused_layers(layers, drafts),
        draft_layers=drafts,
    )
