"""EXAONE 4: norms of heads, norms after each block instead of before, no rotation in layers without a window."""

from __future__ import annotations

import dataclasses
import functools

import flax.struct
import jax
import numpy as np
from jaxtyping import Array, Float

from jaxserve.layers.attention import AttentionParams, AttentionSettings, self_attention
from jaxserve.layers.batch import KVLayer, KVPools, TokenBatch
from jaxserve.layers.mlp import MlpParams, mlp
from jaxserve.layers.norm import rms_norm
from jaxserve.layers.rope import RopeConfig, Rotation, rotation
from jaxserve.model_source.fields import LAYERS, NORM_EPSILON, Fields
from jaxserve.models import llama
from jaxserve.models.config import FULL, SLIDING, ModelConfig, periodic_layer_types, read_sizes, read_windows, refuse
from jaxserve.models.parameters import Params, ParamSpecs
from jaxserve.models.rope import read_rope
from pallas_kernels.paged_attention import Backend

embed, head = llama.embed, llama.head


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(ModelConfig):
    """The config of the family."""

    norm_eps: float
    rope: RopeConfig
    rotated: tuple[bool, ...]


@flax.struct.dataclass
class LayerParams:
    """The weights of one decoder layer."""

    attention: AttentionParams
    attention_norm: Array
    mlp: MlpParams
    mlp_norm: Array


def parse(fields: Fields) -> Config:
    """Read a config.json. Raises `ConfigError`."""
    sizes = read_sizes(fields)
    refuse(fields, hidden_act="silu", attention_bias=False)
    windows = read_windows(fields, sizes["num_layers"], _layer_types(fields, sizes["num_layers"]), 4096)
    windowed = fields.raw.get("sliding_window", 4096) is not None
    return Config(
        **sizes,
        norm_eps=fields.number("rms_norm_eps", NORM_EPSILON, 1e-5),
        rope=read_rope(fields, sizes["max_position_embeddings"], sizes["head_dim"]),
        rotated=tuple(not windowed or window is not None for window in windows),
        windows=windows,
    )


def _layer_types(fields: Fields, layers: int) -> list[str]:
    """Return the types of layers that the pattern means: a period, or a letter for each layer of a period."""
    pattern = fields.get("sliding_window_pattern", 4)
    if isinstance(pattern, str):
        if not pattern or set(pattern) - {"L", "G"}:
            raise fields.error("sliding_window_pattern", "a whole number, or the letters L (local) and G (global)")
        return [FULL if pattern[i % len(pattern)] == "G" else SLIDING for i in range(layers)]
    return periodic_layer_types(fields.integer("sliding_window_pattern", LAYERS, 4), layers)


def abstract(config: Config, dtype: np.dtype) -> Params:
    """Return the tree of parameters; each leaf is a `ParamSpec`."""
    declare = ParamSpecs(config, dtype)

    def layer(i: int) -> LayerParams:
        name = f"model.layers.{i}"
        attention = f"{name}.self_attn"
        return LayerParams(
            attention=declare.attention(
                attention,
                config.rope,
                q_norm=declare.vector(f"{attention}.q_norm.weight", config.head_dim),
                k_norm=declare.vector(f"{attention}.k_norm.weight", config.head_dim),
            ),
            attention_norm=declare.vector(f"{name}.post_attention_layernorm.weight"),
            mlp=declare.mlp(f"{name}.mlp"),
            mlp_norm=declare.vector(f"{name}.post_feedforward_layernorm.weight"),
        )

    layers = tuple(layer(i) for i in range(config.num_layers))
    return Params(declare.embedding(), layers, declare.vector("model.norm.weight"), declare.head())


def forward(
    config: Config, params: Params, x: Float[Array, "tokens dim"], batch: TokenBatch, kv: KVPools, backend: Backend
) -> tuple[Float[Array, "tokens dim"], KVPools]:
    """Apply the layers and the final norm to embeddings; return hidden states and the updated cache."""
    rope = rotation(batch, config.rope, config.head_dim)
    at = config.kv_layers()
    for i, layer in enumerate(params.layers):
        settings = AttentionSettings(config.norm_eps, backend, config.windows[i])
        with jax.named_scope(f"layer_{i}"):
            x, kv = _layer(x, layer, batch, kv, at[i], rope if config.rotated[i] else None, settings)
    with jax.named_scope("final_norm"):
        return rms_norm(x, params.norm, config.norm_eps), kv


@functools.partial(jax.jit, static_argnames="settings")
def _layer(
    x: Float[Array, "tokens dim"],
    params: LayerParams,
    batch: TokenBatch,
    kv: KVPools,
    at: KVLayer,
    rope: Rotation | None,
    settings: AttentionSettings,
) -> tuple[Float[Array, "tokens dim"], KVPools]:
    attended, kv = self_attention(x, params.attention, batch, kv, at, rope, settings)
    x = x + rms_norm(attended, params.attention_norm, settings.norm_eps)
    return x + rms_norm(mlp(x, params.mlp), params.mlp_norm, settings.norm_eps), kv
