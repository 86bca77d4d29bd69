"""The `quantization_config` that the tools behind quantized checkpoints write to config.json."""

from __future__ import annotations

from typing import Any

Json = dict[str, Any]


def awq_config(group: int, skipped: list[str] | None = None) -> Json:
    """Return what AutoAWQ writes."""
    return {
        "bits": 4,
        "group_size": group,
        "modules_to_not_convert": skipped,
        "quant_method": "awq",
        "version": "gemm",
        "zero_point": True,
    }


def gptq_config(**changes: Any) -> Json:
    """Return what GPTQModel writes."""
    return {
        "bits": 4,
        "checkpoint_format": "gptq",
        "desc_act": False,
        "group_size": 128,
        "lm_head": False,
        "meta": {
            "damp_auto_increment": 0.0025,
            "damp_percent": 0.01,
            "mse": 0.0,
            "quantizer": ["gptqmodel:2.2.0"],
            "static_groups": False,
            "true_sequential": True,
            "uri": "https://github.com/modelcloud/gptqmodel",
        },
        "pack_dtype": "int32",
        "quant_method": "gptq",
        "sym": True,
    } | changes


OLD_GPTQ = {
    "bits": 4,
    "damp_percent": 0.1,
    "desc_act": False,
    "group_size": -1,
    "model_file_base_name": "model",
    "model_name_or_path": None,
    "quant_method": "gptq",
    "static_groups": False,
    "sym": True,
    "true_sequential": True,
}


def numbers(bits: int, kind: str, strategy: str, **changes: Any) -> Json:
    """Return compressed-tensors' description of quantized numbers."""
    return {
        "actorder": None,
        "block_structure": None,
        "dynamic": False,
        "group_size": None,
        "num_bits": bits,
        "observer": "minmax",
        "observer_kwargs": {},
        "strategy": strategy,
        "symmetric": True,
        "type": kind,
    } | changes


def scheme(weights: Json, inputs: Json | None = None, targets: tuple[str, ...] = ("Linear",), **changes: Any) -> Json:
    """Return one of compressed-tensors' groups."""
    return {
        "input_activations": inputs,
        "output_activations": None,
        "targets": list(targets),
        "weights": weights,
    } | changes


def compressed(storage: str, *schemes: Json, ignore: tuple[str, ...] = ("lm_head",), **changes: Any) -> Json:
    """Return what llm-compressor writes."""
    return {
        "config_groups": {f"group_{i}": one for i, one in enumerate(schemes)},
        "format": storage,
        "global_compression_ratio": None,
        "ignore": list(ignore),
        "kv_cache_scheme": None,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "sparsity_config": {},
        "transform_config": {},
        "version": "0.12.2",
    } | changes


def int4(group: int, **changes: Any) -> Json:
    return numbers(4, "int", "group", group_size=group, **changes)


DYNAMIC = {"dynamic": True, "observer": None}
INT8 = (numbers(8, "int", "channel"), numbers(8, "int", "token", **DYNAMIC))
FP8 = (numbers(8, "float", "channel"), numbers(8, "float", "token", **DYNAMIC))
FP8_STATIC = (numbers(8, "float", "tensor"), numbers(8, "float", "tensor"))
FP8_BLOCKS = (
    numbers(8, "float", "block", block_structure=[128, 128]),
    numbers(8, "float", "group", group_size=128, **DYNAMIC),
)


BLOCKS_128 = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]}
BITSANDBYTES = {
    "_load_in_4bit": True,
    "_load_in_8bit": False,
    "bnb_4bit_compute_dtype": "bfloat16",
    "bnb_4bit_quant_storage": "uint8",
    "bnb_4bit_quant_type": "nf4",
    "bnb_4bit_use_double_quant": True,
    "llm_int8_enable_fp32_cpu_offload": False,
    "llm_int8_has_fp16_weight": False,
    "llm_int8_skip_modules": None,
    "llm_int8_threshold": 6.0,
    "load_in_4bit": True,
    "load_in_8bit": False,
    "quant_method": "bitsandbytes",
}
