"""Ministral 3: Llama's layers, with queries that grow with the logarithm of their position."""

from __future__ import annotations

import dataclasses

from jaxtyping import Array, Float

from jaxserve.layers.batch import TokenBatch
from jaxserve.layers.rope import query_scale
from jaxserve.model_source.fields import NON_NEGATIVE, NORM_EPSILON, Fields
from jaxserve.models import llama
from jaxserve.models.decoder import ApplyLayer, layer_function
from jaxserve.models.layout import LaidOutModel
from jaxserve.models.parameters import Params
from jaxserve.models.read_fields import read_one_window, read_sizes, refuse
from jaxserve.models.rope import read_rope
from pallas_kernels.paged_attention import Backend

abstract, embed, head = llama.abstract, llama.embed, llama.head


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(llama.Config):
    """The config of the family."""

    query_growth: float


def parse(fields: Fields) -> Config:
    """Read a config.json. Raises `ConfigError`."""
    sizes = read_sizes(fields, head_dim=128, num_key_value_heads=8, max_position_embeddings=262144)
    refuse(fields, hidden_act="silu", attention_bias=False)
    rope = fields.object("rope_parameters")
    growth = Fields(rope, f"{fields.where}: rope_parameters").number("llama_4_scaling_beta", NON_NEGATIVE, 0.0)
    return Config(
        **sizes,
        norm_eps=fields.number("rms_norm_eps", NORM_EPSILON, 1e-5),
        rope=read_rope(
            fields, sizes["max_position_embeddings"], sizes["head_dim"], theta=1e6, known=("llama_4_scaling_beta",)
        ),
        query_growth=growth,
        windows=read_one_window(fields, sizes["num_layers"]),
    )


def layers(
    model: LaidOutModel[Config], params: Params, x: Float[Array, "tokens dim"], batch: TokenBatch, backend: Backend
) -> ApplyLayer:
    """Return the function that applies a layer."""
    config, ropes = model.config, [model.rotation(batch)] * model.config.num_layers
    scale = query_scale(batch.positions, config.query_growth, config.rope.original_max_position)
    return layer_function(model, batch, backend, ropes, query_scale=scale)
