"""The particulars of each GGUF architecture: a row for each, by the name that files have in `general.architecture`.

A row says which of Hugging Face's models it is, which metadata and tensors it has besides those of all architectures,
and what llama.cpp's converter changed. `gguf_config` and `weights.gguf` do the work; a new architecture is a new row.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from jaxserve.model_source.gguf_encoders import ENCODERS
from jaxserve.model_source.gguf_row import MLP, NOTHING, OUTPUT, QKV, SILU, Architecture


def _query_scale(widest: int) -> Callable[[Mapping[str, Any]], Mapping[str, Any]]:
    """Return the scale of Gemma's queries, which differs in the 27B, the model with `widest` layers.

    No key says it; llama.cpp decides by the number of layers too.
    """

    def implied(config: Mapping[str, Any]) -> Mapping[str, Any]:
        is_widest = config["num_hidden_layers"] == widest
        per_head = config["hidden_size"] // config["num_attention_heads"]
        return {"query_pre_attn_scalar": per_head if is_widest else config["head_dim"]}

    return implied


_GELU = {"hidden_activation": "gelu_pytorch_tanh"}
_SANDWICH = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_LLAMA_BIASES = {"attention_bias": QKV + OUTPUT, "mlp_bias": MLP}


def _named(block: str, gate: str, up: str, down: str) -> dict[str, str]:
    """Return the names of a router and of experts, whose projections are `gate`, `up` and `down`."""
    projections = {"ffn_gate_exps": gate, "ffn_up_exps": up, "ffn_down_exps": down}
    experts = {part: f"{block}.experts.*.{name}" for part, name in projections.items()}
    return {"ffn_gate_inp": f"{block}.gate", **experts}


def _shared(name: str) -> dict[str, str]:
    """Return the names of an expert that computes all tokens."""
    return {f"ffn_{each}_shexp": f"mlp.{name}.{each}_proj" for each in ("gate", "up", "down")}


_VOCABULARY_OF_GLM = 154880
_V2 = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "topk_method": "group_limited_greedy",
}


def _deepseek(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the fields by which DeepSeek-V2 and V3, which have the same architecture here, differ."""
    # Files of V2 of before January 2025 don't say how scores are made, nor do those of GLM-4.7-Flash
    unsaid = "sigmoid" if config["vocab_size"] == _VOCABULARY_OF_GLM else "softmax"
    scores = {0: unsaid, 1: "softmax", 2: "sigmoid"}.get(config["scoring_func"], config["scoring_func"])
    # Files written before October 2025 have no groups; all released models with 160 or 256 experts have these
    groups, best = {160: (8, 3), 256: (8, 4)}.get(config["n_routed_experts"], (1, 1))
    rope = dict(config["rope_parameters"])
    if "mscale_all_dim" in rope:
        # The converter writes a tenth; both are equal in all released models, and in llama.cpp
        rope["mscale"] = rope["mscale_all_dim"] = 10 * rope["mscale_all_dim"]
    return {
        **(_V2 if scores == "softmax" else {}),
        "scoring_func": scores,
        "n_group": config["n_group"] or groups,
        "topk_group": config["topk_group"] or best,
        "rope_parameters": rope,
    }


