"""The heads of EAGLE (Li et al. 2024) and EAGLE-3 (Li et al. 2025), in the forms of vLLM, SGLang and speculators.

EAGLE's features are the hidden states that the model's head gets, and it shares that head. EAGLE-3 reduces the inputs
of three layers to features, and has a head of its own, often for the most frequent tokens only: `d2t` tells how much
larger a token's id is than its row.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection

import flax.struct
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxserve.errors import ConfigError
from jaxserve.layers import embedding
from jaxserve.layers.attention import AttentionParams, AttentionSettings, self_attention
from jaxserve.layers.batch import KVPools, LayerOutput, TokenBatch
from jaxserve.layers.linear import linear
from jaxserve.layers.mlp import MlpParams, mlp
from jaxserve.layers.norm import rms_norm
from jaxserve.layers.vocabulary import gather_shards, num_shards, shard_index
from jaxserve.model_source.fields import LAYERS, WIDTH, Fields, Range, abbreviate
from jaxserve.models import llama
from jaxserve.models.layout import LaidOutModel
from jaxserve.models.parameters import ParamSpecs
from jaxserve.models.read_fields import refuse, refuse_unread
from pallas_kernels.paged_attention import Backend

EAGLE, EAGLE3 = "EagleHead", "Eagle3Head"
"""The architectures that the two kinds of heads have here; checkpoints have several names for each."""

_ARCHITECTURES = {
    "EagleLlamaForCausalLM": EAGLE,
    "LlamaForCausalLMEagle": EAGLE,
    "Eagle3LlamaForCausalLM": EAGLE3,
    "LlamaForCausalLMEagle3": EAGLE3,
    "Eagle3Speculator": EAGLE3,
    "Eagle3DraftModel": EAGLE3,
}
NAMES = tuple(_ARCHITECTURES)
_OF_SPECULATORS = ("Eagle3Speculator", "Eagle3DraftModel")
_METHODS = {EAGLE: "eagle", EAGLE3: "eagle3"}

# Fields about how a head was trained, or about the model that it drafts for.
_OF_TRAINING = (
    "speculators_config", "speculators_model_type", "speculators_version", "tie_word_embeddings", "ttt_length",
    "layer_types",
)  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(llama.Config):
    """The config of a head. `target_size` is the width of the model it drafts for, `draft_vocab` the number of tokens
    that it drafts, None if it shares the model's head. `own_embedding` says that it doesn't share the model's
    embedding. `layer` is the name of its layer's tensors, and `fc_bias` says that there is a tensor of that name.
    `taps` are the layers of the model whose inputs it gets.
    """

    target_size: int
    draft_vocab: int | None
    maps_tokens: bool
    own_embedding: bool
    layer: str
    fc_bias: bool
    norm_before_residual: bool
    taps: tuple[int, ...] = ()


@flax.struct.dataclass
class Params:
    """The weights of a head. `embedding` is None if the head uses the model's, as is `output` with its ids `d2t`."""

    embedding: Array | None
    fc: Array
    fc_bias: Array | None
    embedding_norm: Array | None
    features_norm: Array | None
    attention: AttentionParams
    mlp_norm: Array
    mlp: MlpParams
    norm: Array | None
    output: Array | None
    d2t: Int[Array, " draft_vocab"] | None


