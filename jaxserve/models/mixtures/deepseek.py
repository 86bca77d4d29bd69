"""DeepSeek-V2, V3 and R1, Kimi-K2 and GLM-4.7-Flash: latent attention, shared experts, dense first layers.

V2 chooses experts by softmax and the best expert of a group; the others by corrected sigmoids and the two best.
"""

from __future__ import annotations

import dataclasses
import math

from jaxserve.errors import ConfigError
from jaxserve.layers.rope import RopeConfig
from jaxserve.model_source.fields import EXPERTS, HEAD_DIM, LAYERS, NON_NEGATIVE, NORM_EPSILON, WIDTH, Fields, Range
from jaxserve.models.config import LatentSizes
from jaxserve.models.mixtures import common
from jaxserve.models.read_fields import DRAFTS, read_experts, read_sizes, refuse, unused_layers
from jaxserve.models.rope import read_rope
from pallas_kernels.expert_routing import Routing

abstract, embed, layers, head = common.abstract, common.embed, common.layers, common.head

_DRAFTS = ("num_nextn_predict_layers", "num_mtp_layers")
_SHARED = Range(0, 64)
_DENSE, _SPARSE = "dense", "sparse"


@dataclasses.dataclass(frozen=True)
class _ConfigDefaults:
    """What a config.json may leave out, as Hugging Face's config class of an architecture has it."""

    experts: int = 256
    choices: int | None = 8
    expert_width: int = 2048
    shared: int = 1
    dense: int = 3
    groups: int = 8
    groups_chosen: int = 4
    scale: float = 2.5
    q_lora_rank: int = 1536
    qk_nope_head_dim: int = 128
    v_head_dim: int = 128
    max_position: int = 4096
    norm_eps: float = 1e-6


_V2, _LITE = "DeepseekV2ForCausalLM", "Glm4MoeLiteForCausalLM"
_DEFAULTS = {
    _V2: _ConfigDefaults(64, None, 1407, 2, 0, 1, 1, 1.0, max_position=2048),
    _LITE: _ConfigDefaults(64, 4, 1536, 1, 1, 1, 1, 1.8, 768, 192, 256, 202752, 1e-5),
}


def parse(fields: Fields) -> common.Config:
    """Read a config.json. Raises `ConfigError`."""
    architecture = (fields.texts("architectures") or [""])[0]
    default = _DEFAULTS.get(architecture, _ConfigDefaults())
    sizes = read_sizes(fields, head_dim=64, max_position_embeddings=default.max_position)
    num_layers, heads = sizes["num_layers"], sizes["num_heads"]
    latent = _latent(fields, default)
    refuse(
        fields,
        hidden_act="silu",
        attention_bias=False,
        mlp_bias=False,
        moe_layer_freq=1,
        num_key_value_heads=heads,
        qk_head_dim=latent.query,
    )
    default_experts = default.experts, default.choices
    experts, choices = read_experts(fields, "n_routed_experts", "num_experts_per_tok", default=default_experts)
    width = fields.integer("moe_intermediate_size", WIDTH, default.expert_width)
    shared = default.shared if "n_shared_experts" not in fields.raw else fields.integer("n_shared_experts", _SHARED, 0)
    drafts = max(fields.integer(name, DRAFTS, 0) for name in _DRAFTS)
    interleaved = True if architecture == _V2 else fields.boolean("rope_interleave", True)
    rope = read_rope(fields, sizes["max_position_embeddings"], latent.qk_rope_head_dim, interleaved=interleaved)
    sizes["num_kv_heads"], sizes["head_dim"] = 1, latent.qk_rope_head_dim
    read_routing = _routing_of_v2 if architecture == _V2 else _routing
    return common.Config(
        **sizes,
        norm_eps=fields.number("rms_norm_eps", NORM_EPSILON, default.norm_eps),
        rope=rope,
        windows=(None,) * num_layers,
        latent=latent,
        attention_scale=_attention_scale(latent, rope),
        routing=read_routing(fields, default, experts, choices),
        experts=experts,
        expert_width=width,
        dense=_dense(fields, default, num_layers),
        names=common.Names(correction=None if architecture == _V2 else "gate.e_score_correction_bias"),
        shared_size=width * shared,
        unused=unused_layers(num_layers, drafts),
        draft_layers=drafts,
    )


