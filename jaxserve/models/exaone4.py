"""EXAONE 4: norms of heads, norms after each block instead of before, no rotation in layers without a window."""

from __future__ import annotations

import dataclasses

import numpy as np
from jaxtyping import Array, Float

from jaxserve.layers.batch import TokenBatch
from jaxserve.model_source.fields import LAYERS, NORM_EPSILON, Fields
from jaxserve.models import llama
from jaxserve.models.config import ModelConfig
from jaxserve.models.decoder import ApplyLayer, layer_function
from jaxserve.models.layout import LaidOutModel
from jaxserve.models.olmo import LayerParams, norms_last
from jaxserve.models.parameters import Params, ParamSpecs
from jaxserve.models.read_fields import FULL, SLIDING, periodic_layer_types, read_sizes, read_windows, refuse
from jaxserve.models.rope import read_rope
from pallas_kernels.paged_attention import Backend

embed, head = llama.embed, llama.head


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(ModelConfig):
    """The config of the family."""

    rotated: tuple[bool, ...]


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
    """Return the type of each layer. The pattern is a period, or a letter for each layer of a period."""
    pattern = fields.get("sliding_window_pattern", 4)
    if isinstance(pattern, str):
        if not pattern or set(pattern) - {"L", "G"}:
            raise fields.error("sliding_window_pattern", "a whole number, or the letters L (local) and G (global)")
        return [FULL if pattern[i % len(pattern)] == "G" else SLIDING for i in range(layers)]
    return periodic_layer_types(fields.integer("sliding_window_pattern", LAYERS, 4), layers)


def abstract(model: LaidOutModel[Config], dtype: np.dtype) -> Params:
    """Return the tree of parameters; each leaf is a `ParamSpec`."""
    config = model.config
    declare = ParamSpecs(model, dtype)

    def layer(name: str) -> LayerParams:
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

    return declare.decoder(layer)


def layers(
    model: LaidOutModel[Config], params: Params, x: Float[Array, "tokens dim"], batch: TokenBatch, backend: Backend
) -> ApplyLayer:
    """Return the function that applies a layer."""
    rope = model.rotation(batch)
    ropes = [rope if rotated else None for rotated in model.config.rotated]
    return layer_function(model, batch, backend, ropes, layer=norms_last)
