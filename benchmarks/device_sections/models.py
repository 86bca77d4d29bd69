"""Shapes of the measured models; their weights are dummies."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_LLAMA = {"architectures": ["LlamaForCausalLM"], "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
          "max_position_embeddings": 131072, "vocab_size": 128256, "num_attention_heads": 32,
          "num_key_value_heads": 8}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "Qwen3-0.6B": {
        "architectures": ["Qwen3ForCausalLM"], "vocab_size": 151936, "hidden_size": 1024, "intermediate_size": 3072,
        "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
        "rms_norm_eps": 1e-6, "max_position_embeddings": 40960, "rope_theta": 1000000.0, "tie_word_embeddings": True,
    },
    "Llama-3.2-1B": {**_LLAMA, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "head_dim": 64,
                     "tie_word_embeddings": True},
    "Llama-3.1-8B": {**_LLAMA, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
                     "head_dim": 128},
    "Gemma-3-4B": {
        "architectures": ["Gemma3ForCausalLM"], "vocab_size": 262208, "hidden_size": 2560, "intermediate_size": 10240,
        "num_hidden_layers": 34, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
        "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-6, "max_position_embeddings": 131072,
        "sliding_window": 1024, "sliding_window_pattern": 6,
    },
}  # fmt: skip
_TINY = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 16,
         "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512}  # fmt: skip


def config_of(name: str, tiny: bool) -> dict[str, Any]:
    """Return a model's config.json; for a dry run, a tiny model of the same family."""
    return {**MODELS[name], **(_TINY if tiny else {})}


def write_model(name: str, tiny: bool, folder: Path, quantization: dict[str, Any] | None = None) -> str:
    """Write a model folder without weights and return its path."""
    quantized = {} if quantization is None else {"quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps({**config_of(name, tiny), **quantized}))
    return str(folder)
