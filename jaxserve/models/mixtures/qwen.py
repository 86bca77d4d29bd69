"""Qwen2-MoE (biases, a gated shared expert) and Qwen3-MoE (norms of heads)."""

from __future__ import annotations

from jaxserve.model_source.fields import LAYERS, NORM_EPSILON, WIDTH, Fields, Range
from jaxserve.models.mixtures import common
from jaxserve.models.read_fields import FULL, SLIDING, read_dense, read_experts, read_sizes, read_windows, refuse
from jaxserve.models.rope import read_rope
from pallas_kernels.expert_routing import Routing

abstract, embed, layers, head = common.abstract, common.embed, common.layers, common.head


def parse(fields: Fields) -> common.Config:
    """Read a config.json. Raises `ConfigError`."""
    second = (fields.texts("architectures") or [""])[0] == "Qwen2MoeForCausalLM"
    sizes = read_sizes(fields, intermediate_size=5632 if second else 6144, num_key_value_heads=16 if second else 4)
    refuse(fields, hidden_act="silu")
    layers = sizes["num_layers"]
    # transformers 5.23 writes another name for Qwen3's
    count = "num_local_experts" if fields.raw.get("num_local_experts") is not None else "num_experts"
    experts, choices = read_experts(fields, count, "num_experts_per_tok", default=(60, 4) if second else (128, 8))
    if not second:
        refuse(fields, use_qk_norm=True)
        for name in ("qkv_bias", "shared_expert_intermediate_size"):
            fields.get(name)  # Fields of Qwen2's
    biased = fields.boolean("attention_bias", False)
    return common.Config(
        **sizes,
        norm_eps=fields.number("rms_norm_eps", NORM_EPSILON, 1e-6),
        rope=read_rope(fields, sizes["max_position_embeddings"], sizes["head_dim"]),
        windows=_windows(fields, layers, second=second),
        routing=Routing(choices, renormalize=fields.boolean("norm_topk_prob", False)),
        experts=experts,
        expert_width=fields.integer("moe_intermediate_size", WIDTH, 1408 if second else 768),
        dense=read_dense(fields, layers),
        names=common.Names(shared="shared_expert"),
        qkv_bias=fields.boolean("qkv_bias", True) if second else biased,
        output_bias=not second and biased,
        qk_norm="none" if second else "head",
        shared_size=fields.integer("shared_expert_intermediate_size", WIDTH, 5632) if second else 0,
        shared_gate=second,
    )


def _windows(fields: Fields, layers: int, *, second: bool) -> tuple[int | None, ...]:
    """Return the windows, if `use_sliding_window` asks for them: all layers of Qwen3 have one, not all of Qwen2's."""
    most = fields.integer("max_window_layers", Range(0, LAYERS.most), 28)
    if not fields.boolean("use_sliding_window", False):
        fields.get("sliding_window")
        fields.get("layer_types")
        return (None,) * layers
    types = [FULL if second and (i % 2 or i >= most) else SLIDING for i in range(layers)]
    return read_windows(fields, layers, types, 4096)
