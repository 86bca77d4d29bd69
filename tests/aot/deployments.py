"""Deployments to compile: a model's shape on a target, with a pool about as large as the device can hold."""

from __future__ import annotations

from typing import Any

from jaxserve.config.schema import EngineConfig
from jaxserve.model_source.pooling import ModelTask
from jaxserve.models.registry import parse_model_config
from jaxserve.runtime.devices.device import facts_of_target
from jaxserve.runtime.devices.topology import target_mesh
from jaxserve.runtime.programs.builder import ProgramBuilder
from jaxserve.runtime.sizing.deployment import Deployment, deploy

LLAMA_8B_TWO_LAYERS = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 2,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 131072,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}

LLAMA_70B = {
    **LLAMA_8B_TWO_LAYERS,
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
}

SMOLLM2_135M = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 8192,
    "rope_theta": 100000.0,
    "tie_word_embeddings": True,
}

DECODE_ROWS = 64
MIXED_TOKENS = 2048
PAGE_SIZES = {"nvidia-h200": 16, "tpu-v6e": 32}


def deployment(
    target: str,
    config: dict[str, Any],
    *,
    tensor: int,
    data: int = 1,
    attention: str = "auto",
    kv: str = "auto",
    task: ModelTask | None = None,
) -> ProgramBuilder:
    """Return the program builder that `build_engine` would make on that device, in bfloat16."""
    made = deployed(target, config, tensor=tensor, data=data, attention=attention, kv=kv, task=task)
    return made.builder(target_mesh(target, tensor=tensor, data=data))


def deployed(
    target: str,
    config: dict[str, Any],
    *,
    tensor: int,
    data: int = 1,
    attention: str = "auto",
    kv: str = "auto",
    task: ModelTask | None = None,
) -> Deployment:
    """Return the deployment and its sizes."""
    settings: dict[str, Any] = {"attention_backend": attention, "kv_cache_dtype": kv, "page_size": PAGE_SIZES[target]}
    engine = EngineConfig(
        **settings,
        tp_size=tensor,
        dp_size=data,
        max_running_requests=256,
        cuda_graph_bs=(DECODE_ROWS, 256),
        chunked_prefill_size=MIXED_TOKENS,
    )
    return deploy(engine, parse_model_config(config, task=task), facts_of_target(target))
