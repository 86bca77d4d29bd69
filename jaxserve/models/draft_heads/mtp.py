"""Multi-token prediction (DeepSeek-AI 2024, DeepSeek-V3): an additional layer of a checkpoint that drafts.

It is a layer of its family with attention, and with experts if the model has any.

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
            "R1, GLM-4.5, 4.6 and 4.7-Flash, Qwen3-Next and Qwen3.5 have one. Another method is ngram"
        )
    drafts = model.names.drafts
    layer, prefix = (name.format(model.num_layers) for name in (drafts.layer, drafts.prefix))
    return dataclasses.replace(
        model,
        architecture=MTP,
        num_layers=1,
        pooling=None,
        dense=(not model.experts,),
        windows=(None,),
        delta=None,
        delta_layers=frozenset(),
        unused=(),
        names=dataclasses.replace(model.names, layer=layer, drafts=dataclasses.replace(drafts, prefix=prefix)),
    )


def prefix_of(model: ModelConfig) -> str:
    """Return what the names of the tensors begin with that a checkpoint has for a model's drafts."""
    return config_of(model).names.drafts.prefix


def abstract(model: LaidOutModel[common.Config], dtype: np.dtype) -> Params:
    """Return the tree of parameters; each leaf is a `ParamSpec`."""
    config = model.config
    declare, names = ParamSpecs(model, dtype), config.names.drafts
    copies = tuple(f"{names.prefix}{copy}.weight" for copy in names.copies)
    norm = common.norm_of(config, declare, f"{names.prefix}{names.norm}")
    return Params(
        embedding_norm=common.norm_of(config, declare, f"{names.prefix}{names.embedding_norm}"),
        features_norm=common.norm_of(config, declare, f"{names.prefix}{names.features_norm}"),
        join=declare.matrix(f"{names.prefix}{names.join}.weight", config.hidden_size, 2 * config.hidden_size),
        layer=common.layer_params(model, declare, 0),
        norm=dataclasses.replace(norm, unused=copies),
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
    if not config.drafts_see_first:
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
