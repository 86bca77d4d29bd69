"""DeepSeek-V2, V3, R1 and Kimi-K2: latent attention, shared experts, experts chosen by groups, dense first layers."""

from __future__ import annotations

import math

from jaxserve.errors import ConfigError
from jaxserve.layers.rope import RopeConfig
from jaxserve.model_source.fields import EXPERTS, HEAD_DIM, LAYERS, NON_NEGATIVE, NORM_EPSILON, WIDTH, Fields, Range
from jaxserve.models.config import LatentSizes
from jaxserve.models.mixtures import common
from jaxserve.models.read_fields import DRAFTS, read_experts, read_sizes, refuse, unused_layers
from jaxserve.models.rope import read_rope
from pallas_kernels.expert_routing import Routing

abstract, embed, layers, head = common.abstract, common.embed, common.layers, common.head

_NAMES = common.Names(correction="gate.e_score_correction_bias")


def parse(fields: Fields) -> common.Config:
    """Read a config.json. Raises `ConfigError`."""
    sizes = read_sizes(fields, head_dim=64, max_position_embeddings=4096)
    refuse(fields, hidden_act="silu", attention_bias=False, moe_layer_freq=1)
    latent = _latent(fields)
    num_layers = sizes["num_layers"]
    experts, choices = read_experts(fields, "n_routed_experts", "num_experts_per_tok", default=(256, 8))
    groups = fields.integer("n_group", EXPERTS, 8)
    best = fields.integer("topk_group", EXPERTS, 4)
    if experts % groups or best > groups or best * (experts // groups) < choices:
        raise ConfigError(
            f"{fields.where}: n_group={groups} and topk_group={best} don't fit {experts} experts of which a token "
            f"chooses {choices}"
        )
    width = fields.integer("moe_intermediate_size", WIDTH, 2048)
    dense = fields.integer("first_k_dense_replace", Range(0, LAYERS.most), 3)
    drafts = fields.integer("num_nextn_predict_layers", DRAFTS, 0)
    rope = read_rope(
        fields,
        sizes["max_position_embeddings"],
        latent.qk_rope_head_dim,
        interleaved=fields.boolean("rope_interleave", True),
    )
    sizes["num_kv_heads"], sizes["head_dim"] = 1, latent.qk_rope_head_dim
    return common.Config(
        **sizes,
        norm_eps=fields.number("rms_norm_eps", NORM_EPSILON, 1e-6),
        rope=rope,
        windows=(None,) * num_layers,
        latent=latent,
        attention_scale=_attention_scale(latent, rope),
        routing=Routing(
            choices,
            "sigmoid",
            renormalize=fields.boolean("norm_topk_prob", True),
            scale=fields.number("routed_scaling_factor", NON_NEGATIVE, 2.5),
            groups=groups,
            groups_chosen=best,
        ),
        experts=experts,
        expert_width=width,
        dense=tuple(i < dense for i in range(num_layers)),
        names=_NAMES,
        shared_size=width * fields.integer("n_shared_experts", Range(0, 64), 1),
        unused=unused_layers(num_layers, drafts),
        draft_layers=drafts,
    )


def _latent(fields: Fields) -> LatentSizes:
    low_rank = None if fields.get("q_lora_rank") is None else fields.integer("q_lora_rank", WIDTH)
    return LatentSizes(
        low_rank,
        fields.integer("kv_lora_rank", WIDTH, 512),
        fields.integer("qk_nope_head_dim", HEAD_DIM, 128),
        fields.integer("qk_rope_head_dim", HEAD_DIM, 64),
        fields.integer("v_head_dim", HEAD_DIM, 128),
    )


def _attention_scale(latent: LatentSizes, rope: RopeConfig) -> float:
    """Return the factor of logits: yarn's multiplies queries and keys alike, so it is squared."""
    scale = latent.query**-0.5
    if rope.kind == "default" or not rope.mscale_all_dim or rope.factor <= 1:
        return scale
    return scale * (0.1 * rope.mscale_all_dim * math.log(rope.factor) + 1.0) ** 2
