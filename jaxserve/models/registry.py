"""Maps each supported architecture to the model family that implements it.

A family's module has `parse(fields) -> config`, `abstract(model, dtype)`, `embed(model, params, batch)`,
`layers(model, params, x, batch, backend)` and `head(model, params, hidden)`; docs/adding-a-model.md shows one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from types import ModuleType
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Float

from jaxserve.errors import ConfigError
from jaxserve.layers.batch import KVPools, LayerOutput, TokenBatch
from jaxserve.model_source.architectures import model_class_of
from jaxserve.model_source.fields import Fields, abbreviate
from jaxserve.model_source.pooling import ModelTask
from jaxserve.models import (
    cohere,
    encoders,
    exaone4,
    gemma,
    gemma4,
    glm,
    granite,
    llama,
    ministral3,
    mixtures,
    olmo,
    phi3,
    qwen3_next,
    seed_oss,
    smollm3,
    starcoder2,
)
from jaxserve.models.config import ModelConfig
from jaxserve.models.decoder import apply_layers, norm
from jaxserve.models.draft_heads import eagle, mtp
from jaxserve.models.layout import AnyModel
from jaxserve.models.parameters import ParamSpecs
from jaxserve.models.read_fields import refuse_unread
from jaxserve.quant import read_quantization
from pallas_kernels.paged_attention import Backend

_FAMILIES: dict[str, ModuleType] = {
    "BertModel": encoders.bert,
    "CamembertModel": encoders.bert,
    "Cohere2ForCausalLM": cohere,
    "DeepseekV2ForCausalLM": mixtures.deepseek,
    "DeepseekV3ForCausalLM": mixtures.deepseek,
    "DistilBertModel": encoders.bert,
    "Exaone4ForCausalLM": exaone4,
    "Gemma2ForCausalLM": gemma,
    "Gemma3ForCausalLM": gemma,
    "Gemma4ForCausalLM": gemma4,
    "Gemma4UnifiedForCausalLM": gemma4,
    "GteModel": encoders.gte,
    "Glm4ForCausalLM": glm,
    "Glm4MoeForCausalLM": mixtures.glm,
    "Glm4MoeLiteForCausalLM": mixtures.deepseek,
    "GlmForCausalLM": glm,
    "GptOssForCausalLM": mixtures.gpt_oss,
    "GraniteForCausalLM": granite,
    "GraniteMoeHybridForCausalLM": granite,
    "LlamaForCausalLM": llama,
    "MiniMaxM2ForCausalLM": mixtures.minimax,
    "Ministral3ForCausalLM": ministral3,
    "MistralForCausalLM": llama,
    "MixtralForCausalLM": mixtures.mixtral,
    "Olmo2ForCausalLM": olmo,
    "Olmo3ForCausalLM": olmo,
    "OlmoeForCausalLM": mixtures.olmoe,
    "Phi3ForCausalLM": phi3,
    "Qwen2ForCausalLM": llama,
    "Qwen2MoeForCausalLM": mixtures.qwen,
    "Qwen3ForCausalLM": llama,
    "Qwen3MoeForCausalLM": mixtures.qwen,
    "Qwen3NextForCausalLM": qwen3_next,
    "Qwen3_5ForCausalLM": qwen3_next,
    "Qwen3_5MoeForCausalLM": qwen3_next,
    "MPNetModel": encoders.mpnet,
    "ModernBertModel": encoders.modernbert,
    "NewModel": encoders.gte,
    "NomicBertModel": encoders.nomic,
    "RobertaModel": encoders.bert,
    "SeedOssForCausalLM": seed_oss,
    "SmolLM3ForCausalLM": smollm3,
    "Starcoder2ForCausalLM": starcoder2,
    "XLMRobertaModel": encoders.bert,
}

# Decoders whose layers may attend to later tokens, too: they have nothing that `packed_attention` lacks
_BIDIRECTIONAL = {
    "Gemma3ForCausalLM",
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
}

# Heads that draft for a model, and are no models themselves
_DRAFT_HEADS: dict[str, ModuleType] = {eagle.EAGLE: eagle, eagle.EAGLE3: eagle, mtp.MTP: mtp}

# Models with encoders of images or sound: the text model's architecture by the `model_type` of its `text_config`.
_TEXT_MODELS: dict[str, dict[str, str]] = {
    "Gemma3ForConditionalGeneration": {"gemma3_text": "Gemma3ForCausalLM"},
    "Gemma4ForConditionalGeneration": {"gemma4_text": "Gemma4ForCausalLM"},
    "Gemma4UnifiedForConditionalGeneration": {"gemma4_unified_text": "Gemma4UnifiedForCausalLM"},
    "Mistral3ForConditionalGeneration": {"ministral3": "Ministral3ForCausalLM", "mistral": "MistralForCausalLM"},
    "Qwen3_5ForConditionalGeneration": {"qwen3_5_text": "Qwen3_5ForCausalLM"},
    "Qwen3_5MoeForConditionalGeneration": {"qwen3_5_moe_text": "Qwen3_5MoeForCausalLM"},
}

_INDEXED = "its layers choose the tokens that they attend to by an indexer, for which there is no kernel yet"
_CHUNKED = "most of its layers attend within chunks of the context, for which there is no KV group yet"
# Why some architectures aren't supported, or what to serve instead of a checkpoint that comes with its own code.
_REASONS = {
    **dict.fromkeys(eagle.NAMES, "it is a head that drafts for a model: give it as speculative_model"),
    **dict.fromkeys(("DeepseekV32ForCausalLM", "GlmMoeDsaForCausalLM"), _INDEXED),
    "ChatGLMModel": "GLM-4 is served from the checkpoints whose names end in -hf",
    "DeepseekV4ForCausalLM": "its layers attend to compressed tokens, for which there is no KV group yet",
    "Llama4ForCausalLM": _CHUNKED,
    "Llama4ForConditionalGeneration": _CHUNKED,
}

_ENCODERS = "of encoders, BERT, RoBERTa, DistilBERT, MPNet, ModernBERT, NomicBERT, GTE and EuroBERT are"
# The beginnings of the names of encoders that aren't
_OTHER_ENCODERS = ("Albert", "Deberta", "Electra", "Jina", "NeoBERT", "XLMRobertaXL")
_OTHER_STATE = "it has {}: layers that keep states, of which only gated delta nets have a kernel (Qwen3-Next, Qwen3.5)"
# Fields of models that say why their architecture isn't supported, the most telling first
_TELLING_FIELDS = {
    "linear_attn_config": _OTHER_STATE.format("Kimi delta attention"),
    **dict.fromkeys(("mamba_d_state", "ssm_state_size", "state_size"), _OTHER_STATE.format("Mamba layers")),
    "conv_L_cache": _OTHER_STATE.format("short convolutions"),
    **dict.fromkeys(
        ("linear_attn_alpha_factor", "layernorm_linear_attention_alpha"), _OTHER_STATE.format("lightning attention")
    ),
    "linear_conv_kernel_dim": "of the models with gated delta nets, Qwen3-Next, Qwen3.5 and Qwen3.6 are",
    "kv_lora_rank": "of the models with multi-head latent attention, DeepSeek-V2 and V3, Kimi-K2 and GLM-4.7-Flash are",
}


def parse_model_config(
    raw: Mapping[str, Any], where: str = "config.json", task: ModelTask | None = None
) -> ModelConfig:
    """Return the config of a model for a task, by default to generate, from its config.json in the file `where`.

    Raises `ConfigError` naming the architecture or the field that is missing, out of range or not supported.
    """
    model_class = model_class_of(raw, where)
    name, architecture = model_class.name, model_class.family
    if architecture not in _FAMILIES and architecture not in _TEXT_MODELS:
        raise ConfigError(f"architecture {abbreviate(name)} is not supported; {_why_not(name, raw)}")
    fields = Fields({**raw, "architectures": [architecture]}, where)
    quantization = read_quantization(fields)
    if architecture in _TEXT_MODELS:
        text = fields.object("text_config")
        kinds = _TEXT_MODELS[architecture]
        kind = Fields(text, f"{where}: text_config").text("model_type", next(iter(kinds)))
        if kind not in kinds:
            raise ConfigError(f"{where}: text_config with model_type {abbreviate(kind)} is not supported")
        # `tie_word_embeddings` may stand beside `text_config` instead of in it
        tied = {"tie_word_embeddings": fields.get("tie_word_embeddings")}
        architecture = kinds[kind]
        fields = Fields({**tied, **text, "architectures": [architecture]}, f"{where}: text_config")
        quantization = read_quantization(fields) or quantization
    if model_class.bidirectional:
        fields.get("use_bidirectional_attention")
    config: ModelConfig = _FAMILIES[architecture].parse(fields)
    refuse_unread(fields)
    config = dataclasses.replace(config, quantization=quantization, bidirectional=model_class.bidirectional)
    if config.bidirectional and architecture not in _BIDIRECTIONAL and not model_class.is_encoder:
        raise ConfigError(
            f"{fields.where}: architecture {abbreviate(name)} with attention to later tokens (is_causal, "
            f"use_bidirectional_attention) is not supported; supported: encoders, and "
            f"{', '.join(sorted(_BIDIRECTIONAL))}"
        )
    if task is None:
        return config
    pooling = None if task.pooled is None else task.pooled.pooling
    return dataclasses.replace(config, generates=task.generates, pooling=pooling)


def _why_not(architecture: str, raw: Mapping[str, Any]) -> str:
    """Return why an architecture isn't supported, or which ones are."""
    if architecture in _REASONS:
        return _REASONS[architecture]
    if architecture.startswith(_OTHER_ENCODERS):
        return _ENCODERS
    text = raw.get("text_config")
    fields = {*raw, *(text if isinstance(text, dict) else ())}
    for field, reason in _TELLING_FIELDS.items():
        if field in fields:
            return reason
    return "supported: " + ", ".join(sorted([*_FAMILIES, *_TEXT_MODELS]))


