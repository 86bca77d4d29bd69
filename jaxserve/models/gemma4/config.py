"""The config of Gemma 4, as files have it."""

from __future__ import annotations

import dataclasses

from jaxserve.errors import ConfigError
from jaxserve.layers.rope import RopeConfig
from jaxserve.model_source.fields import HEAD_DIM, HEADS, LAYERS, NORM_EPSILON, WIDTH, Fields, Range
from jaxserve.models import gemma
from jaxserve.models.config import ModelConfig
from jaxserve.models.read_fields import (
    FULL,
    SLIDING,
    ConfigSizes,
    periodic_layer_types,
    read_experts,
    read_sizes,
    read_windows,
    refuse,
)
from jaxserve.models.rope import read_rope
from pallas_kernels.expert_routing import Routing

_ROPES = {
    SLIDING: {"rope_theta": 1e4},
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(ModelConfig):
    """The config of the family; `num_kv_heads`, `head_dim` and `local_rope` are those of layers with a window.

    The last `num_reusing_layers` use the keys and values of the last earlier layer that has the same window.
    `per_layer_dim` is the size of the vectors that each layer has for tokens, 0 if there are none; their table has
    `per_layer_rows`.
    """

    local_rope: RopeConfig
    full_kv_heads: int
    full_head_dim: int
    keys_as_values: bool
    num_reusing_layers: int
    reusing_mlp_size: int
    per_layer_dim: int
    per_layer_rows: int
    attention_bias: bool
    logit_cap: float | None
    routing: Routing | None
    experts: int
    expert_width: int

    @property
    def num_experts(self) -> int:
        return self.experts

    @property
    def mixture_layers(self) -> tuple[int, ...]:
        return tuple(range(self.num_layers)) if self.routing else ()

    @property
    def experts_per_token(self) -> int:
        return self.routing.choices if self.routing else 0

    @property
    def expert_size(self) -> int:
        return self.expert_width

    def kv_heads_of(self, layer: int) -> tuple[int, int]:
        full = self.windows[layer] is None
        return (self.full_kv_heads, self.full_head_dim) if full else (self.num_kv_heads, self.head_dim)

    def kv_source(self, layer: int) -> int:
        own = self.num_layers - self.num_reusing_layers
        return layer if layer < own else max(i for i in range(own) if self.windows[i] == self.windows[layer])

    @property
    def widest_mlp(self) -> int:
        mixture = self.expert_width * self.routing.choices if self.routing else 0
        return max(self.intermediate_size, self.reusing_mlp_size if self.num_reusing_layers else 0, mixture)

    @property
    def held_per_token(self) -> int:
        return self.num_layers * self.per_layer_dim

    def splits_into(self, shards: int) -> bool:
        kv = self.full_kv_heads
        return super().splits_into(shards) and (kv % shards == 0 or shards % kv == 0)


def parse(fields: Fields) -> Config:
    """Read a config.json; it may omit any field that has the default of Hugging Face's class. Raises `ConfigError`."""
    unified = (fields.texts("architectures") or [""])[0] == "Gemma4UnifiedForCausalLM"
    sizes = read_sizes(
        fields,
        vocab_size=262_144,
        hidden_size=2304,
        intermediate_size=9216,
        num_hidden_layers=30,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=256,
        max_position_embeddings=262_144 if unified else 131_072,
        tie_word_embeddings=True,
    )
    layers, max_position = sizes["num_layers"], sizes["max_position_embeddings"]
    refuse(fields, hidden_activation=gemma.ACTIVATION, rope_theta=None, rope_scaling=None)
    refuse(fields, use_bidirectional_attention="vision")  # It only lets tokens of an image see later ones
    if "sliding_window" in fields.raw and fields.raw["sliding_window"] is None:
        raise fields.error("sliding_window", "a number of tokens")
    windows = read_windows(fields, layers, periodic_layer_types(6, layers), 1024 if unified else 512)
    windows = (*windows[:-1], None)  # Hugging Face overrides the type of the last layer, too
    full_kv_heads, full_head_dim = _full_heads(fields, sizes, windows)
    if sizes["num_heads"] % full_kv_heads:
        raise ConfigError(
            f"{fields.where}: num_attention_heads={sizes['num_heads']} is not a multiple of "
            f"num_global_key_value_heads={full_kv_heads}"
        )
    rows, least = fields.integer("vocab_size_per_layer_input", WIDTH, 262_144), sizes["vocab_size"]
    per_layer_dim = fields.integer("hidden_size_per_layer_input", Range(0, WIDTH.most), 0 if unified else 256)
    if per_layer_dim and rows < least:
        raise fields.error("vocab_size_per_layer_input", f"at least vocab_size={least}")
    if full_head_dim % 2:
        raise ConfigError(f"{fields.where}: global_head_dim={full_head_dim} is odd: rotation needs pairs")
    ropes = fields.object("rope_parameters") or _ROPES
    if not {SLIDING, FULL} <= ropes.keys():
        raise fields.error("rope_parameters", f"an object with {SLIDING} and {FULL}")
    own = Fields({"rope_parameters": ropes}, fields.where)
    wide = fields.boolean("use_double_wide_mlp", False)
    routing, experts, expert_width = _read_mixture(fields)
    return Config(
        **sizes,
        norm_eps=fields.number("rms_norm_eps", NORM_EPSILON, 1e-6),
        rope=read_rope(own, max_position, full_head_dim, layer_type=FULL),
        local_rope=read_rope(own, max_position, sizes["head_dim"], layer_type=SLIDING),
        full_kv_heads=full_kv_heads,
        full_head_dim=full_head_dim,
        keys_as_values=fields.boolean("attention_k_eq_v", False),
        num_reusing_layers=_reusing_layers(fields, windows),
        reusing_mlp_size=sizes["intermediate_size"] * (2 if wide else 1),
        per_layer_dim=per_layer_dim,
        per_layer_rows=rows if per_layer_dim else 0,
        attention_bias=fields.boolean("attention_bias", False),
        logit_cap=gemma.read_cap(fields, "final_logit_softcapping"),
        windows=windows,
        routing=routing,
        experts=experts,
        expert_width=expert_width,
    )


def _full_heads(fields: Fields, sizes: ConfigSizes, windows: tuple[int | None, ...]) -> tuple[int, int]:
    """Return the KV heads of layers with full attention, and their size."""
    kv_heads, head_dim = sizes["num_kv_heads"], sizes["head_dim"]
    number = fields.integer("num_global_key_value_heads", HEADS, kv_heads)
    size = fields.integer("global_head_dim", HEAD_DIM, 512)
    if fields.get("per_layer_config") is None:
        return number if fields.boolean("attention_k_eq_v", False) else kv_heads, size
    # Since 5.23, transformers writes what layers have of their own, by their index
    by_layer = Fields(fields.object("per_layer_config"), f"{fields.where}: per_layer_config")
    full = [str(i) for i, window in enumerate(windows) if window is None]
    first, *others = (by_layer.object(i) for i in full)
    if (
        by_layer.raw.keys() - by_layer.read
        or first.keys() - {"num_key_value_heads", "head_dim"}
        or any(each != first for each in others)
    ):
        raise fields.error("per_layer_config", "heads alone, the same for all layers with full attention and no others")
    own = Fields(first, by_layer.where)
    return own.integer("num_key_value_heads", HEADS, kv_heads), own.integer("head_dim", HEAD_DIM, head_dim)


def _reusing_layers(fields: Fields, windows: tuple[int | None, ...]) -> int:
    """Return the number of layers that reuse keys and values. Raises `ConfigError` if one has nothing to reuse."""
    reusing = fields.integer("num_kv_shared_layers", Range(0, LAYERS.most), 0)
    if not set(windows) <= set(windows[: max(0, len(windows) - reusing)]):
        raise ConfigError(
            f"{fields.where}: num_kv_shared_layers={reusing} is too large for {len(windows)} layers: of each type, one "
            "needs keys and values of its own"
        )
    return reusing


def _read_mixture(fields: Fields) -> tuple[Routing | None, int, int]:
    """Return how experts are chosen, their number and their width; None and zeros without them."""
    if fields.boolean("enable_moe_block", False):
        experts, choices = read_experts(fields, "num_experts", "top_k_experts")
        return Routing(choices, renormalize=True), experts, fields.integer("moe_intermediate_size", WIDTH)
    for name in ("num_experts", "top_k_experts", "moe_intermediate_size"):
        fields.get(name)  # They may be set without experts
    return None, 0, 0
