"""Multi-token prediction (DeepSeek-AI 2024, DeepSeek-V3): an additional layer of a checkpoint that drafts.

The layer uses the model's embedding and head, so their copies in the checkpoint aren't read.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import flax.struct
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxserve.errors import ConfigError
from jaxserve.layers.batch import KVPools, LayerOutput, TokenBatch
from jaxserve.layers.linear import linear
from jaxserve.layers.norm import rms_norm
from jaxserve.models.config import ModelConfig
from jaxserve.models.decoder import LayerParams, apply_layers
from jaxserve.models.layout import LaidOutModel
from jaxserve.models.mixtures import common
from jaxserve.models.parameters import ParamSpecs
from pallas_kernels.paged_attention import Backend

MTP = "MultiTokenPrediction"


@flax.struct.dataclass
class Params:
    """The weights of the layer, and the weights that join embeddings and features before it."""

    embedding_norm: Array
    features_norm: Array
    join: Array
    layer: LayerParams
    norm: Array


def config_of(model: ModelConfig) -> common.Config:
    """Return the config of a model's layer that drafts. Raises `ConfigError` if it has none."""
    if not model.draft_layers or not isinstance(model, common.Config):
        raise ConfigError(
            f"speculative_method=mtp: this checkpoint ({model.architecture}) has no layer that drafts; DeepSeek-V3 and "
            "R1, GLM-4.5, 4.6 and 4.7-Flash have one. Another method is ngram"
        )
    return dataclasses.replace(
        model,
        architecture=MTP,
        num_layers=1,
        dense=(False,),
        windows=(None,),
        unused=(),
        first_layer=model.num_layers,
    )


def abstract(model: LaidOutModel[common.Config], dtype: np.dtype) -> Params:
    """Return the tree of parameters; each leaf is a `ParamSpec`."""
    config = model.config
    declare, name = ParamSpecs(model, dtype), f"model.layers.{config.first_layer}"
    copies = (f"{name}.embed_tokens.weight", f"{name}.shared_head.head.weight")
    return Params(
        embedding_norm=declare.vector(f"{name}.enorm.weight"),
        features_norm=declare.vector(f"{name}.hnorm.weight"),
        join=declare.matrix(f"{name}.eh_proj.weight", config.hidden_size, 2 * config.hidden_size),
        layer=common.layer_params(model, declare, 0),
        norm=dataclasses.replace(declare.vector(f"{name}.shared_head.norm.weight"), unused=copies),
    )


def features(model: LaidOutModel[common.Config], params: Params, of_model: LayerOutput) -> Float[Array, "tokens dim"]:
    """Return the hidden states of the model."""
    return of_model.hidden


def forward(
    model: LaidOutModel[common.Config],
    params: Params,
    embedded: Float[Array, "tokens dim"],
    features: Float[Array, "tokens dim"],
    batch: TokenBatch,
    kv: KVPools,
    backend: Backend,
) -> LayerOutput:
    """Apply the layer to tokens, each with the features of the token before it."""
    config = model.config
    eps = config.norm_eps
    embedded = jnp.where(batch.positions[:, None] > 0, embedded, 0)
    parts = rms_norm(embedded, params.embedding_norm, eps), rms_norm(features, params.features_norm, eps)
    x = linear(jnp.concatenate(parts, axis=1), params.join)
    out = apply_layers(model, common.layers(model, params, x, batch, backend), (params.layer,), x, kv)
    return dataclasses.replace(out, hidden=rms_norm(out.hidden, params.norm, eps))


def logits(
    model: LaidOutModel[common.Config],
    params: Params,
    features: Float[Array, "rows dim"],
    of_model: Callable[..., Any],
    num_rows: Int[Array, ""] | None = None,
) -> Float[Array, "rows vocab_shard"]:
    """Return the logits of the model's head: of the first `num_rows` only, if it is given."""
    result: Array = of_model(features, num_rows)
    return result