def family(model: AnyModel) -> ModuleType:
    """Return the module of a model's family, or of its head if it drafts for a model."""
    architecture = model.config.architecture
    return _FAMILIES.get(architecture) or _DRAFT_HEADS[architecture]


def abstract_params(model: AnyModel, dtype: np.dtype) -> Any:
    """Return the tree of a model's parameters; each leaf is a `ParamSpec`."""
    params, config = family(model).abstract(model, dtype), model.config
    if config.generates and config.pooling is None:
        return params
    return dataclasses.replace(params, pooled=ParamSpecs(model, dtype).pooled(), has_head=config.generates)


def stage_params(params: Any, model: AnyModel, *, embeds: bool = False) -> Any:
    """Return the parameters, or the specs, that a stage has of a whole model's, with None for all others.

    Those of layers keep their places, so that each keeps its path. The embedding is with the first stage, with the last
    one if it is also the head, and where the stage `embeds` for a head that drafts. The layers after pooling are with
    the last stage.
    """
    if model.stage is None:
        return params
    layers = tuple(layer if i in model.layers else None for i, layer in enumerate(params.layers))
    tied = model.draws and params.output is None
    kept: dict[str, Any] = {"embedding": params.embedding if model.embeds or tied or embeds else None, "layers": layers}
    if not model.is_last:
        kept |= {"norm": None, "output": None, "pooled": ()}
    return dataclasses.replace(params, **kept)