def _delta_net(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the size of a value head, of which files have the product with the number of heads."""
    heads = max(config["linear_num_value_heads"], 1)
    return {"linear_value_head_dim": config["linear_inner_size"] // heads, "linear_inner_size": None}


_EXPERTS = _named("mlp", "gate_proj", "up_proj", "down_proj")
_MIXTRAL = _named("block_sparse_moe", "w1", "w3", "w2")
_DRAFTS = {
    "nextn.eh_proj": "eh_proj",
    "nextn.embed_tokens": "embed_tokens",
    "nextn.enorm": "enorm",
    "nextn.hnorm": "hnorm",
    "nextn.shared_head_head": "shared_head.head",
    "nextn.shared_head_norm": "shared_head.norm",
}
_DELTA_NET = {
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_ba": "linear_attn.in_proj_ba",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_a.": "linear_attn.A_log",
    "ssm_dt.bias": "linear_attn.dt_bias",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
    "post_attention_norm": "post_attention_layernorm",
}
_DELTA_SIZES = {
    "ssm.conv_kernel": "linear_conv_kernel_dim",
    "ssm.state_size": "linear_key_head_dim",
    "ssm.group_count": "linear_num_key_heads",
    "ssm.time_step_rank": "linear_num_value_heads",
    "ssm.inner_size": "linear_inner_size",
    "full_attention_interval": "full_attention_interval",
}
_QWEN_DRAFTS = {
    "nextn.eh_proj": "mtp.fc",
    "nextn.enorm": "mtp.pre_fc_norm_embedding",
    "nextn.hnorm": "mtp.pre_fc_norm_hidden",
    "nextn.shared_head_norm": "mtp.norm",
}
_HYBRID = Architecture(
    model=("Qwen3_5ForCausalLM", "qwen3_5_text"),
    constants=SILU | {"full_attention_interval": 4},
    implied=_delta_net,
    integers=_DELTA_SIZES,
    biases=NOTHING,
    partial_rotation=True,
    drafts="mtp_num_hidden_layers",
    value_heads="tiled",
    ignored=("rope.dimension_sections",),
    names=_DELTA_NET | _QWEN_DRAFTS,
    norm_offset=1.0,
)
_GEMMA3 = Architecture(
    model=("Gemma3ForCausalLM", "gemma3_text"),
    constants=_GELU | {"sliding_window_pattern": 1},
    implied=_query_scale(widest=62),
    numbers={"final_logit_softcapping": "final_logit_softcapping"},
    window_period=6,
    local_theta=10000.0,
    names=_SANDWICH,
    norm_offset=1.0,
)
_USED = {"expert_used_count": "num_experts_per_tok"}
_OWN_WIDTH = {"expert_feed_forward_length": "moe_intermediate_size"}
_OF_QWEN = {
    "expert_count": "num_experts",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
    **_USED,
    **_OWN_WIDTH,
}
_SOFTMAX, _SIGMOID = {"expert_gating_func": 1}, {"expert_gating_func": 2}

_SHARED_OF_QWEN = {**_shared("shared_expert"), "ffn_gate_inp_shexp": "mlp.shared_expert_gate"}
_HYBRID_MIXTURE = dataclasses.replace(
    _HYBRID,
    model=("Qwen3_5MoeForCausalLM", "qwen3_5_moe_text"),
    # The converter leaves out the width of dense layers, which there are none of
    constants={**_HYBRID.constants, "intermediate_size": 1},
    integers=_DELTA_SIZES | _OF_QWEN,
    names={**_HYBRID.names, **_EXPERTS, **_SHARED_OF_QWEN},
    only=_SOFTMAX,
)

ARCHITECTURES: Mapping[str, Architecture] = MappingProxyType(
    {
        "llama": Architecture(
            model=("LlamaForCausalLM", "llama"),
            windowed_model=("MistralForCausalLM", "mistral"),
            window_period=1,
            biases=_LLAMA_BIASES,
            pairs_adjacent=True,
            mixture=Architecture(
                model=("MixtralForCausalLM", "mixtral"),
                integers={"expert_count": "num_local_experts", **_USED},
                biases=NOTHING,
                window_period=1,
                names=_MIXTRAL,
                only=_SOFTMAX,
                pairs_adjacent=True,
            ),
        ),
        "qwen2": Architecture(model=("Qwen2ForCausalLM", "qwen2"), biases={"attention_bias": QKV}),
        "qwen3": Architecture(model=("Qwen3ForCausalLM", "qwen3")),
        "gemma2": Architecture(
            model=("Gemma2ForCausalLM", "gemma2"),
            constants=_GELU,
            implied=_query_scale(widest=46),
            numbers={
                "attn_logit_softcapping": "attn_logit_softcapping",
                "final_logit_softcapping": "final_logit_softcapping",
            },
            window_period=2,
            names=_SANDWICH,
            norm_offset=1.0,
        ),
        "gemma3": _GEMMA3,
        "phi3": Architecture(
            model=("Phi3ForCausalLM", "phi3"),
            window_period=1,
            partial_rotation=True,
            names={"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
        ),
        "olmo2": Architecture(
            model=("Olmo2ForCausalLM", "olmo2"),
            windowed_model=("Olmo3ForCausalLM", "olmo3"),
            window_period=4,
            local_theta=0.0,
            whole_yarn_factor=True,
            names=_SANDWICH,
        ),
        "granite": Architecture(
            model=("GraniteForCausalLM", "granite"),
            numbers={
                "embedding_scale": "embedding_multiplier",
                "residual_scale": "residual_multiplier",
                "attention.scale": "attention_multiplier",
                "logit_scale": "logits_scaling",
            },
            biases=_LLAMA_BIASES,
            # Granite 4's dense models are written as hybrids without layers of Mamba, and without experts
            ignored=("ssm.", "expert_shared_feed_forward_length"),
            only={"rope.scaling.finetuned": True},  # False: it doesn't rotate
            pairs_adjacent=True,
        ),
        "smollm3": Architecture(
            model=("SmolLM3ForCausalLM", "smollm3"),
            constants=SILU | {"no_rope_layer_interval": 4},
            biases=_LLAMA_BIASES,
            pairs_adjacent=True,
        ),
        "glm4": Architecture(
            model=("Glm4ForCausalLM", "glm4"),
            partial_rotation=True,
            biases={"attention_bias": QKV},
            names={
                "post_attention_norm": "post_self_attn_layernorm",
                "post_ffw_norm": "post_mlp_layernorm",
                "ffn_up": "mlp.gate_up_proj",
            },
        ),
        "cohere2": Architecture(
            model=("Cohere2ForCausalLM", "cohere2"),
            norm_epsilon=("attention.layer_norm_epsilon", "layer_norm_eps"),
            numbers={"logit_scale": "logit_scale"},
            window_period=4,
        ),
        "starcoder2": Architecture(
            model=("Starcoder2ForCausalLM", "starcoder2"),
            # The converter leaves out the window, which is 4096 in every StarCoder2
            constants={"hidden_act": "gelu_pytorch_tanh", "sliding_window": 4096},
            window_period=1,
            norm_epsilon=("attention.layer_norm_epsilon", "norm_epsilon"),
            biases={"use_bias": (*QKV, *OUTPUT, "ffn_up", "ffn_down")},
            names={"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"},
        ),
        "mistral3": Architecture(
            model=("Ministral3ForCausalLM", "ministral3"),
            rope_numbers={"attention.temperature_scale": "llama_4_scaling_beta"},
            pairs_adjacent=True,
        ),
        "exaone4": Architecture(
            model=("Exaone4ForCausalLM", "exaone4"),
            constants=SILU | {"sliding_window": None},
            window_period=4,
            names=_SANDWICH,
        ),
        "seed_oss": Architecture(
            model=("SeedOssForCausalLM", "seed_oss"),
            biases={"attention_bias": QKV, "attention_out_bias": OUTPUT, "mlp_bias": MLP},
            names={"post_attention_norm": "post_attention_layernorm"},
        ),
        "qwen2moe": Architecture(
            model=("Qwen2MoeForCausalLM", "qwen2_moe"),
            constants=SILU | {"norm_topk_prob": False},
            integers=_OF_QWEN,
            biases={"qkv_bias": QKV},
            names=_EXPERTS | _SHARED_OF_QWEN,
            only=_SOFTMAX,
        ),
        "qwen3moe": Architecture(
            model=("Qwen3MoeForCausalLM", "qwen3_moe"),
            constants=SILU | {"norm_topk_prob": True},
            integers={"expert_count": "num_experts", **_USED, **_OWN_WIDTH},
            names=_EXPERTS,
            only=_SOFTMAX,
        ),
        "olmoe": Architecture(
            model=("OlmoeForCausalLM", "olmoe"),
            constants=SILU | {"norm_topk_prob": False},
            integers={"expert_count": "num_experts", **_USED},
            names=_EXPERTS,
            only=_SOFTMAX,
        ),
        "gpt-oss": Architecture(
            model=("GptOssForCausalLM", "gpt_oss"),
            constants=SILU | {"sliding_window": None},
            # No key says that YaRN's bounds aren't rounded; all released models have it
            implied=lambda config: {"rope_parameters": {**config["rope_parameters"], "truncate": False}},
            integers={"expert_count": "num_local_experts", "expert_feed_forward_length": "intermediate_size", **_USED},
            window_period=2,
            names={
                "attn_sinks.weight": "self_attn.sinks",
                "post_attention_norm": "post_attention_layernorm",
                "ffn_gate_inp": "mlp.router",
                "ffn_gate_exps.weight": "mlp.experts.gate_up_proj",
                "ffn_up_exps.weight": "mlp.experts.gate_up_proj",
                "ffn_down_exps.weight": "mlp.experts.down_proj",
                "ffn_gate_exps.bias": "mlp.experts.gate_up_proj_bias",
                "ffn_up_exps.bias": "mlp.experts.gate_up_proj_bias",
                "ffn_down_exps.bias": "mlp.experts.down_proj_bias",
            },
        ),
        "glm4moe": Architecture(
            model=("Glm4MoeForCausalLM", "glm4_moe"),
            constants=SILU | {"first_k_dense_replace": 0, "norm_topk_prob": False, "n_group": 1, "topk_group": 1},
            numbers={"expert_weights_scale": "routed_scaling_factor"},
            integers={
                "expert_count": "n_routed_experts",
                "expert_shared_count": "n_shared_experts",
                "expert_group_count": "n_group",
                "expert_group_used_count": "topk_group",
                "leading_dense_block_count": "first_k_dense_replace",
                **_USED,
                **_OWN_WIDTH,
            },
            flags={"expert_weights_norm": "norm_topk_prob"},
            biases={"attention_bias": QKV},
            norms={"use_qk_norm": ("attn_q_norm", "attn_k_norm")},
            partial_rotation=True,
            drafts="num_nextn_predict_layers",
            only=_SIGMOID,
            names={
                **_EXPERTS,
                **_shared("shared_experts"),
                "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
                "post_attention_norm": "post_attention_layernorm",
                **_DRAFTS,
            },
        ),
        "deepseek2": Architecture(
            model=("DeepseekV3ForCausalLM", "deepseek_v3"),
            constants=SILU
            | {"norm_topk_prob": False, "routed_scaling_factor": 1.0, "scoring_func": 0, "n_group": 0, "topk_group": 0},
            implied=_deepseek,
            numbers={"expert_weights_scale": "routed_scaling_factor"},
            integers={
                "expert_count": "n_routed_experts",
                "expert_shared_count": "n_shared_experts",
                "expert_gating_func": "scoring_func",
                "expert_group_count": "n_group",
                "expert_group_used_count": "topk_group",
                "leading_dense_block_count": "first_k_dense_replace",
                **_USED,
                **_OWN_WIDTH,
            },
            flags={"expert_weights_norm": "norm_topk_prob"},
            biases=NOTHING,
            latent=True,
            drafts="num_nextn_predict_layers",
            names={
                **_EXPERTS,
                **_shared("shared_experts"),
                **_DRAFTS,
                "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
                "attn_q_a": "self_attn.q_a_proj",
                "attn_q_a_norm": "self_attn.q_a_layernorm",
                "attn_q_b": "self_attn.q_b_proj",
                "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
                "attn_kv_a_norm": "self_attn.kv_a_layernorm",
                "attn_kv_b": "self_attn.kv_b_proj",
                "attn_k_b": "self_attn.k_b_proj",
                "attn_v_b": "self_attn.v_b_proj",
            },
        ),
        "minimax-m2": Architecture(
            model=("MiniMaxM2ForCausalLM", "minimax_m2"),
            integers={"expert_count": "num_local_experts", "expert_feed_forward_length": "intermediate_size", **_USED},
            biases=NOTHING,
            partial_rotation=True,
            only=_SIGMOID,
            names=_MIXTRAL | {"exp_probs_b.bias": "block_sparse_moe.e_score_correction_bias"},
        ),
        "qwen35": _HYBRID,
        "qwen35moe": _HYBRID_MIXTURE,
        # It differs from Qwen3.5 only in how projections are stored, which the converter has undone
        "qwen3next": dataclasses.replace(_HYBRID_MIXTURE, drafts="", value_heads="grouped"),
        "gemma-embedding": dataclasses.replace(
            _GEMMA3,
            model=("Gemma3TextModel", "gemma3_text"),
            constants={**_GEMMA3.constants, "use_bidirectional_attention": True},
            ignored=("dense_",),
        ),
        **ENCODERS,
    }
)
