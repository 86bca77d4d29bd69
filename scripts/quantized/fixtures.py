"""The table of quantized fixtures: a model, the `quantization_config` of a tool, and how its layers are packed."""

from __future__ import annotations

import dataclasses
import re
import zlib
from collections.abc import Callable
from typing import Any

import torch
from quantized.configs import (
    BLOCKS_128,
    FP8,
    FP8_BLOCKS,
    FP8_STATIC,
    INT8,
    OLD_GPTQ,
    Json,
    awq_config,
    compressed,
    gptq_config,
    int4,
    numbers,
    scheme,
)
from quantized.formats import Packed, awq, fp8, fp8_scale, gptq, int8_channels, neighbours, pack_quantized
from torch import Tensor


@dataclasses.dataclass(frozen=True)
class Fixture:
    """A model and how its linear layers are packed: `pack` takes a layer's name and weight, and returns None for a
    layer that is not quantized.

    `input_scale` and `kv_scale` make the tensors of static scales from the largest activation. `positive` makes every
    fifth output of each weight positive, so that its zeros are 0.
    """

    config: Json
    quantization: Json
    pack: Callable[[str, Tensor], Packed | None]
    input_scale: Callable[[float], Tensor] | None = None
    kv_scale: Callable[[float], Tensor] | None = None
    files: int = 1
    extra_biases: bool = False
    positive: bool = False


def llama(dtype: str, **changes: Any) -> Json:
    """Return the config of a tiny Llama with changed fields; None removes one."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "head_dim": 32,
        "hidden_act": "silu",
        "hidden_size": 128,
        "intermediate_size": 256,
        "max_position_embeddings": 128,
        "model_type": "llama",
        "num_attention_heads": 4,
        "num_hidden_layers": 1,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-05,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "torch_dtype": dtype,
        "vocab_size": 48,
    } | changes
    return {key: value for key, value in config.items() if value is not None}


QWEN2 = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "use_sliding_window": False}
QWEN3 = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "use_sliding_window": False}
DELTA_NETS = {
    "full_attention_interval": 2,
    "linear_key_head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_value_head_dim": 32,
    "num_hidden_layers": 2,
    "partial_rotary_factor": 0.25,
}
QWEN3_NEXT = {
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "moe_intermediate_size": 128,
    "num_experts": 2,
    "num_experts_per_tok": 2,
    "shared_expert_intermediate_size": 128,
    **DELTA_NETS,
}
QWEN3_5 = {"architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text", **DELTA_NETS}
PHI3 = {"architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "pad_token_id": 2, "head_dim": None}
GLM4 = {
    "attention_bias": True,
    "architectures": ["Glm4ForCausalLM"],
    "model_type": "glm4",
    "pad_token_id": 2,
    "partial_rotary_factor": 0.5,
    "rope_parameters": {"partial_rotary_factor": 0.5, "rope_theta": 10000.0, "rope_type": "default"},
    "rope_theta": None,
}


def but(skipped: str, pack: Callable[[str, Tensor], Packed]) -> Callable[[str, Tensor], Packed | None]:
    """Pack all layers but those in whose names the pattern is found."""
    return lambda name, weight: None if re.search(skipped, name) else pack(name, weight)


def in_order(bits: int, group: int, *, symmetric: bool = True, version: Any = 1) -> Callable[[str, Tensor], Packed]:
    """Return GPTQ's packer with groups of neighbouring inputs."""
    return lambda _, weight: gptq(
        weight, bits, neighbours(weight.shape[1], group), symmetric=symmetric, version=version
    )


def act_order(name: str, inputs: int, group: int, *, own: bool = False) -> Tensor:
    """Return the group of each input as `desc_act` leaves them: groups of inputs that follow each other by the size of
    their activations. Layers with the same inputs have the same groups, unless each has its `own`."""
    shared = re.sub(r"\b[qkv]_proj", "qkv", re.sub(r"\b(gate|up)_proj", "gate_up", name))
    generator = torch.Generator().manual_seed(zlib.crc32((name if own else shared).encode()))
    group_of = torch.empty(inputs, dtype=torch.long)
    group_of[torch.randperm(inputs, generator=generator)] = neighbours(inputs, group)
    return group_of


def reordered(bits: int, group: int, *, symmetric: bool, own: bool = False) -> Callable[[str, Tensor], Packed]:
    """Return GPTQ's packer with `desc_act`."""
    return lambda name, weight: gptq(
        weight, bits, act_order(name, weight.shape[1], group, own=own), symmetric=symmetric
    )


def packed_in_order(bits: int, group: int, *, symmetric: bool = True) -> Callable[[str, Tensor], Packed]:
    """Return `pack-quantized`'s packer with groups of neighbouring inputs."""
    return lambda _, weight: pack_quantized(weight, bits, neighbours(weight.shape[1], group), symmetric=symmetric)


