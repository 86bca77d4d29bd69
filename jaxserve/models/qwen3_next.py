"""Qwen3-Next, Qwen3.5 and 3.6: three of four layers are gated delta nets, the others have attention with output gates.

A model is dense, or has a mixture of experts in each layer. A checkpoint may have a layer that drafts.
"""

from __future__ import annotations

from jaxserve.errors import ConfigError
from jaxserve.model_source.fields import HEAD_DIM, HEADS, LAYERS, NORM_EPSILON, WIDTH, Fields, Range
from jaxserve.models.config import DeltaSizes
from jaxserve.models.mixtures import common
from jaxserve.models.read_fields import DRAFTS, FULL, read_dense, read_experts, read_sizes, refuse
from jaxserve.models.rope import read_rope
from pallas_kernels.expert_routing import Routing

abstract, embed, layers, head = common.abstract, common.embed, common.layers, common.head

_NEXT, _DENSE = "Qwen3NextForCausalLM", "Qwen3_5ForCausalLM"
_LINEAR = "linear_attention"
_TAPS = Range(2, 16)
_DRAFTS = common.DraftNames(
    prefix="mtp.",
    layer="mtp.layers.0",
    embedding_norm="pre_fc_norm_embedding",
    features_norm="pre_fc_norm_hidden",
    join="fc",
    norm="norm",
    copies=(),
)
# Positions in images, which text doesn't have
_OF_IMAGES = ("mrope_section", "mrope_interleaved")


def parse(fields: Fields) -> common.Config:
    """Read a config.json. Raises `ConfigError`."""
    architecture = (fields.texts("architectures") or [""])[0]
    is_next, is_dense = architecture == _NEXT, architecture == _DENSE
    sizes = read_sizes(
        fields,
        intermediate_size=12288 if is_dense else 5632,
        num_key_value_heads=4 if is_dense else 2,
        head_dim=256,
        max_position_embeddings=32768,
    )
    refuse(fields, hidden_act="silu", attention_bias=False, attn_output_gate=True)
    refuse(fields, use_sliding_window=False, mtp_use_dedicated_embeddings=False, output_gate_type="swish")
    fields.get("mamba_ssm_dtype")  # States are float32
    num_layers = sizes["num_layers"]
    delta_layers = _delta_layers(fields, num_layers)
    # Qwen3-Next's configs don't say that the checkpoints have the layer
    drafts = fields.integer("num_nextn_predict_layers" if is_next else "mtp_num_hidden_layers", DRAFTS, int(is_next))
    names = common.Names(shared="shared_expert", drafts=_DRAFTS, delta_by_key_head=is_next)
    experts, routing, width, shared = 0, Routing(0), 0, 0
    if not is_dense:
        experts, choices = read_experts(
            fields, "num_experts", "num_experts_per_tok", default=(512, 10) if is_next else (256, 8)
        )
        routing = Routing(choices, renormalize=fields.boolean("norm_topk_prob", True))
        width = fields.integer("moe_intermediate_size", WIDTH, 512)
        shared = fields.integer("shared_expert_intermediate_size", WIDTH, 512)
        if not is_next:
            refuse(fields, norm_topk_prob=True, decoder_sparse_step=1, mlp_only_layers=[])
    return common.Config(
        **sizes,
        norm_eps=fields.number("rms_norm_eps", NORM_EPSILON, 1e-6),
        rope=read_rope(fields, sizes["max_position_embeddings"], sizes["head_dim"], fraction=0.25, known=_OF_IMAGES),
        windows=(None,) * num_layers,
        delta=_delta_sizes(fields) if delta_layers else None,
        delta_layers=delta_layers,
        routing=routing,
        experts=experts,
        expert_width=width,
        dense=(True,) * num_layers if is_dense else read_dense(fields, num_layers),
        names=names,
        qk_norm="head",
        offset_norms=True,
        output_gate=True,
        shared_size=shared,
        shared_gate=True,
        unused=("mtp.",),
        draft_layers=drafts,
        drafts_see_first=True,
    )


def _delta_layers(fields: Fields, num_layers: int) -> frozenset[int]:
    """Return the layers that are gated delta nets."""
    period = fields.integer("full_attention_interval", LAYERS, 4)
    types = fields.texts("layer_types")
    if types is None:
        return frozenset(i for i in range(num_layers) if (i + 1) % period)
    if len(types) != num_layers or set(types) - {_LINEAR, FULL}:
        raise ConfigError(f"{fields.where}: layer_types should say {_LINEAR} or {FULL} for each of {num_layers} layers")
    return frozenset(i for i, kind in enumerate(types) if kind == _LINEAR)


def _delta_sizes(fields: Fields) -> DeltaSizes:
    sizes = DeltaSizes(
        fields.integer("linear_num_key_heads", HEADS, 16),
        fields.integer("linear_num_value_heads", HEADS, 32),
        fields.integer("linear_key_head_dim", HEAD_DIM, 128),
        fields.integer("linear_value_head_dim", HEAD_DIM, 128),
        fields.integer("linear_conv_kernel_dim", _TAPS, 4),
    )
    if sizes.value_heads % sizes.key_heads:
        raise ConfigError(
            f"{fields.where}: linear_num_value_heads={sizes.value_heads} is not a multiple of "
            f"linear_num_key_heads={sizes.key_heads}"
        )
    return sizes