def forward(
    model: AnyModel, params: Any, x: Float[Array, "tokens dim"], batch: TokenBatch, kv: KVPools, backend: Backend
) -> LayerOutput:
    """Apply the layers of a model and its last norm to embeddings; those of a stage, to what the stage before gave.

    Only the last stage has the norm.
    """
    own = model.layers
    layers = params.layers[own.start : own.stop]
    out = apply_layers(model, family(model).layers(model, params, x, batch, backend), layers, x, kv, own)
    if not model.is_last:
        return out
    with jax.named_scope("final_norm"):
        return dataclasses.replace(out, hidden=norm(out.hidden, params.norm, model.config.norm_eps))


def parse_draft_head(raw: Mapping[str, Any], where: str, method: str, tensors: Collection[str]) -> ModelConfig:
    """Return the config of a head that drafts by `method`, from its config.json, read from the file `where`.

    `tensors` are the names in its checkpoint, none if it isn't here. Raises `ConfigError`.
    """
    fields = Fields(raw, where)
    config = eagle.parse(fields, method, tensors)
    return dataclasses.replace(config, quantization=read_quantization(fields))


def is_draft_head(config: ModelConfig) -> bool:
    """Return whether a config describes a head that drafts."""
    return config.architecture in _DRAFT_HEADS