def fp8_in(over: Any, dtype: torch.dtype, name: str = "weight_scale") -> Callable[[str, Tensor], Packed]:
    """Return a packer to float8 with scales of a type."""
    return lambda _, weight: fp8(weight, name, fp8_scale(weight, over).to(dtype))


def fp8_one_scale(_: str, weight: Tensor) -> Packed:
    """Pack as compressed-tensors does per tensor: the scale has one dimension."""
    return fp8(weight, "weight_scale", fp8_scale(weight, "tensor").bfloat16()[None])


def two_groups(name: str, weight: Tensor) -> Packed:
    """Pack the attention as float8, and the rest in 4 bits."""
    if "self_attn" in name:
        return fp8_in("channel", torch.bfloat16)(name, weight)
    return packed_in_order(4, 64)(name, weight)


def by_rules(name: str, weight: Tensor) -> Packed | None:
    """Pack by the rules of `gptq_dynamic`."""
    if "down_proj" in name or name == "lm_head":
        return None
    return in_order(8, 64)(name, weight) if ".mlp." in name else in_order(4, 32)(name, weight)


def one_bfloat16(largest: float) -> Tensor:
    """Return compressed-tensors' scale of float8 activations."""
    return torch.tensor([largest / 448]).bfloat16()


def one_number(largest: float) -> Tensor:
    """Return AutoFP8's scale of float8 activations."""
    return torch.tensor(largest / 448)


