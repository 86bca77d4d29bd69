"""The configs of hybrids on the hub, as their config.json files have them, with the parameters of their text models.

Those of Qwen3.6-27B and Qwen3.5-397B-A17B lack some fields that have no effect.
"""

from __future__ import annotations

from typing import Any

_ROPE: dict[str, Any] = {
    "mrope_interleaved": True,
    "mrope_section": [11, 11, 10],
    "partial_rotary_factor": 0.25,
    "rope_theta": 10000000,
    "rope_type": "default",
}
_TEXT: dict[str, Any] = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attn_output_gate": True,
    "dtype": "bfloat16",
    "eos_token_id": 248044,
    "full_attention_interval": 4,
    "head_dim": 256,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_value_head_dim": 128,
    "mamba_ssm_dtype": "float32",
    "max_position_embeddings": 262144,
    "mtp_num_hidden_layers": 1,
    "mtp_use_dedicated_embeddings": False,
    "rms_norm_eps": 1e-06,
    "rope_parameters": _ROPE,
    "use_cache": True,
    "vocab_size": 248320,
}
_IDS = {"image_token_id": 248056, "video_token_id": 248057, "vision_end_token_id": 248054}


def _multimodal(kind: str, layers: int, text: dict[str, Any], vision: dict[str, Any]) -> dict[str, Any]:
    """Return a config of a model of `kind`, of whose layers every fourth has attention."""
    layer_types = (["linear_attention"] * 3 + ["full_attention"]) * (layers // 4)
    own = {"model_type": f"{kind}_text", "num_hidden_layers": layers, "layer_types": layer_types}
    moe = "Moe" if kind == "qwen3_5_moe" else ""
    return {
        "architectures": [f"Qwen3_5{moe}ForConditionalGeneration"],
        "model_type": kind,
        "tie_word_embeddings": text["tie_word_embeddings"],
        "text_config": {**_TEXT, **own, **text},
        "vision_config": {"model_type": kind, "in_channels": 3, "patch_size": 16, **vision},
        **_IDS,
    }


_SMALL = _multimodal(
    "qwen3_5",
    24,
    {
        "hidden_size": 1024,
        "intermediate_size": 3584,
        "linear_num_value_heads": 16,
        "mlp_only_layers": [],
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    },
    {"depth": 12, "hidden_size": 768, "intermediate_size": 3072, "num_heads": 12, "out_hidden_size": 1024},
)
_DENSE = _multimodal(
    "qwen3_5",
    64,
    {
        "bos_token_id": 248044,
        "hidden_size": 5120,
        "intermediate_size": 17408,
        "linear_num_value_heads": 48,
        "num_attention_heads": 24,
        "num_key_value_heads": 4,
        "partial_rotary_factor": 0.25,
        "tie_word_embeddings": False,
    },
    {"depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "num_heads": 16, "out_hidden_size": 5120},
)
_EXPERTS: dict[str, Any] = {
    "bos_token_id": 248044,
    "hidden_size": 2048,
    "linear_num_value_heads": 32,
    "moe_intermediate_size": 512,
    "num_attention_heads": 16,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "num_key_value_heads": 2,
    "output_router_logits": False,
    "pad_token_id": None,
    "partial_rotary_factor": 0.25,
    "shared_expert_intermediate_size": 512,
    "tie_word_embeddings": False,
}
_VISION = {"depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "num_heads": 16}
_MIXTURE = _multimodal("qwen3_5_moe", 40, _EXPERTS, {**_VISION, "out_hidden_size": 2048})
_LARGE = _multimodal(
    "qwen3_5_moe",
    60,
    {
        **_EXPERTS,
        "hidden_size": 4096,
        "linear_num_value_heads": 64,
        "moe_intermediate_size": 1024,
        "num_attention_heads": 32,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "shared_expert_intermediate_size": 1024,
    },
    {**_VISION, "out_hidden_size": 4096},
)
_NEXT: dict[str, Any] = {
    "architectures": ["Qwen3NextForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "decoder_sparse_step": 1,
    "eos_token_id": 151645,
    "full_attention_interval": 4,
    "head_dim": 256,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 5120,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "max_position_embeddings": 262144,
    "mlp_only_layers": [],
    "model_type": "qwen3_next",
    "moe_intermediate_size": 512,
    "norm_topk_prob": True,
    "num_attention_heads": 16,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "num_hidden_layers": 48,
    "num_key_value_heads": 2,
    "output_router_logits": False,
    "partial_rotary_factor": 0.25,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000000,
    "router_aux_loss_coef": 0.001,
    "shared_expert_intermediate_size": 512,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": 151936,
}

HYBRIDS: dict[str, tuple[dict[str, Any], float]] = {
    "Qwen3-Next-80B-A3B-Instruct": (_NEXT, 79.674),
    "Qwen3.5-0.8B": (_SMALL, 0.7524),
    "Qwen3.6-27B": (_DENSE, 26.896),
    "Qwen3.6-35B-A3B": (_MIXTURE, 34.661),
    "Qwen3.5-397B-A17B": (_LARGE, 396.346),
}
