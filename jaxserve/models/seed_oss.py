"""Seed-OSS: Llama's layers, with biases on the projections into attention and, if the config asks, out of it."""

from __future__ import annotations

from jaxserve.model_source.fields import NORM_EPSILON, Fields
from jaxserve.models import llama
from jaxserve.models.read_fields import read_sizes, refuse
from jaxserve.models.rope import read_rope

abstract, embed, layers, head = llama.abstract, llama.embed, llama.layers, llama.head


def parse(fields: Fields) -> llama.Config:
    """Read a config.json. Raises `ConfigError`."""
    sizes = read_sizes(fields, num_key_value_heads=8, head_dim=128, max_position_embeddings=524288)
    refuse(fields, hidden_act="silu")
    return llama.Config(
        **sizes,
        norm_eps=fields.number("rms_norm_eps", NORM_EPSILON, 1e-6),
        rope=read_rope(fields, sizes["max_position_embeddings"], sizes["head_dim"]),
        qkv_bias=fields.boolean("attention_bias", True),
        output_bias=fields.boolean("attention_out_bias", False),
        mlp_bias=fields.boolean("mlp_bias", False),
        windows=(None,) * sizes["num_layers"],
    )