F16, BF16 = "float16", "bfloat16"
FBGEMM_SKIPPED = [
    "lm_head",
    *(f"model.layers.{i}.self_attn.{x}_proj" for i in range(2) for x in "qkvo"),
    *(f"model.layers.1.mlp.{x}_proj" for x in ("down", "gate", "up")),
]
MODELS: dict[str, Fixture] = {
    "awq": Fixture(
        llama(F16, intermediate_size=384),
        awq_config(128),
        but("lm_head", lambda _, w: awq(w, 128)),
    ),
    "awq_skipped": Fixture(
        llama(F16, num_hidden_layers=2, intermediate_size=64),
        awq_config(32, ["o_proj", "model.layers.1.mlp"]),
        but(r"lm_head|o_proj|layers\.1\.mlp", lambda _, w: awq(w, 32)),
    ),
    "awq_sharded": Fixture(llama(F16), awq_config(64), but("lm_head", lambda _, w: awq(w, 64)), files=2),
    "awq_tied": Fixture(llama(F16, tie_word_embeddings=True), awq_config(32), but("lm_head", lambda _, w: awq(w, 32))),
    "awq_glm4": Fixture(llama(F16, **GLM4), awq_config(32), but("lm_head", lambda _, w: awq(w, 32))),
    "gptq": Fixture(llama(F16), gptq_config(), but("lm_head", in_order(4, 128))),
    "gptq_act_order": Fixture(
        llama(F16),
        gptq_config(desc_act=True, sym=False, group_size=32),
        but("lm_head", reordered(4, 32, symmetric=False)),
    ),
    "gptq_own_orders": Fixture(
        llama(F16),
        gptq_config(desc_act=True, group_size=64),
        but("lm_head", reordered(4, 64, symmetric=True, own=True)),
    ),
    "gptq_zeros_of_0": Fixture(
        llama(F16),
        gptq_config(sym=False, group_size=64),
        but("lm_head", in_order(4, 64, symmetric=False)),
        positive=True,
    ),
    "gptq_8bit": Fixture(llama(F16), gptq_config(bits=8), but("lm_head", in_order(8, 128))),
    "gptq_8bit_asymmetric": Fixture(
        llama(F16, intermediate_size=192),
        gptq_config(bits=8, sym=False, group_size=32),
        but("lm_head", in_order(8, 32, symmetric=False)),
    ),
    "gptq_v2": Fixture(
        llama(F16),
        gptq_config(checkpoint_format="gptq_v2", sym=False, group_size=32),
        but("lm_head", in_order(4, 32, symmetric=False, version=2)),
    ),
    "gptq_head": Fixture(llama(F16, vocab_size=64), gptq_config(lm_head=True, group_size=64), in_order(4, 64)),
    "gptq_one_group": Fixture(llama(F16), OLD_GPTQ, but("lm_head", in_order(4, -1)), extra_biases=True),
    "gptq_dynamic": Fixture(
        llama(F16, intermediate_size=192),
        gptq_config(
            group_size=32,
            dynamic={r"+:.*\.mlp\.(gate|up)_proj": {"bits": 8, "group_size": 64}, r"-:.*\.down_proj": {}},
        ),
        by_rules,
    ),
    "gptq_qwen2": Fixture(llama(F16, **QWEN2), gptq_config(group_size=64), but("lm_head", in_order(4, 64))),
    "gptq_phi3": Fixture(
        llama(F16, **PHI3),
        gptq_config(desc_act=True, group_size=32),
        but("lm_head", reordered(4, 32, symmetric=True)),
    ),
    "compressed_w4a16": Fixture(
        llama(BF16, hidden_size=256, intermediate_size=128),
        compressed("pack-quantized", scheme(int4(128))),
        but("lm_head", packed_in_order(4, 128)),
    ),
    "compressed_w4a16_asymmetric": Fixture(
        llama(BF16),
        compressed("pack-quantized", scheme(int4(32, symmetric=False, actorder="weight"))),
        but("lm_head", packed_in_order(4, 32, symmetric=False)),
    ),
    "compressed_w4a16_act_order": Fixture(
        llama(BF16),
        compressed("pack-quantized", scheme(int4(32, actorder="group"))),
        but(
            "lm_head",
            lambda name, w: pack_quantized(w, 4, act_order(name, w.shape[1], 32), symmetric=True, with_order=True),
        ),
    ),
    "compressed_w8a16": Fixture(
        llama(BF16, intermediate_size=192),
        compressed("pack-quantized", scheme(numbers(8, "int", "channel"))),
        but("lm_head", packed_in_order(8, -1)),
    ),
    "compressed_w8a8_int8": Fixture(
        llama(BF16, num_hidden_layers=2, intermediate_size=64),
        compressed("int-quantized", scheme(*INT8), ignore=("lm_head", r"re:.*layers\.0\..*o_proj", "re:.*down_proj$")),
        but(r"lm_head|layers\.0\..*o_proj|down_proj$", lambda _, w: int8_channels(w)),
    ),
    "compressed_w8a8_int8_static": Fixture(
        llama(BF16, intermediate_size=192),
        compressed("int-quantized", scheme(INT8[0], numbers(8, "int", "tensor"))),
        but("lm_head", lambda _, w: int8_channels(w)),
        input_scale=lambda largest: torch.tensor([largest / 127.5]).bfloat16(),
    ),
    "compressed_fp8": Fixture(
        llama(BF16, intermediate_size=192),
        compressed("float-quantized", scheme(*FP8)),
        but("lm_head", fp8_in("channel", torch.bfloat16)),
    ),
    "compressed_fp8_static": Fixture(
        llama(BF16, intermediate_size=192),
        compressed("float-quantized", scheme(*FP8_STATIC)),
        but("lm_head", fp8_one_scale),
        input_scale=one_bfloat16,
    ),
    "compressed_fp8_kv_cache": Fixture(
        llama(BF16, intermediate_size=192),
        compressed(
            "naive-quantized",
            scheme(*FP8_STATIC),
            kv_cache_scheme=numbers(8, "float", "tensor"),
            quantization_status="frozen",
        ),
        but("lm_head", fp8_one_scale),
        input_scale=one_bfloat16,
        kv_scale=one_bfloat16,
    ),
    "compressed_fp8_blocks": Fixture(
        llama(BF16, head_dim=64),
        compressed("float-quantized", scheme(*FP8_BLOCKS)),
        but("lm_head", fp8_in("block", torch.bfloat16)),
    ),
    "compressed_two_groups": Fixture(
        llama(BF16),
        compressed(
            "mixed-precision",
            scheme(*FP8, targets=("re:.*self_attn.(q|k|v|o)_proj$",), format="float-quantized"),
            scheme(int4(64), targets=("re:.*mlp.*",), format="pack-quantized"),
        ),
        but("lm_head", two_groups),
    ),
    "fp8": Fixture(
        llama(BF16, intermediate_size=192),
        {"activation_scheme": "dynamic", "ignored_layers": ["lm_head"], "quant_method": "fp8"},
        but("lm_head", fp8_in("tensor", torch.float32)),
    ),
    "fp8_static": Fixture(
        llama(BF16, intermediate_size=192),
        {
            "activation_scheme": "static",
            "ignored_layers": ["lm_head", "model.layers.0.mlp.down_proj"],
            "kv_cache_scheme": "static",
            "quant_method": "fp8",
        },
        but("lm_head|down_proj", fp8_in("tensor", torch.float32)),
        input_scale=one_number,
        kv_scale=one_number,
    ),
    "fp8_blocks": Fixture(
        llama(BF16, hidden_size=256, intermediate_size=192),
        BLOCKS_128,
        but("lm_head", fp8_in("block", torch.float32, "weight_scale_inv")),
    ),
    "fp8_blocks_qwen3": Fixture(
        llama(BF16, **QWEN3, intermediate_size=192),
        BLOCKS_128
        | {
            "modules_to_not_convert": [
                "lm_head",
                "model.layers.0.input_layernorm",
                "model.layers.0.mlp.down_proj",
                "model.layers.0.post_attention_layernorm",
            ]
        },
        but("lm_head|down_proj", fp8_in("block", torch.bfloat16, "weight_scale_inv")),
    ),
    "awq_qwen3_5": Fixture(
        llama(BF16, **QWEN3_5, intermediate_size=128),
        awq_config(32, ["lm_head", "in_proj_a", "in_proj_b"]),
        but("lm_head|in_proj_[ab]$", lambda _, w: awq(w, 32)),
    ),
    "fbgemm_fp8": Fixture(
        llama(BF16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64),
        {"activation_scale_ub": 1200.0, "modules_to_not_convert": FBGEMM_SKIPPED, "quant_method": "fbgemm_fp8"},
        lambda name, w: None if name in FBGEMM_SKIPPED else fp8_in("channel", torch.float32)(name, w),
    ),
}

