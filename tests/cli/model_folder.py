"""Configs of real models, without weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

LLAMA_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 131072,
    "rope_theta": 500000.0,
}


def write_config(path: Path, **changes: Any) -> str:
    """Write a Llama-3.1-8B's config.json, and return its path."""
    path.write_text(json.dumps({**LLAMA_8B, **changes}))
    return str(path)