def _latent(fields: Fields, default: _ConfigDefaults) -> LatentSizes:
    # null says that queries have no low-rank form; a missing field doesn't
    whole = "q_lora_rank" in fields.raw and fields.get("q_lora_rank") is None
    return LatentSizes(
        None if whole else fields.integer("q_lora_rank", WIDTH, default.q_lora_rank),
        fields.integer("kv_lora_rank", WIDTH, 512),
        fields.integer("qk_nope_head_dim", HEAD_DIM, default.qk_nope_head_dim),
        fields.integer("qk_rope_head_dim", HEAD_DIM, 64),
        fields.integer("v_head_dim", HEAD_DIM, default.v_head_dim),
    )


def _attention_scale(latent: LatentSizes, rope: RopeConfig) -> float:
    """Return the factor of logits: yarn's multiplies queries and keys alike, so it is squared."""
    scale = latent.query**-0.5
    if rope.kind == "default" or not rope.mscale_all_dim or rope.factor <= 1:
        return scale
    return scale * (0.1 * rope.mscale_all_dim * math.log(rope.factor) + 1.0) ** 2


def _dense(fields: Fields, default: _ConfigDefaults, num_layers: int) -> tuple[bool, ...]:
    """Return which layers have no experts."""
    first = fields.integer("first_k_dense_replace", Range(0, LAYERS.most), default.dense)
    types = fields.texts("mlp_layer_types")
    if types is None:
        return tuple(i < first for i in range(num_layers))
    if len(types) != num_layers or set(types) - {_DENSE, _SPARSE}:
        raise ConfigError(f"{fields.where}: mlp_layer_types should say {_DENSE} or {_SPARSE} for each of the layers")
    return tuple(kind == _DENSE for kind in types)


def _groups(fields: Fields, default: _ConfigDefaults, experts: int, choices: int) -> tuple[int, int]:
    """Return the number of groups of experts, and how many of them a token chooses from."""
    groups = fields.integer("n_group", EXPERTS, default.groups)
    best = fields.integer("topk_group", EXPERTS, default.groups_chosen)
    if experts % groups or best > groups or best * (experts // groups) < choices:
        raise ConfigError(
            f"{fields.where}: n_group={groups} and topk_group={best} don't fit {experts} experts of which a token "
            f"chooses {choices}"
        )
    return groups, best


def _routing(fields: Fields, default: _ConfigDefaults, experts: int, choices: int) -> Routing:
    refuse(fields, scoring_func="sigmoid", topk_method="noaux_tc")
    groups, best = _groups(fields, default, experts, choices)
    return Routing(
        choices,
        "sigmoid",
        renormalize=fields.boolean("norm_topk_prob", True),
        scale=fields.number("routed_scaling_factor", NON_NEGATIVE, default.scale),
        groups=groups,
        groups_chosen=best,
    )


def _routing_of_v2(fields: Fields, default: _ConfigDefaults, experts: int, choices: int) -> Routing:
    # Hugging Face ignores norm_topk_prob here, DeepSeek's code doesn't, and no checkpoint sets it
    refuse(fields, scoring_func="softmax", norm_topk_prob=False)
    method = fields.text("topk_method", "greedy")
    if method not in ("greedy", "group_limited_greedy"):
        supported = "only 'greedy' and 'group_limited_greedy' are"
        raise ConfigError(f"{fields.where}: topk_method={method!r} is not supported for this architecture; {supported}")
    groups, best = _groups(fields, default, experts, choices)
    if method == "greedy":
        groups = best = 1
    scale = fields.number("routed_scaling_factor", NON_NEGATIVE, default.scale)
    return Routing(choices, scale=scale, groups=groups, groups_chosen=best, best_of_group=1)