def parse(fields: Fields, method: str, tensors: Collection[str]) -> Config:
    """Read the config.json of a head for `eagle` or `eagle3`; `tensors` are the names in its checkpoint, if it is here.

    Raises `ConfigError`, as for a head of the other method.
    """
    where, name = fields.where, (fields.texts("architectures") or ["(none)"])[0]
    kind = _kind(fields) or (EAGLE if name == "LlamaForCausalLM" else None)
    if kind is None:
        raise ConfigError(f"{where}: {abbreviate(name)} is no head of EAGLE; supported: {', '.join(NAMES)}")
    if _METHODS[kind] != method:
        raise ConfigError(f"{where}: it is a head of {_METHODS[kind]}; set speculative_method to {_METHODS[kind]}")
    layer = fields.object("transformer_layer_config")
    given = {**fields.raw, **layer, "architectures": ["LlamaForCausalLM"]}
    if given.get("use_sliding_window") is False:  # as in heads for Qwen2.5, which name a window all the same
        given["sliding_window"] = None
    inner = Fields(given, where)
    base = llama.parse(inner)
    if base.num_layers != 1:
        raise ConfigError(f"{where}: a head of {base.num_layers} layers is not supported; only one of 1 layer is")
    for field in _OF_TRAINING:
        inner.get(field)
    refuse(inner, parallel_drafting=None, norm_before_fc=False, fc_norm=False)
    target = inner.integer("target_hidden_size", WIDTH, base.hidden_size)
    trained = [inner.boolean(each, False) for each in ("embed_requires_grad", "has_own_embed_tokens")]
    vocab = inner.integer("draft_vocab_size", WIDTH, base.vocab_size) if kind == EAGLE3 else None
    if vocab == base.vocab_size and target == base.hidden_size and not _has_head(inner, tensors):
        vocab = None
    config = Config(
        **{field.name: getattr(base, field.name) for field in dataclasses.fields(base)} | {"architecture": kind},
        target_size=target,
        draft_vocab=vocab,
        own_embedding=target != base.hidden_size
        or (any(trained) and (not tensors or "embed_tokens.weight" in tensors)),
        maps_tokens=vocab is not None and (vocab != base.vocab_size or "d2t" in tensors),
        layer="midlayer" if kind == EAGLE3 and _is_midlayer(name, tensors) else "layers.0",
        fc_bias="fc.bias" in tensors if tensors else inner.boolean("bias", False),
        norm_before_residual=inner.boolean("norm_before_residual", False),
    )
    taps = _read_taps(inner) if kind == EAGLE3 else ()
    inner.read |= {
        "transformer_layer_config",
        "bias",
        "draft_vocab_size",
        "eagle_config",
        "quantization_config",
        "compression_config",
    }
    refuse_unread(inner)
    return dataclasses.replace(config, taps=taps, windows=(None,))


def method_of(fields: Fields) -> str | None:
    """Return the method of the head that a config.json describes, None if it may describe a model."""
    kind = _kind(fields)
    return None if kind is None else _METHODS[kind]


def _kind(fields: Fields) -> str | None:
    name = (fields.texts("architectures") or ["(none)"])[0]
    is_reduced = name == "LlamaForCausalLM" and fields.get("draft_vocab_size") is not None
    return EAGLE3 if is_reduced else _ARCHITECTURES.get(name)


def _has_head(fields: Fields, tensors: Collection[str]) -> bool:
    """Return whether a head of EAGLE-3 has logits of its own; if its files aren't here, a null means that it hasn't."""
    unset = "draft_vocab_size" in fields.raw and fields.raw["draft_vocab_size"] is None
    return "lm_head.weight" in tensors if tensors else not unset


def _is_midlayer(name: str, tensors: Collection[str]) -> bool:
    return any(one.startswith("midlayer.") for one in tensors) if tensors else name not in _OF_SPECULATORS


def _read_taps(fields: Fields) -> tuple[int, ...]:
    """Return the layers whose inputs a head of EAGLE-3 gets; none if it doesn't say so.

    Speculators number the layers as here. `eagle_config` may instead number the layer before, whose output is this
    input. No head gets the input of the first two layers, so the first number tells which is meant, as in SGLang.
    """
    inner = Fields(fields.object("eagle_config"), f"{fields.where}: eagle_config")
    for field, only in {
        "use_aux_hidden_state": True,
        "use_input_layernorm_in_first_layer": True,
        "use_last_layernorm": True,
        "use_mtp_layernorm": False,
        "parallel_draft_step": 1,
    }.items():
        refuse(inner, **{field: only})
    inner.read |= {"next_layer_regular", "parallel_draft_heads_num_layers"}  # for further layers and parallel drafts
    allowed = Range(0, LAYERS.most)
    after = inner.numbers("eagle_aux_hidden_state_layer_ids", allowed)
    taps = [int(one) + (after[0] < 2) for one in after]
    taps = taps or [int(one) for one in fields.numbers("eagle_aux_hidden_state_layer_ids", allowed)]
    refuse_unread(inner)
    if taps and (len(taps) != 3 or taps != sorted(set(taps))):
        raise ConfigError(f"{fields.where}: eagle_aux_hidden_state_layer_ids should name 3 layers in order, not {taps}")
    return tuple(taps)


