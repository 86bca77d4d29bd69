"""OLMoE: one norm covers all query heads of a token, one all KV heads; weights of experts don't add up to one."""

from __future__ import annotations

from jaxserve.model_source.fields import NORM_EPSILON, Fields
from jaxserve.models.mixtures import common
from jaxserve.models.read_fields import read_experts, read_sizes, refuse
from jaxserve.models.rope import read_rope
from pallas_kernels.expert_routing import Routing

abstract, embed, layers, head = common.abstract, common.embed, common.layers, common.head


def parse(fields: Fields) -> common.Config:
    """Read a config.json. Raises `ConfigError`."""
    sizes = read_sizes(fields, max_position_embeddings=4096)
    refuse(fields, hidden_act="silu", clip_qkv=None)
    experts, choices = read_experts(fields, "num_experts", "num_experts_per_tok", default=(64, 8))
    biased = fields.boolean("attention_bias", False)
    return common.Config(
        **sizes,
        norm_eps=fields.number("rms_norm_eps", NORM_EPSILON, 1e-5),
        rope=read_rope(fields, sizes["max_position_embeddings"], sizes["head_dim"]),
        windows=(None,) * sizes["num_layers"],
        routing=Routing(choices, renormalize=fields.boolean("norm_topk_prob", False)),
        experts=experts,
        expert_width=sizes["intermediate_size"],
        dense=(False,) * sizes["num_layers"],
        names=common.Names(),
        qkv_bias=biased,
        output_bias=biased,
        qk_norm="all_heads",
    )
