"""The Llama family; its config covers Llama 2 and 3, Mistral, SmolLM2, Qwen2 and 2.5 (biases), Qwen3 (q/k norms)."""

from __future__ import annotations

import functools
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxserve.layers import embedding
from jaxserve.layers.attention import AttentionParams, AttentionSettings, self_attention
from jaxserve.layers.batch import TokenBatch
from jaxserve.layers.mlp import gated_mlp
from jaxserve.layers.norm import rms_norm
from jaxserve.layers.rope import rotation
from jaxserve.models.config import ModelConfig
from jaxserve.params import Initializer, KVSpec, ParamSpec, TensorMapping
from pallas_kernels.paged_attention import Backend, PagedKV


@flax.struct.dataclass
class LayerParams:
    """The weights of one decoder layer. `gate_up` is `[2, ffn, dim]`."""

    attention_norm: Array
    attention: AttentionParams
    mlp_norm: Array
    gate_up: Array
    down: Array
    gate_up_bias: Array | None
    down_bias: Array | None


@flax.struct.dataclass
class Params:
    """All weights of a model. `output` is None if the head is tied to the embedding."""

    embedding: Array
    layers: tuple[LayerParams, ...]
    norm: Array
    output: Array | None


def abstract(config: ModelConfig, dtype: np.dtype) -> Params:
    """Return the tree of parameters, with a `ParamSpec` in the place of each array."""

    def spec(*dims: tuple[int, str | None], init: Initializer = "normal", **layout: Any) -> Any:
        fan_in = dims[-1][0]
        return ParamSpec(
            tuple(size for size, _ in dims),
            dtype,
            tuple(axis for _, axis in dims),
            init,
            scale=fan_in**-0.5,
            **layout,
        )

    dim, ffn = (config.hidden_size, None), (config.intermediate_size, "mlp")
    vocab, head = (config.padded_vocab_size, "vocab"), (config.head_dim, None)
    padding = config.padded_vocab_size - config.vocab_size
    replicas = config.kv_replicas
    count = config.num_kv_heads * replicas
    kv_heads, group = (count, "kv_heads"), config.num_heads // count
    # Every replica of a KV head computes its keys and values; its queries are divided between the replicas.
    qkv: dict[str, Any] = {"kv_replicas": replicas, "kv_shared": 2}

    def layer() -> LayerParams:
        return LayerParams(
            attention_norm=spec(dim, init="ones"),
            attention=AttentionParams(
                qkv=spec(kv_heads, (group + 2, None), head, dim, inputs=1, **qkv),
                output=spec(dim, kv_heads, (group, None), head, inputs=3, kv_replicas=replicas),
                qkv_bias=spec(kv_heads, (group + 2, None), head, init="zeros", **qkv) if config.qkv_bias else None,
                output_bias=spec(dim, init="zeros") if config.output_bias else None,
                q_norm=spec(head, init="ones") if config.qk_norm else None,
                k_norm=spec(head, init="ones") if config.qk_norm else None,
            ),
            mlp_norm=spec(dim, init="ones"),
            gate_up=spec((2, None), ffn, dim, inputs=1),
            down=spec(dim, ffn, inputs=1),
            gate_up_bias=spec((2, None), ffn, init="zeros") if config.mlp_bias else None,
            down_bias=spec(dim, init="zeros") if config.mlp_bias else None,
        )

    return Params(
        embedding=spec(vocab, dim, padding=padding),
        layers=tuple(layer() for _ in range(config.num_layers)),
        norm=spec(dim, init="ones"),
        output=None if config.tie_word_embeddings else spec(vocab, dim, padding=padding, inputs=1),
    )


def kv_specs(config: ModelConfig) -> tuple[KVSpec, ...]:
    """Return one group for all layers: layers with a sliding window also keep whole sequences, and mask."""
    return (KVSpec(config.num_layers, config.num_kv_heads * config.kv_replicas, config.head_dim),)


