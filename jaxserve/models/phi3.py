"""Phi-3, 3.5 and 4: a Llama whose projections are stored fused, with LongRoPE, partial rotation and windows."""

from __future__ import annotations

import functools

from jaxserve.errors import ConfigError
from jaxserve.model_source.fields import NORM_EPSILON, Fields
from jaxserve.models import llama
from jaxserve.models.read_fields import read_one_window, read_sizes, refuse
from jaxserve.models.rope import read_rope

abstract = functools.partial(llama.abstract, qkv="qkv_proj", fused="gate_up_proj")
embed, layers, head = llama.embed, llama.layers, llama.head


def parse(fields: Fields) -> llama.Config:
    """Read a config.json. Raises `ConfigError`."""
    sizes = read_sizes(fields)
    refuse(fields, hidden_act="silu", full_attn_mod=1, interpolate_factor=1)
    rope = read_rope(
        fields,
        sizes["max_position_embeddings"],
        sizes["head_dim"],
        fraction=1.0,
        old_names={"su": "longrope", "yarn": "longrope"},
    )
    if rope.kind not in ("default", "longrope"):
        raise ConfigError(f"{fields.where}: rope_scaling of type {rope.kind!r} is not supported for Phi; longrope is")
    return llama.Config(
        **sizes,
        norm_eps=fields.number("rms_norm_eps", NORM_EPSILON, 1e-5),
        rope=rope,
        windows=read_one_window(fields, sizes["num_layers"]),
    )
