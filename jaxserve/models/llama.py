"""The Llama family: Llama 2 and 3, SmolLM2, Mistral (windows), Qwen2 and 2.5 (biases), Qwen3 (norms of heads)."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from jaxtyping import Array, Float, Int

from jaxserve.errors import ConfigError
from jaxserve.layers import embedding
from jaxserve.layers.batch import TokenBatch
from jaxserve.model_source.fields import LAYERS, NORM_EPSILON, Fields, Range
from jaxserve.models.config import ModelConfig
from jaxserve.models.decoder import ApplyLayer, LayerParams, layer_function
from jaxserve.models.layout import LaidOutModel
from jaxserve.models.parameters import Params, ParamSpecs
from jaxserve.models.read_fields import FULL, SLIDING, read_one_window, read_sizes, read_windows, refuse
from jaxserve.models.rope import read_rope
from pallas_kernels.paged_attention import Backend


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(ModelConfig):
    """The config of the family."""

    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False


def parse(fields: Fields) -> Config:
    """Read a config.json. Raises `ConfigError`."""
    sizes = read_sizes(fields)
    refuse(fields, hidden_act="silu")
    kind = sizes["architecture"].removesuffix("ForCausalLM")
    biased = fields.boolean("attention_bias", False)
    return Config(
        **sizes,
        norm_eps=fields.number("rms_norm_eps", NORM_EPSILON, 1e-6),
        rope=read_rope(fields, sizes["max_position_embeddings"], sizes["head_dim"]),
        qkv_bias=biased or kind == "Qwen2",
        output_bias=biased and kind in ("Llama", "Qwen3"),
        mlp_bias=fields.boolean("mlp_bias", False),
        qk_norm=kind == "Qwen3",
        windows=_windows(fields, kind, sizes["num_layers"]),
    )


def _windows(fields: Fields, kind: str, layers: int) -> tuple[int | None, ...]:
    if kind == "Mistral":
        return read_one_window(fields, layers)
    if kind == "Llama" and fields.get("sliding_window") is not None:
        raise ConfigError(f"sliding_window={fields.get('sliding_window')} is not a field of the Llama architecture")
    asked = fields.boolean("use_sliding_window", False)
    full = fields.integer("max_window_layers", Range(0, LAYERS.most), 28)
    return read_windows(fields, layers, [SLIDING if asked and i >= full else FULL for i in range(layers)])


def abstract(
    model: LaidOutModel[Config], dtype: np.dtype, *, qkv: str | None = None, block: str = "mlp", **mlp: Any
) -> Params:
    """Return the tree of parameters; each leaf is a `ParamSpec`.

    `qkv` is the name of one projection for queries, keys and values. `block` is the name of the feed-forward block, and
    `mlp` has those of its projections, as `ParamSpecs.mlp` takes them.
    """
    config = model.config
    declare = ParamSpecs(model, dtype)

    def layer(name: str) -> LayerParams:
        norms = [declare.vector(f"{name}.self_attn.{x}_norm.weight", config.head_dim) for x in "qk" if config.qk_norm]
        return LayerParams(
            attention_norm=declare.vector(f"{name}.input_layernorm.weight"),
            attention=declare.attention(
                f"{name}.self_attn",
                config.rope,
                qkv_bias=config.qkv_bias,
                output_bias=config.output_bias,
                fused=qkv,
                **dict(zip(("q_norm", "k_norm"), norms)),
            ),
            attended_norm=None,
            mlp_norm=declare.vector(f"{name}.post_attention_layernorm.weight"),
            mlp=declare.mlp(f"{name}.{block}", bias=config.mlp_bias, **mlp),
            mlp_output_norm=None,
        )

    return declare.decoder(layer)


def embed(model: LaidOutModel[Config], params: Params, batch: TokenBatch) -> Float[Array, "tokens dim"]:
    """Return the embeddings of the batch's tokens."""
    return embedding.embed(batch.tokens, params.embedding)


def layers(
    model: LaidOutModel[Config], params: Params, x: Float[Array, "tokens dim"], batch: TokenBatch, backend: Backend
) -> ApplyLayer:
    """Return the function that applies a layer."""
    return layer_function(model, batch, backend)


def head(
    model: LaidOutModel[Config],
    params: Params,
    hidden: Float[Array, "rows dim"],
    num_rows: Int[Array, ""] | None = None,
) -> Float[Array, "rows vocab_shard"]:
    """Return the logits of hidden states, in float32: of the first `num_rows` only, if it is given."""
    return embedding.logits(hidden, params.head, num_rows)