def tensor_mappings(config: ModelConfig) -> dict[str, TensorMapping]:
    """Return the mapping of each checkpoint tensor to its parameter, by Hugging Face name."""
    dim, ffn, vocab, head = config.hidden_size, config.intermediate_size, config.vocab_size, config.head_dim
    kv_heads, group = config.num_kv_heads, config.num_heads // config.num_kv_heads
    mappings = {
        "model.embed_tokens.weight": TensorMapping(("embedding",), (vocab, dim), (0, 0)),
        "model.norm.weight": TensorMapping(("norm",), (dim,), (0,)),
    }
    if not config.tie_word_embeddings:
        mappings["lm_head.weight"] = TensorMapping(("output",), (vocab, dim), (0, 0))
    for i in range(config.num_layers):
        at, name = ("layers", i), f"model.layers.{i}."
        attn, mlp = (*at, "attention"), f"{name}mlp."
        mappings[f"{name}input_layernorm.weight"] = TensorMapping((*at, "attention_norm"), (dim,), (0,))
        mappings[f"{name}post_attention_layernorm.weight"] = TensorMapping((*at, "mlp_norm"), (dim,), (0,))
        for part, rows, start in (("q", group, 0), ("k", 1, group), ("v", 1, group + 1)):
            proj = f"{name}self_attn.{part}_proj."
            mappings[f"{proj}weight"] = TensorMapping((*attn, "qkv"), (kv_heads, rows, head, dim), (0, start, 0, 0))
            if config.qkv_bias:
                mappings[f"{proj}bias"] = TensorMapping((*attn, "qkv_bias"), (kv_heads, rows, head), (0, start, 0))
        proj = f"{name}self_attn.o_proj."
        mappings[f"{proj}weight"] = TensorMapping((*attn, "output"), (dim, kv_heads, group, head), (0, 0, 0, 0))
        if config.output_bias:
            mappings[f"{proj}bias"] = TensorMapping((*attn, "output_bias"), (dim,), (0,))
        if config.qk_norm:
            mappings[f"{name}self_attn.q_norm.weight"] = TensorMapping((*attn, "q_norm"), (head,), (0,))
            mappings[f"{name}self_attn.k_norm.weight"] = TensorMapping((*attn, "k_norm"), (head,), (0,))
        for part, start in (("gate", 0), ("up", 1)):
            mappings[f"{mlp}{part}_proj.weight"] = TensorMapping((*at, "gate_up"), (1, ffn, dim), (start, 0, 0))
            if config.mlp_bias:
                mappings[f"{mlp}{part}_proj.bias"] = TensorMapping((*at, "gate_up_bias"), (1, ffn), (start, 0))
        mappings[f"{mlp}down_proj.weight"] = TensorMapping((*at, "down"), (dim, ffn), (0, 0))
        if config.mlp_bias:
            mappings[f"{mlp}down_proj.bias"] = TensorMapping((*at, "down_bias"), (dim,), (0,))
    return mappings


def ignored(name: str) -> bool:
    """Return whether a checkpoint tensor is not needed: frequencies, which are computed, or the copy of a tied head."""
    return name.endswith("rotary_emb.inv_freq") or name == "lm_head.weight"


def embed(params: Params, batch: TokenBatch) -> Float[Array, "tokens dim"]:
    """Return the embeddings of the batch's tokens; separate from `forward`, so that rows can be overridden."""
    return embedding.embed(batch.tokens, params.embedding)


def forward(
    config: ModelConfig,
    params: Params,
    x: Float[Array, "tokens dim"],
    batch: TokenBatch,
    kv: PagedKV,
    backend: Backend,
) -> tuple[Float[Array, "tokens dim"], PagedKV]:
    """Apply the layers and the final norm to embeddings; return hidden states and the updated cache.

    The loop over layers is unrolled, so that each layer's pages are updated in place.
    """
    rope = rotation(batch.positions, config.rope, config.head_dim)
    for i, layer in enumerate(params.layers):
        settings = AttentionSettings(config.windows[i], config.norm_eps, backend)
        with jax.named_scope(f"layer_{i}"):
            x, kv = _layer(x, layer, batch, kv, jnp.int32(i), rope, settings)
    with jax.named_scope("final_norm"):
        return rms_norm(x, params.norm, config.norm_eps), kv


@functools.partial(jax.jit, static_argnames="settings")
def _layer(
    x: Float[Array, "tokens dim"],
    params: LayerParams,
    batch: TokenBatch,
    kv: PagedKV,
    index: Int[Array, ""],
    rope: tuple[Array, Array],
    settings: AttentionSettings,
) -> tuple[Float[Array, "tokens dim"], PagedKV]:
    """Apply one decoder layer. Jitted so that it is traced once for all layers; the compiler inlines it."""
    normed = rms_norm(x, params.attention_norm, settings.norm_eps)
    attended, kv = self_attention(normed, params.attention, batch, kv, index, rope, settings)
    x = x + attended
    normed = rms_norm(x, params.mlp_norm, settings.norm_eps)
    return x + gated_mlp(normed, params.gate_up, params.down, params.gate_up_bias, params.down_bias), kv


def head(params: Params, hidden: Float[Array, "rows dim"]) -> Float[Array, "rows vocab_shard"]:
    """Return the logits of hidden states, in float32."""
    return embedding.logits(hidden, params.embedding if params.output is None else params.output)
