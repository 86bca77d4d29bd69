"""The Granite family: Granite 3, and Granite 4 without Mamba layers and experts, with or without rotation.

They are Llamas that multiply embeddings, attention scores and the output of each block by constants, and divide logits.
"""

from __future__ import annotations

import dataclasses

import numpy as np
from jaxtyping import Array, Float, Int

from jaxserve.errors import ConfigError
from jaxserve.layers import embedding
from jaxserve.layers.batch import TokenBatch
from jaxserve.model_source.fields import NON_NEGATIVE, NORM_EPSILON, POSITIVE, WIDTH, Fields
from jaxserve.models import llama
from jaxserve.models.decoder import ApplyLayer, layer_function, times
from jaxserve.models.layout import LaidOutModel
from jaxserve.models.parameters import Params
from jaxserve.models.read_fields import FULL, read_sizes, refuse
from jaxserve.models.rope import read_rope
from pallas_kernels.paged_attention import Backend


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(llama.Config):
    """The config of the family; `shared_mlp` tells whether the MLP's tensors have Granite 4's names."""

    rotates: bool
    shared_mlp: bool
    embedding_multiplier: float
    attention_multiplier: float
    residual_multiplier: float
    logits_scaling: float


def parse(fields: Fields) -> Config:
    """Read a config.json. Raises `ConfigError`."""
    sizes = read_sizes(fields)
    refuse(fields, hidden_act="silu")
    hybrid = sizes["architecture"] == "GraniteMoeHybridForCausalLM"
    if hybrid:
        _refuse_hybrid(fields)
        sizes["intermediate_size"] = fields.integer("shared_intermediate_size", WIDTH, 1024)
    biased = fields.boolean("attention_bias", False)
    return Config(
        **sizes,
        windows=(None,) * sizes["num_layers"],
        norm_eps=fields.number("rms_norm_eps", NORM_EPSILON, 1e-6),
        rope=read_rope(fields, sizes["max_position_embeddings"], sizes["head_dim"]),
        rotates=not hybrid or fields.text("position_embedding_type", "nope") == "rope",
        qkv_bias=biased,
        output_bias=biased,
        mlp_bias=not hybrid and fields.boolean("mlp_bias", False),
        shared_mlp=hybrid,
        embedding_multiplier=fields.number("embedding_multiplier", POSITIVE, 1.0),
        attention_multiplier=fields.number("attention_multiplier", POSITIVE, 1.0),
        residual_multiplier=fields.number("residual_multiplier", POSITIVE, 1.0),
        logits_scaling=fields.number("logits_scaling", POSITIVE, 1.0),
    )


def _refuse_hybrid(fields: Fields) -> None:
    """Raise `ConfigError` if a Granite 4 has layers other than attention, or experts."""
    layer_types = fields.texts("layer_types") or ["mamba"]
    if other := set(layer_types) - {"attention", FULL}:
        raise ConfigError(
            f"{fields.where}: layer_types with {', '.join(sorted(other))} are not supported, Mamba layers among them; "
            "the granite-4.0 models without -h- in their name have attention alone"
        )
    if experts := fields.integer("num_local_experts", NON_NEGATIVE, 8):
        raise ConfigError(f"{fields.where}: num_local_experts={experts}: experts are not supported; only 0 is")
    refuse(fields, normalization_function="rmsnorm")
    if fields.text("position_embedding_type", "nope") not in ("rope", "nope"):
        raise fields.error("position_embedding_type", "rope or nope")
    # These say nothing about a model without experts and Mamba layers.
    for name in ("num_experts_per_tok", "output_router_logits", "router_aux_loss_coef"):
        fields.get(name)
    fields.read.update(name for name in fields.raw if name.startswith("mamba_"))


def abstract(model: LaidOutModel[Config], dtype: np.dtype) -> Params:
    """Return the tree of parameters; each leaf is a `ParamSpec`."""
    shared = {"block": "shared_mlp", "fused": "input_linear", "down": "output_linear"}
    return llama.abstract(model, dtype, **shared if model.config.shared_mlp else {})


def embed(model: LaidOutModel[Config], params: Params, batch: TokenBatch) -> Float[Array, "tokens dim"]:
    """Return the multiplied embeddings of the batch's tokens."""
    return times(embedding.embed(batch.tokens, params.embedding), model.config.embedding_multiplier)


def layers(
    model: LaidOutModel[Config], params: Params, x: Float[Array, "tokens dim"], batch: TokenBatch, backend: Backend
) -> ApplyLayer:
    """Return the function that applies a layer."""
    config = model.config
    ropes = [model.rotation(batch) if config.rotates else None] * config.num_layers
    multiplier, scale = config.residual_multiplier, config.attention_multiplier
    return layer_function(model, batch, backend, ropes, scale=scale, multiplier=multiplier)


def head(
    model: LaidOutModel[Config],
    params: Params,
    hidden: Float[Array, "rows dim"],
    num_rows: Int[Array, ""] | None = None,
) -> Float[Array, "rows vocab_shard"]:
    """Return the logits of hidden states, in float32: of the first `num_rows` only, if it is given."""
    return embedding.logits(hidden, params.head, num_rows, change=lambda x: x / model.config.logits_scaling)
