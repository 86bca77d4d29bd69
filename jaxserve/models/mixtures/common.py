"""The layers that the families share: Llama's, with a mixture of experts in place of the feed-forward block.

Some layers may have a gated delta net in place of attention.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import numpy as np
from jaxtyping import Array, Float

from jaxserve.layers.batch import TokenBatch
from jaxserve.layers.mixture import MixtureParams, MixtureSettings
from jaxserve.layers.mlp import MlpParams
from jaxserve.models import llama
from jaxserve.models.config import ModelConfig
from jaxserve.models.decoder import ApplyLayer, LayerParams, layer_function
from jaxserve.models.layout import AnyModel, LaidOutModel
from jaxserve.models.other_attention import delta_net, latent_attention
from jaxserve.models.parameters import Params, ParamSpecs
from pallas_kernels.expert_routing import Routing
from pallas_kernels.grouped_matmul import Gate
from pallas_kernels.paged_attention import Backend
from pallas_kernels.target import KernelTarget

embed, head = llama.embed, llama.head


_SWIGLU = Gate()


@dataclasses.dataclass(frozen=True)
class DraftNames:
    """The names of the tensors that a checkpoint has for drafts, of which `layer` and `prefix` have the model's number
    of layers in place of braces.

    All begin with `prefix`. `copies` are those of the model's embedding and head.
    """

    prefix: str = "model.layers.{}."
    layer: str = "model.layers.{}"
    embedding_norm: str = "enorm"
    features_norm: str = "hnorm"
    join: str = "eh_proj"
    norm: str = "shared_head.norm"
    copies: tuple[str, ...] = ("embed_tokens", "shared_head.head")


@dataclasses.dataclass(frozen=True)
class Names:
    """The names of tensors, `layer` with the number of the layer in place of braces.

    If `projections` is None, experts share tensors (gpt-oss). `delta_by_key_head` is as in
    `other_attention.delta_net`.
    """

    layer: str = "model.layers.{}"
    drafts: DraftNames = DraftNames()
    delta_by_key_head: bool = False
    block: str = "mlp"
    router: str = "gate"
    correction: str | None = None
    projections: tuple[str, str, str] | None = ("gate_proj", "up_proj", "down_proj")
    shared: str = "shared_experts"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(ModelConfig):
    """The config of a family.

    `dense[i]` tells whether layer i has a plain feed-forward block. `shared_size` is the width of the block that
    computes all tokens, 0 if there is none. `qk_norm` norms each head, or all heads of a token as one.
    `attention_scale` is as in `AttentionSettings`. With `offset_norms`, norms are stored as their difference to one.
    With `output_gate`, attention has a gate for each number of its output. `drafts_see_first` says that drafts depend
    on the embedding of a sequence's first token.
    """

    routing: Routing
    experts: int
    expert_width: int
    dense: tuple[bool, ...]
    names: Names
    gate: Gate = _SWIGLU
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: Literal["none", "head", "all_heads"] = "none"
    sinks: bool = False
    router_bias: bool = False
    shared_size: int = 0
    shared_gate: bool = False
    unused: tuple[str, ...] = ()
    attention_scale: float | None = None
    offset_norms: bool = False
    output_gate: bool = False
    drafts_see_first: bool = False

    @property
    def num_experts(self) -> int:
        return self.experts

    @property
    def mixture_layers(self) -> tuple[int, ...]:
        return tuple(i for i, dense in enumerate(self.dense) if not dense)

    @property
    def experts_per_token(self) -> int:
        return self.routing.choices

    @property
    def expert_size(self) -> int:
        return self.expert_width

    @property
    def widest_mlp(self) -> int:
        mixture = self.routing.choices * self.expert_width + self.shared_size
        return max(mixture, self.intermediate_size if any(self.dense) else 0)

    @property
    def split_sizes(self) -> dict[str, int]:
        sizes = {"an MLP": self.intermediate_size} if any(self.dense) else {}
        return sizes | ({"a shared expert": self.shared_size} if self.shared_size else {})


def abstract(model: LaidOutModel[Config], dtype: np.dtype) -> Params:
    """Return the tree of parameters; each leaf is a `ParamSpec`."""
    config = model.config
    declare = ParamSpecs(model, dtype)
    layers = tuple(layer_params(model, declare, i) for i in range(config.num_layers))
    norm = dataclasses.replace(norm_of(config, declare, "model.norm"), unused=config.unused)
    return Params(declare.embedding(), layers, norm, declare.head())


def norm_of(config: Config, declare: ParamSpecs, name: str) -> Any:
    """Return the weight of a norm of the model's width."""
    return (declare.offset_norm if config.offset_norms else declare.vector)(f"{name}.weight")


