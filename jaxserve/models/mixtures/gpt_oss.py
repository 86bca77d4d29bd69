"""gpt-oss: attention sinks, windows by turns, and experts with biases and a clamped gate, stored in MXFP4."""

from __future__ import annotations

from jaxserve.model_source.fields import NORM_EPSILON, POSITIVE, Fields
from jaxserve.models.mixtures import common
from jaxserve.models.read_fields import FULL, SLIDING, read_experts, read_sizes, read_windows, refuse
from jaxserve.models.rope import read_rope
from pallas_kernels.expert_routing import Routing
from pallas_kernels.grouped_matmul import Gate

abstract, embed, layers, head = common.abstract, common.embed, common.layers, common.head

_DEFAULT_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def parse(fields: Fields) -> common.Config:
    """Read a config.json. Raises `ConfigError`."""
    sizes = read_sizes(fields, num_key_value_heads=8, head_dim=64, max_position_embeddings=131072)
    refuse(fields, hidden_act="silu")
    layers, biased = sizes["num_layers"], fields.boolean("attention_bias", True)
    # Older names of the same fields
    fields.get("experts_per_token")
    fields.get("initial_context_length")
    experts, choices = read_experts(fields, "num_local_experts", "num_experts_per_tok", default=(128, 4))
    fields.get("rope_theta")
    rope = fields
    if not fields.object("rope_parameters") and not fields.object("rope_scaling"):
        rope = Fields({**fields.raw, "rope_parameters": _DEFAULT_ROPE}, fields.where)
    return common.Config(
        **sizes,
        norm_eps=fields.number("rms_norm_eps", NORM_EPSILON, 1e-5),
        rope=read_rope(rope, sizes["max_position_embeddings"], sizes["head_dim"], theta=150_000.0),
        windows=read_windows(fields, layers, [FULL if i % 2 else SLIDING for i in range(layers)], 128),
        routing=Routing(choices, "softmax_of_chosen"),
        experts=experts,
        expert_width=sizes["intermediate_size"],
        dense=(False,) * layers,
        names=common.Names(router="router", projections=None),
        gate=Gate(
            slope=fields.number("swiglu_alpha", POSITIVE, 1.702),
            limit=fields.number("swiglu_limit", POSITIVE, 7.0),
            up_offset=1.0,
        ),
        qkv_bias=biased,
        output_bias=biased,
        sinks=True,
        router_bias=True,
    )
