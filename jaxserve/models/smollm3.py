"""SmolLM3: a Llama of which some layers, by default each fourth, don't rotate queries and keys.

In variants with windows, the layers without rotation have them.
"""

from __future__ import annotations

import dataclasses

from jaxtyping import Array, Float

from jaxserve.layers.batch import TokenBatch
from jaxserve.model_source.fields import LAYERS, NORM_EPSILON, Fields
from jaxserve.models import llama
from jaxserve.models.decoder import ApplyLayer, layer_function
from jaxserve.models.layout import LaidOutModel
from jaxserve.models.parameters import Params
from jaxserve.models.read_fields import FULL, SLIDING, read_sizes, read_windows, refuse
from jaxserve.models.rope import read_rope
from pallas_kernels.paged_attention import Backend

_THETA = 2_000_000.0

abstract, embed, head = llama.abstract, llama.embed, llama.head


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(llama.Config):
    """The config of the family; `rotates[i]` tells whether layer i rotates."""

    rotates: tuple[bool, ...]


def parse(fields: Fields) -> Config:
    """Read a config.json. Raises `ConfigError`."""
    sizes = read_sizes(fields, num_key_value_heads=4, max_position_embeddings=32768, tie_word_embeddings=True)
    refuse(fields, hidden_act="silu")
    rotates = _rotates(fields, sizes["num_layers"])
    windowed = fields.boolean("use_sliding_window", False)
    fields.get("max_window_layers")  # the model's own config.json has it, and nothing reads it
    bias = fields.boolean("attention_bias", False)
    return Config(
        **sizes,
        norm_eps=fields.number("rms_norm_eps", NORM_EPSILON, 1e-6),
        rope=read_rope(fields, sizes["max_position_embeddings"], sizes["head_dim"], theta=_THETA),
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=fields.boolean("mlp_bias", False),
        windows=read_windows(
            fields, sizes["num_layers"], [SLIDING if windowed and not turns else FULL for turns in rotates]
        ),
        rotates=rotates,
    )


def _rotates(fields: Fields, num_layers: int) -> tuple[bool, ...]:
    """Return which layers rotate; despite its name, `no_rope_layers` has a 1 for these."""
    interval = fields.integer("no_rope_layer_interval", LAYERS, 4)
    listed = fields.get("no_rope_layers", [int((i + 1) % interval != 0) for i in range(num_layers)])
    if not isinstance(listed, list) or len(listed) < num_layers or not all(each in (0, 1) for each in listed):
        raise fields.error("no_rope_layers", f"a list of {num_layers} numbers, 1 for a layer that rotates, else 0")
    return tuple(bool(each) for each in listed[:num_layers])


def layers(
    model: LaidOutModel[Config], params: Params, x: Float[Array, "tokens dim"], batch: TokenBatch, backend: Backend
) -> ApplyLayer:
    """Return the function that applies a layer."""
    rope = model.rotation(batch)
    return layer_function(model, batch, backend, [rope if rotates else None for rotates in model.config.rotates])