def layer_params(model: LaidOutModel[Config], declare: ParamSpecs, i: int) -> LayerParams:
    """Return the tree of parameters of layer i."""
    config = model.config
    names = config.names

    def qk_norm(name: str, letter: str) -> Any:
        tensor = f"{name}.{letter}_norm.weight"
        if config.qk_norm == "all_heads":
            return declare.norm_of_heads(tensor, queries=letter == "q", rope=config.rope)
        if config.qk_norm == "none":
            return None
        return declare.norm_of_head(tensor, config.rope, offset=config.offset_norms)

    def block(name: str) -> MlpParams | MixtureParams:
        if config.dense[i]:
            return declare.mlp(name)
        correction = None if names.correction is None else f"{name}.{names.correction}"
        shared = declare.mlp(f"{name}.{names.shared}", width=config.shared_size) if config.shared_size else None
        return MixtureParams(
            router=declare.router(
                f"{name}.{names.router}", config.experts, bias=config.router_bias, correction=correction
            ),
            experts=(
                declare.experts(f"{name}.experts", names.projections)
                if names.projections is not None
                else declare.stacked_experts(f"{name}.experts", transposed=True, interleaved=True, bias=True)
            ),
            shared=shared,
            shared_gate=declare.few_outputs(f"{name}.{names.shared}_gate.weight", 1) if config.shared_gate else None,
        )

    def attention(name: str) -> Any:
        if i in config.delta_layers:
            return delta_net(declare, f"{name}.linear_attn", config, by_key_head=names.delta_by_key_head)
        own = f"{name}.self_attn"
        if config.latent is not None:
            return latent_attention(declare, own, config, config.rope)
        return declare.attention(
            own,
            config.rope,
            qkv_bias=config.qkv_bias,
            output_bias=config.output_bias,
            q_norm=qk_norm(own, "q"),
            k_norm=qk_norm(own, "k"),
            sinks=config.sinks,
            gated=config.output_gate,
        )

    name = names.layer.format(i)
    return LayerParams(
        attention_norm=norm_of(config, declare, f"{name}.input_layernorm"),
        attention=attention(name),
        attended_norm=None,
        mlp_norm=norm_of(config, declare, f"{name}.post_attention_layernorm"),
        mlp=block(f"{name}.{names.block}"),
        mlp_output_norm=None,
    )


def mixture_settings(
    model: AnyModel, routing: Routing, gate: Gate, batch: TokenBatch, target: KernelTarget
) -> MixtureSettings:
    """Return the static settings of all mixtures of a step."""
    ragged = model.ragged_exchange and not batch.decode_only
    return MixtureSettings(model.config.num_experts, routing, gate, target, model.experts_over_ranks, ragged)


def layers(
    model: LaidOutModel[Config], params: Any, x: Float[Array, "tokens dim"], batch: TokenBatch, backend: Backend
) -> ApplyLayer:
    """Return the function that applies a layer."""
    config = model.config
    rope = model.rotation(batch)
    experts = mixture_settings(model, config.routing, config.gate, batch, backend.target)
    ropes = [rope] * config.num_layers
    return layer_function(model, batch, backend, ropes, scale=config.attention_scale, experts=experts)
