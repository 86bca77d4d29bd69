"""Mixtral: Mistral's layers with a mixture; the weights of chosen experts add up to one."""

from __future__ import annotations

from jaxserve.model_source.fields import NORM_EPSILON, Fields
from jaxserve.models.mixtures import common
from jaxserve.models.read_fields import read_experts, read_one_window, read_sizes, refuse
from jaxserve.models.rope import read_rope
from pallas_kernels.expert_routing import Routing

abstract, embed, layers, head = common.abstract, common.embed, common.layers, common.head

_NAMES = common.Names(block="block_sparse_moe", projections=("w1", "w3", "w2"))


def parse(fields: Fields) -> common.Config:
    """Read a config.json. Raises `ConfigError`."""
    sizes = read_sizes(fields, num_key_value_heads=8, max_position_embeddings=131072)
    refuse(fields, hidden_act="silu")
    experts, choices = read_experts(fields, "num_local_experts", "num_experts_per_tok", default=(8, 2))
    return common.Config(
        **sizes,
        norm_eps=fields.number("rms_norm_eps", NORM_EPSILON, 1e-5),
        rope=read_rope(fields, sizes["max_position_embeddings"], sizes["head_dim"], theta=1e6),
        windows=read_one_window(fields, sizes["num_layers"]),
        routing=Routing(choices, renormalize=True),
        experts=experts,
        expert_width=sizes["intermediate_size"],
        dense=(False,) * sizes["num_layers"],
        names=_NAMES,
    )
