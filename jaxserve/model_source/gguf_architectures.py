"""What is particular to each GGUF architecture: a row for each, by the name that files have in `general.architecture`.

A row says which of Hugging Face's models it is, which metadata and tensors it has besides those of all architectures,
and what llama.cpp's converter changed. `gguf_config` and `weights.gguf` do the work; a new architecture is a new row.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

_QKV, _OUTPUT, _MLP = ("attn_q", "attn_k", "attn_v"), ("attn_output",), ("ffn_gate", "ffn_up", "ffn_down")
_SILU = {"hidden_act": "silu"}
_NOTHING: Mapping[str, Any] = MappingProxyType({})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Architecture:
    """One architecture. Metadata keys are without the architecture's name before them.

    config.json:
        model: its class and type. `windowed_model`: those of a model with sliding windows, where they differ.
        constants: fields that follow from the architecture alone; metadata overrides them.
        implied: returns further fields that follow from the config so far.
        norm_epsilon: the key of the norms' epsilon and its field.
        numbers: optional keys that hold a number, and their fields. `rope_numbers`: fields in `rope_parameters`.
        biases: fields that tell whether all of some tensors of a layer have a bias.
        partial_rotation: whether heads may be rotated in part.
    Sliding windows:
        window_period: each layer with a multiple of this number has full attention, where the file doesn't list them;
            1: all layers have a window; 0: windows aren't supported.
        local_theta: the default base of the rotation in layers with a window; 0: the base of the other layers. None:
            all layers have the same rotation.
    What is checked and what is ignored:
        only: the only supported value of some keys; `ignored` begin keys that change nothing.
        whole_yarn_factor: whether `rope.scaling.attn_factor` is all that YaRN multiplies by, not one factor more.
    Tensors:
        names: Hugging Face's names of a layer's tensors that aren't named as Llama's.
        pairs_adjacent: whether the converter reordered q's and k's rows, so that the two dimensions that a rotation
            turns are side by side. Hugging Face has them half a head apart.
        norm_offset: the number that the converter added to the weights of norms.
    """

    model: tuple[str, str]
    windowed_model: tuple[str, str] | None = None
    constants: Mapping[str, Any] = MappingProxyType(_SILU)
    implied: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda config: _NOTHING
    norm_epsilon: tuple[str, str] = ("attention.layer_norm_rms_epsilon", "rms_norm_eps")
    numbers: Mapping[str, str] = _NOTHING
    rope_numbers: Mapping[str, str] = _NOTHING
    biases: Mapping[str, tuple[str, ...]] = MappingProxyType({"attention_bias": _QKV + _OUTPUT})
    partial_rotation: bool = False
    window_period: int = 0
    local_theta: float | None = None
    only: Mapping[str, Any] = _NOTHING
    ignored: tuple[str, ...] = ()
    whole_yarn_factor: bool = False
    names: Mapping[str, str] = _NOTHING
    pairs_adjacent: bool = False
    norm_offset: float = 0.0


def _query_scale(widest: int) -> Callable[[Mapping[str, Any]], Mapping[str, Any]]:
    """Return what the queries of Gemma are scaled by; the 27B, told by its number of layers, has another than others.

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
_LLAMA_BIASES = {"attention_bias": _QKV + _OUTPUT, "mlp_bias": _MLP}

ARCHITECTURES: Mapping[str, Architecture] = MappingProxyType(
    {
        "llama": Architecture(
            model=("LlamaForCausalLM", "llama"),
            windowed_model=("MistralForCausalLM", "mistral"),
            window_period=1,
            biases=_LLAMA_BIASES,
            pairs_adjacent=True,
        ),
        "qwen2": Architecture(model=("Qwen2ForCausalLM", "qwen2"), biases={"attention_bias": _QKV}),
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
        "gemma3": Architecture(
            model=("Gemma3ForCausalLM", "gemma3_text"),
            constants=_GELU | {"sliding_window_pattern": 1},
            implied=_query_scale(widest=62),
            numbers={"final_logit_softcapping": "final_logit_softcapping"},
            window_period=6,
            local_theta=10000.0,
            names=_SANDWICH,
            norm_offset=1.0,
        ),
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
            constants=_SILU | {"no_rope_layer_interval": 4},
            biases=_LLAMA_BIASES,
            pairs_adjacent=True,
        ),
        "glm4": Architecture(
            model=("Glm4ForCausalLM", "glm4"),
            partial_rotation=True,
            biases={"attention_bias": _QKV},
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
            biases={"use_bias": (*_QKV, *_OUTPUT, "ffn_up", "ffn_down")},
            names={"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"},
        ),
        "mistral3": Architecture(
            model=("Ministral3ForCausalLM", "ministral3"),
            rope_numbers={"attention.temperature_scale": "llama_4_scaling_beta"},
            pairs_adjacent=True,
        ),
        "exaone4": Architecture(
            model=("Exaone4ForCausalLM", "exaone4"),
            constants=_SILU | {"sliding_window": None},
            window_period=4,
            names=_SANDWICH,
        ),
        "seed_oss": Architecture(
            model=("SeedOssForCausalLM", "seed_oss"),
            biases={"attention_bias": _QKV, "attention_out_bias": _OUTPUT, "mlp_bias": _MLP},
            names={"post_attention_norm": "post_attention_layernorm"},
        ),
    }
)