def abstract(model: LaidOutModel[Config], dtype: np.dtype) -> Params:
    """Return the tree of parameters; each leaf is a `ParamSpec`."""
    config = model.config
    declare, dim = ParamSpecs(model, dtype), config.hidden_size
    third, own = config.architecture == EAGLE3, config.own_embedding
    name, vocab = config.layer, config.draft_vocab
    fc = declare.matrix("fc.weight", dim, 3 * config.target_size if third else 2 * dim)
    return Params(
        embedding=declare.embedding("embed_tokens.weight") if own else None,
        fc=dataclasses.replace(fc, unused=("t2d", "d2t", "lm_head.weight", *(() if own else ("embed_tokens.weight",)))),
        fc_bias=declare.vector("fc.bias", init="zeros") if config.fc_bias else None,
        embedding_norm=declare.vector(f"{name}.input_layernorm.weight") if third else None,
        features_norm=declare.vector(f"{name}.hidden_norm.weight") if third else None,
        attention=declare.attention(
            f"{name}.self_attn",
            config.rope,
            qkv_bias=config.qkv_bias,
            output_bias=config.output_bias,
            inputs=2 * dim if third else None,
        ),
        mlp_norm=declare.vector(f"{name}.post_attention_layernorm.weight"),
        mlp=declare.mlp(f"{name}.mlp", bias=config.mlp_bias),
        norm=declare.vector("norm.weight") if third else None,
        output=None if vocab is None else declare.embedding("lm_head.weight", (vocab, dim), inputs=1),
        d2t=(
            dataclasses.replace(declare.vector("d2t", vocab, init="zeros"), dtype=np.dtype(np.int32))
            if config.maps_tokens
            else None
        ),
    )


def features(model: LaidOutModel[Config], params: Params, of_model: LayerOutput) -> Float[Array, "tokens own_dim"]:
    """Return the features of tokens, from a model's hidden states or from the inputs of its layers."""
    if model.config.architecture == EAGLE:
        return of_model.hidden
    return linear(jnp.concatenate(of_model.features, axis=1), params.fc, params.fc_bias)


def forward(
    model: LaidOutModel[Config],
    params: Params,
    embedded: Float[Array, "tokens dim"],
    features: Float[Array, "tokens dim"],
    batch: TokenBatch,
    kv: KVPools,
    backend: Backend,
) -> LayerOutput:
    """Apply the layer to tokens, each with the features of the token before it."""
    config = model.config
    if params.embedding is not None:
        embedded = embedding.embed(batch.tokens, params.embedding)
    settings = AttentionSettings(config.norm_eps, backend)
    if params.embedding_norm is None or params.features_norm is None:
        residual = inputs = linear(jnp.concatenate([embedded, features], axis=1), params.fc, params.fc_bias)
    else:
        normed = rms_norm(features, params.features_norm, config.norm_eps)
        residual = normed if config.norm_before_residual else features
        inputs = jnp.concatenate([rms_norm(embedded, params.embedding_norm, config.norm_eps), normed], axis=1)
    rope = model.rotation(batch)
    attended, kv = self_attention(inputs, params.attention, batch, kv, model.kv_layers()[0], rope, settings)
    x = residual + attended
    return LayerOutput(x + mlp(rms_norm(x, params.mlp_norm, config.norm_eps), params.mlp), kv)


def logits(
    model: LaidOutModel[Config],
    params: Params,
    features: Float[Array, "rows dim"],
    of_model: Callable[..., Float[Array, "rows vocab_shard"]],
    num_rows: Int[Array, ""] | None = None,
) -> Float[Array, "rows vocab_shard"]:
    """Return the logits, -inf for tokens that the head never drafts: of the first `num_rows` only, if it is given."""
    if params.norm is not None:
        features = rms_norm(features, params.norm, model.config.norm_eps)
    if params.output is None:
        return of_model(features, num_rows)
    found = embedding.logits(features, params.output, num_rows)
    if params.d2t is None:
        return found
    found = gather_shards(found)
    row, size = jnp.arange(len(params.d2t), dtype=jnp.int32), model.padded_vocab_size // num_shards()
    rows = jnp.full((size,), -1, jnp.int32).at[shard_index(row + params.d2t, size)].set(row, mode="drop")
    return jnp.where(rows >= 0, found[:, jnp.maximum(rows, 0)], -jnp.inf)