MIXTRAL = {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_experts_per_tok": 2}
QWEN3_MOE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 128,
    "norm_topk_prob": True,
    "num_experts_per_tok": 2,
}
GPT_OSS = {
    "architectures": ["GptOssForCausalLM"],
    "attention_bias": True,
    "model_type": "gpt_oss",
    "num_experts_per_tok": 2,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 4.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 32,
    },
    "sliding_window": 16,
}
DEEPSEEK_V3 = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "first_k_dense_replace": 0,
    "head_dim": None,
    "intermediate_size": 128,
    "kv_lora_rank": 128,
    "model_type": "deepseek_v3",
    "moe_intermediate_size": 128,
    "n_group": 2,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_experts_per_tok": 2,
    "num_key_value_heads": 4,
    "q_lora_rank": 128,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 32,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "v_head_dim": 32,
}
MIXTURES: dict[str, Fixture] = {
    "mixtral_awq": Fixture(
        llama(F16, **MIXTRAL, intermediate_size=64, num_local_experts=4),
        awq_config(32, ["gate"]),
        but("lm_head|gate$", lambda _, w: awq(w, 32)),
    ),
    "mixtral_gptq": Fixture(
        llama(F16, **MIXTRAL, intermediate_size=64, num_local_experts=3),
        gptq_config(group_size=32, sym=False, dynamic={r"-:.*\.gate$": {}}),
        but("lm_head|gate$", in_order(4, 32, symmetric=False)),
    ),
    "qwen3_moe_gptq_act_order": Fixture(
        llama(F16, **QWEN3_MOE | {"moe_intermediate_size": 64}, num_experts=4),
        gptq_config(desc_act=True, group_size=32, dynamic={r"-:.*\.gate$": {}}),
        but("lm_head|gate$", reordered(4, 32, symmetric=True)),
    ),
    "qwen3_moe_fp8_blocks": Fixture(
        llama(BF16, **QWEN3_MOE, num_experts=4),
        BLOCKS_128 | {"modules_to_not_convert": ["lm_head", "model.layers.0.mlp.gate"]},
        but("lm_head|gate$", fp8_in("block", torch.bfloat16, "weight_scale_inv")),
    ),
    "qwen3_next_fp8_blocks": Fixture(
        llama(BF16, **QWEN3_NEXT),
        BLOCKS_128 | {"modules_to_not_convert": ["lm_head", "mlp.gate", "shared_expert_gate", "in_proj_ba"]},
        but("lm_head|gate$|in_proj_ba$", fp8_in("block", torch.bfloat16, "weight_scale_inv")),
    ),
    "deepseek_v3_fp8_blocks": Fixture(
        llama(BF16, **DEEPSEEK_V3),
        BLOCKS_128,
        but("lm_head|gate$", fp8_in("block", torch.float32, "weight_scale_inv")),
    ),
    "qwen3_moe_w4a16": Fixture(
        llama(BF16, **QWEN3_MOE | {"moe_intermediate_size": 64}, num_experts=4),
        compressed("pack-quantized", scheme(int4(32)), ignore=("lm_head", "re:.*mlp.gate$")),
        but("lm_head|gate$", packed_in_order(4, 32)),
    ),
    "mixtral_fp8_static": Fixture(
        llama(BF16, **MIXTRAL, intermediate_size=64, num_local_experts=3),
        {"activation_scheme": "static", "ignored_layers": ["lm_head", "gate"], "quant_method": "fp8"},
        but("lm_head|gate$", fp8_in("tensor", torch.float32)),
        input_scale=one_number,
    ),
    "gpt_oss_mxfp4": Fixture(
        llama(BF16, **GPT_OSS, intermediate_size=64, num_local_experts=4, rope_theta=150000.0),
        {
            "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"],
            "quant_method": "mxfp4",
        },
        lambda name, weight: None,
    ),
}
"""The fixtures whose experts are quantized too; the experts of MXFP4 share tensors."""
