"""What encoders share: their embeddings, and layers that normalize the sum after each block.

A family reads its config into `Config`, and names the tensors of `Params`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxserve.errors import ConfigError
from jaxserve.layers import embedding
from jaxserve.layers.attention import AttentionParams, AttentionSettings, self_attention
from jaxserve.layers.batch import KVLayer, KVPools, LayerOutput, TokenBatch
from jaxserve.layers.mlp import ACTIVATIONS, MlpParams, mlp
from jaxserve.layers.rope import Rotation
from jaxserve.model_source.fields import Fields, abbreviate
from jaxserve.models import parameters
from jaxserve.models.config import ModelConfig
from jaxserve.models.decoder import ApplyLayer, layer_function, norm
from jaxserve.models.layout import LaidOutModel
from jaxserve.models.parameters import LayerNormParams, ParamSpecs
from jaxserve.models.read_fields import refuse
from pallas_kernels.dispatch import Backend


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(ModelConfig):
    """The config of an encoder.

    It adds the row of each token's position, `position_offset` rows after the first, if there is a table with this many
    `position_rows`, and one of the `token_types` rows that tell the second text of a pair from the first.
    """

    activation: str
    position_rows: int = 0
    position_offset: int = 0
    token_types: int = 0
    generates: bool = False
    bidirectional: bool = True


@flax.struct.dataclass
class LayerParams:
    """The weights of a layer."""

    attention: AttentionParams
    attention_norm: LayerNormParams
    mlp: MlpParams
    mlp_norm: LayerNormParams


@flax.struct.dataclass
class Params(parameters.Params):
    """All weights of an encoder; `distance_bias` has a row for each range of distances, and a column for each head."""

    embedding_norm: LayerNormParams | None = None
    positions: Float[Array, "rows dim"] | None = None
    token_types: Float[Array, "rows dim"] | None = None
    distance_bias: Float[Array, "ranges heads"] | None = None


def read_activation(fields: Fields, name: str, default: str = "gelu") -> str:
    """Return an activation by its name in Hugging Face's configs. Raises `ConfigError`."""
    found = fields.text(name, default)
    if found not in ACTIVATIONS:
        raise ConfigError(
            f"{fields.where}: {name}={abbreviate(found)} is not supported; supported: {', '.join(ACTIVATIONS)}"
        )
    return found


def refuse_decoder(fields: Fields) -> None:
    """Refuse models that were made of encoders and are none, and read the fields that matter only for training."""
    refuse(fields, is_decoder=False, add_cross_attention=False)
    for name in ("attention_probs_dropout_prob", "hidden_dropout_prob", "classifier_dropout", "tie_word_embeddings"):
        fields.get(name)


def embed(model: LaidOutModel[Config], params: Params, batch: TokenBatch) -> Float[Array, "tokens dim"]:
    """Return the normalized sum of the embeddings of the batch's tokens, of their positions and of their types."""
    config = model.config
    word = embedding.embed(batch.tokens, params.embedding)
    x = word.astype(jnp.float32)
    if params.positions is not None:
        x += params.positions[batch.positions + config.position_offset].astype(jnp.float32)
    if params.token_types is not None:
        types = 0 if batch.token_types is None or config.token_types == 1 else batch.token_types
        x += params.token_types[types].astype(jnp.float32)
    return norm(x, params.embedding_norm, config.norm_eps).astype(word.dtype)


def layers(
    model: LaidOutModel[Config], params: Params, x: Float[Array, "tokens dim"], batch: TokenBatch, backend: Backend
) -> ApplyLayer:
    """Return the function that applies a layer that rotates nothing."""
    return post_norm_layers(model, batch, backend, None)


def post_norm_layers(
    model: LaidOutModel[Config],
    batch: TokenBatch,
    backend: Backend,
    rope: Rotation | None,
    distance_bias: Float[Array, "heads distances"] | None = None,
) -> ApplyLayer:
    """Return the function that applies a layer with a rotation, or a bias by distance, that all layers share."""
    ropes = [rope] * model.config.num_layers
    activation = model.config.activation
    return layer_function(
        model, batch, backend, ropes, layer=_layer, distance_bias=distance_bias, activation=activation
    )


@functools.partial(jax.jit, static_argnames=("settings", "activation"))
def _layer(
    x: Float[Array, "tokens dim"],
    params: LayerParams,
    batch: TokenBatch,
    kv: KVPools,
    at: KVLayer,
    rope: Rotation | None,
    settings: AttentionSettings,
    *,
    distance_bias: Float[Array, "heads distances"] | None,
    activation: str,
) -> LayerOutput:
    """Apply attention and the feed-forward block; the sum of each with its input is normalized."""
    eps = settings.norm_eps
    attended, kv = self_attention(x, params.attention, batch, kv, at, rope, settings, distance_bias=distance_bias)
    x = norm(x + attended, params.attention_norm, eps)
    return LayerOutput(norm(x + mlp(x, params.mlp, activation), params.mlp_norm, eps), kv)


def declare_encoder(
    declare: ParamSpecs,
    config: Config,
    name: str,
    layer: Callable[[str], Any],
    *,
    unused: tuple[str, ...],
    embedding_norm: str = "embeddings.LayerNorm",
    distance_bias: Any = None,
) -> Params:
    """Return all weights of an encoder with the layers under `name`, whose weights are those that `layer` returns.

    The norm of the embeddings is called `embedding_norm`. A checkpoint may have the `unused` tensors, too.
    """
    word = declare.embedding("embeddings.word_embeddings.weight")
    tables = {"position": config.position_rows, "token_type": config.token_types}
    positions, types = (
        declare.table(f"embeddings.{kind}_embeddings.weight", rows, config.hidden_size) if rows else None
        for kind, rows in tables.items()
    )
    return Params(
        dataclasses.replace(word, unused=unused),
        tuple(layer(f"{name}.{i}") for i in range(config.num_layers)),
        norm=None,
        output=None,
        embedding_norm=declare.layer_norm(embedding_norm, bias=True),
        positions=positions,
        token_types=types,
        distance_bias=distance_bias,
    )
