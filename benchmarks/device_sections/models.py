"""Shapes of the measured models; their weights are dummies."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_LLAMA = {"architectures": ["LlamaForCausalLM"], "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
          "max_position_embeddings": 131072, "vocab_size": 128256, "num_attention_heads": 32,
          "num_key_value_heads": 8}  # fmt: skip
_GPT_OSS = {
    "architectures": ["GptOssForCausalLM"], "num_experts_per_tok": 4, "rms_norm_eps": 1e-5, "sliding_window": 128,
    "max_position_embeddings": 131072, "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": [
        "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]},
}  # fmt: skip
# Small models of the same family, with heads of the same size, are compared with plain XLA.
_SMALL = {"vocab_size": 2048, "hidden_size": 512, "intermediate_size": 768, "num_hidden_layers": 4, "head_dim": 64,
          "num_attention_heads": 8, "num_key_value_heads": 2}  # fmt: skip
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
    "gpt-oss-20b": {**_GPT_OSS, "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 24,
                    "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 201088,
                    "num_local_experts": 32, "layer_types": ["sliding_attention", "full_attention"] * 12},
    "Llama small": {**_LLAMA, **_SMALL},
    # All experts are chosen, because else a last bit of the router's logits may choose another one.
    "gpt-oss small": {**_GPT_OSS, **_SMALL, "num_local_experts": 4,
                      "layer_types": ["sliding_attention", "full_attention"] * 2},
}  # fmt: skip
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True}
_TINY = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 16,
         "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512}  # fmt: skip


def config_of(name: str, tiny: bool) -> dict[str, Any]:
    """Return a model's config.json; for a dry run, a tiny model of the same family."""
    own = MODELS[name]
    layers = {"layer_types": own["layer_types"][: _TINY["num_hidden_layers"]]} if "layer_types" in own else {}
    return {**own, **(_TINY | layers if tiny else {})}


def write_model(name: str, tiny: bool, folder: Path, quantization: dict[str, Any] | None = None) -> str:
    """Write a model folder without weights and return its path."""
    quantized = {} if quantization is None else {"quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps({**config_of(name, tiny), **quantized}))
    return str(folder)
