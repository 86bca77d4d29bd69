"""The layers that the families share: Llama's, with a mixture of experts in place of the feed-forward block."""

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
from jaxserve.models.parameters import Params, ParamSpecs
from pallas_kernels.expert_routing import Routing
from pallas_kernels.grouped_matmul import Gate
from pallas_kernels.paged_attention import Backend
from pallas_kernels.target import KernelTarget

embed, head = llama.embed, llama.head


_SWIGLU = Gate()


@dataclasses.dataclass(frozen=True)
class Names:
    """The names of a layer's tensors. If `projections` is None, experts share tensors (gpt-oss)."""

    block: str = "mlp"
    router: str = "gate"
    correction: str | None = None
    projections: tuple[str, str, str] | None = ("gate_proj", "up_proj", "down_proj")
    shared: str = "shared_experts"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(ModelConfig):
    """The config of a family.

    `dense[i]` tells whether layer i has a plain feed-forward block. `shared_size` is the width of the block that
    computes all tokens, 0 if there is none. `qk_norm` norms each head, or all heads of a token as one. The tensors of
    layer i are those of layer `first_layer` + i of the checkpoint. `attention_scale` is as in `AttentionSettings`.
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
    first_layer: int = 0
    attention_scale: float | None = None

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
    norm = dataclasses.replace(declare.vector("model.norm.weight"), unused=config.unused)
    return Params(declare.embedding(), layers, norm, declare.head())


def layer_params(model: LaidOutModel[Config], declare: ParamSpecs, i: int) -> LayerParams:
    """Return the tree of parameters of layer i."""
    config = model.config
    names = config.names

    def qk_norm(name: str, letter: str) -> Any:
        tensor = f"{name}.{letter}_norm.weight"
        if config.qk_norm == "all_heads":
            return declare.norm_of_heads(tensor, queries=letter == "q", rope=config.rope)
        return declare.norm_of_head(tensor, config.rope) if config.qk_norm == "head" else None

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

    name = f"model.layers.{config.first_layer + i}"
    attention = f"{name}.self_attn"
    return LayerParams(
        attention_norm=declare.vector(f"{name}.input_layernorm.weight"),
        attention=declare.latent_attention(attention, config.rope)
        if config.latent is not None
        else declare.attention(
            attention,
            config.rope,
            qkv_bias=config.qkv_bias,
            output_bias=config.output_bias,
            q_norm=qk_norm(attention, "q"),
            k_norm=qk_norm(attention, "k"),
            sinks=config.sinks,
        ),
        attended_norm=None,
        mlp_norm=declare.vector(f"{name}.post_attention_layernorm.weight"),
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
