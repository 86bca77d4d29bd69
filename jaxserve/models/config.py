"""The base of all families' configs: the facts about its model that a checkpoint states."""

from __future__ import annotations

import dataclasses

from jaxserve.layers.rope import RopeConfig
from jaxserve.model_source.pooling import Pooling
from jaxserve.quant import CheckpointQuantization


@dataclasses.dataclass(frozen=True)
class LatentSizes:
    """The sizes of multi-head latent attention, by Hugging Face's names.

    `q_lora_rank` is the width of the low-rank form of queries, None if they are made of the layer's input. A token's
    row in the KV cache has `kv_lora_rank` numbers that become keys and values, and `qk_rope_head_dim` rotated ones.
    """

    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int

    @property
    def row(self) -> int:
        """The numbers of a token's row."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def query(self) -> int:
        """The size of a head of queries and keys."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim


@dataclasses.dataclass(frozen=True)
class DeltaSizes:
    """The sizes of gated delta nets: heads, their dimensions, and the size of the convolution's kernel."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int

    @property
    def group(self) -> int:
        """The value heads of a key head."""
        return self.value_heads // self.key_heads

    @property
    def width(self) -> int:
        """The inputs of the convolution for a key head."""
        return 2 * self.key_dim + self.group * self.value_dim


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The sizes that every decoder has; a family's own config adds its fields.

    `windows[i]` is the sliding window of layer i in tokens, None for full attention. `rope` says how layers rotate
    queries and keys; a family's config may have another field for some of its layers. `quantization` says how a
    checkpoint stores weights, if it is quantized. `draft_layers` counts the checkpoint's own layers that draft.

    With `latent`, attention is latent: then `head_dim` is the size of the rotated part of a head, and the one KV head
    is the row of a token. Layers of `delta_layers` are gated delta nets of the sizes `delta` in place of attention.

    `pooling` says how pooled requests get a vector, if it serves any; a model that only pools `generates` nothing, and
    needs no head.

    A `bidirectional` model computes whole texts at once, without a KV cache: a token sees those before and after it.
    Its windows count the positions that a token sees on each side.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    tie_word_embeddings: bool
    norm_eps: float
    rope: RopeConfig
    windows: tuple[int | None, ...]
    quantization: CheckpointQuantization | None = None
    draft_layers: int = 0
    latent: LatentSizes | None = None
    delta: DeltaSizes | None = None
    delta_layers: frozenset[int] = frozenset()
    pooling: Pooling | None = None
    generates: bool = True
    bidirectional: bool = False

    @property
    def split_sizes(self) -> dict[str, int]:
        """The widths that shards split, besides heads and the vocabulary, by the name of the part that has each."""
        return {"an MLP": self.intermediate_size}

    def splits_into(self, shards: int) -> bool:
        """Return whether heads and MLPs can be split into `shards` parts."""
        kv = self.num_kv_heads
        even = not any(size % shards for size in (self.num_heads, *self.split_sizes.values()))
        if self.delta is not None:
            even = even and self.delta.key_heads % shards == 0
        return even and (kv % shards == 0 or shards % kv == 0)

    @property
    def longest_context(self) -> int:
        """The longest context that may be asked for; a dynamic rotation stretches beyond the trained positions."""
        dynamic = [rope.factor for rope in self._ropes() if rope.kind == "dynamic"]
        return int(self.max_position_embeddings * max([1.0, *dynamic]))

    @property
    def rotation_length(self) -> int | None:
        """The number of tokens beyond which a sequence has other frequencies of rotation; None if there is none."""
        ropes = [rope for rope in self._ropes() if rope.kind == "longrope"]
        return min((rope.original_max_position for rope in ropes), default=None)

    def _ropes(self) -> list[RopeConfig]:
        values = (getattr(self, field.name) for field in dataclasses.fields(self))
        return [value for value in values if isinstance(value, RopeConfig)]

    @property
    def num_experts(self) -> int:
        """The number of experts of a layer, 0 for a dense model."""
        return 0

    @property
    def biases_distances(self) -> bool:
        """Whether the distance of two tokens adds to the logit of their attention, in a bidirectional model."""
        return False

    @property
    def mixture_layers(self) -> tuple[int, ...]:
        """The layers that have experts."""
        return ()

    @property
    def experts_per_token(self) -> int:
        """The number of experts that a token chooses in a layer, 0 for a dense model."""
        return 0

    @property
    def expert_size(self) -> int:
        """The width of an expert, 0 for a dense model."""
        return 0

    @property
    def widest_mlp(self) -> int:
        """The width of the widest MLP of a layer."""
        return self.intermediate_size

    @property
    def held_per_token(self) -> int:
        """How many numbers of each token are kept while all layers are computed, besides the hidden state."""
        return 0

    def kv_heads_of(self, layer: int) -> tuple[int, int]:
        """Return the number of KV heads that a layer has in the checkpoint, and their size."""
        return (self.num_kv_heads, self.head_dim) if self.latent is None else (1, self.latent.row)

    def kv_source(self, layer: int) -> int:
        """Return the layer whose keys and values a layer uses: itself, or an earlier one."""
        return layer
