"""A model as a deployment lays it out: facts that the checkpoint doesn't know, and what follows from them."""

from __future__ import annotations

import dataclasses
from collections import Counter

import jax.numpy as jnp

from jaxserve.errors import ConfigError
from jaxserve.layers.batch import KVLayer, TokenBatch
from jaxserve.layers.rope import RopeConfig, Rotation, rotation
from jaxserve.models.config import ModelConfig
from jaxserve.params import KVSpec, StateSpec


@dataclasses.dataclass(frozen=True)
class Stage:
    """A pipeline stage of `count`, with the layers from `first` on, before `end`.

    The first one embeds, the last one has the head.
    """

    index: int
    count: int
    first: int
    end: int

    @property
    def is_first(self) -> bool:
        """Whether it embeds tokens."""
        return self.index == 0

    @property
    def is_last(self) -> bool:
        """Whether it draws tokens."""
        return self.index == self.count - 1


@dataclasses.dataclass(frozen=True)
class LaidOutModel[C: ModelConfig]:
    """The config of a model, and how a deployment lays it out.

    Parameters are laid out for `shards`: KV heads are repeated and the vocabulary is padded until both can be split
    into that number. `context` is the context length, by which dynamic rotations stretch. A layer whose window has at
    least `whole_from` positions keeps the keys and values of whole sequences, as a layer without a window does, if the
    KV heads of both are alike. With `experts_over_ranks`, data-parallel ranks have different experts; with
    `ragged_exchange`, prefill sends a rank only the tokens of its experts. `taps` are the layers whose inputs a head
    that drafts needs. A model of a pipeline `stage` has only some of the layers, which keep their numbers.
    """

    config: C
    shards: int = 1
    context: int = 0
    whole_from: int = 2**31 - 1
    experts_over_ranks: bool = False
    ragged_exchange: bool = False
    taps: tuple[int, ...] = ()
    stage: Stage | None = None

    @property
    def layers(self) -> range:
        """The layers that it has."""
        return range(self.config.num_layers) if self.stage is None else range(self.stage.first, self.stage.end)

    @property
    def mixture_layers(self) -> tuple[int, ...]:
        """The layers that it has and that have experts."""
        return tuple(i for i in self.config.mixture_layers if i in self.layers)

    @property
    def embeds(self) -> bool:
        """Whether it has the embedding: it is no stage, or the first."""
        return self.stage is None or self.stage.is_first

    @property
    def is_last(self) -> bool:
        """Whether it has the last norm: it is no stage, or the last."""
        return self.stage is None or self.stage.is_last

    @property
    def draws(self) -> bool:
        """Whether it has the head: it generates, and is no stage, or the last."""
        return self.config.generates and self.is_last

    @property
    def padded_vocab_size(self) -> int:
        """The rows of the embedding and of the head, over all shards."""
        return -(-self.config.vocab_size // self.shards) * self.shards

    def replicas_of(self, kv_heads: int) -> int:
        """Return the number of copies of each of a layer's `kv_heads`, one for each shard that shares it."""
        return max(1, self.shards // kv_heads)

    def rotation(self, batch: TokenBatch, rope: RopeConfig | None = None, head_dim: int | None = None) -> Rotation:
        """Return the rotation of the step's tokens by `rope` in heads of `head_dim`; both are the config's if None."""
        return rotation(batch, rope or self.config.rope, head_dim or self.config.head_dim, self.context)

    def kv_shape(self, layer: int) -> tuple[int, int]:
        """Return the KV heads of a layer, over all shards, and their size."""
        kv_heads, head_dim = self.config.kv_heads_of(layer)
        return kv_heads * self.replicas_of(kv_heads), head_dim

    def kv_specs(self) -> tuple[KVSpec, ...]:
        """Return the KV groups: first the one of whole sequences, then one for each window and kind of heads.

        A bidirectional model has none. Else the first group is always there; it has 0 layers if all layers have
        windows. All stages have the same groups, each with the layers that it has. Raises `ConfigError` if layers
        without a window differ in their heads, as they share one group.
        """
        if self.config.bidirectional:
            return ()
        sources = [i for i in self._attention_layers if self.config.kv_source(i) == i]
        kinds = dict.fromkeys(map(self._kv_group, sources))
        counts = Counter(self._kv_group(i) for i in sources if i in self.layers)
        whole = [group for group in kinds if group.window is None]
        if len(whole) > 1:
            raise ConfigError(
                "layers that keep whole sequences have KV heads of different number or size "
                f"({', '.join(f'{one.num_kv_heads} x {one.head_dim}' for one in whole)}); a KV group has one"
            )
        if not whole:
            heads, head_dim = self.kv_shape(0)
            whole = [KVSpec(0, heads, head_dim)]
        groups = [*whole, *(group for group in kinds if group.window is not None)]
        return tuple(dataclasses.replace(group, num_layers=counts[group]) for group in groups)

    def state_spec(self) -> StateSpec | None:
        """Return the group of layers that keep states, or None if no layer does. It counts the layers of this stage."""
        delta = self.config.delta
        if delta is None:
            return None
        count = sum(i in self.layers for i in self.config.delta_layers)
        return StateSpec(count, delta.key_heads, delta.value_heads, delta.key_dim, delta.value_dim, delta.taps)

    @property
    def _attention_layers(self) -> list[int]:
        return [i for i in range(self.config.num_layers) if i not in self.config.delta_layers]

    def kv_layers(self) -> tuple[KVLayer, ...]:
        """Return the place of each layer's keys and values in the KV groups, or of its states, in the group after
        these. Layers of other stages have none here, nor have those of a bidirectional model."""
        if self.config.bidirectional:
            return (KVLayer(jnp.int32(0), 0),) * self.config.num_layers
        groups = [dataclasses.replace(spec, num_layers=0) for spec in self.kv_specs()]
        used, places = [0] * (len(groups) + 1), list[KVLayer]()
        for i in range(self.config.num_layers):
            if i in self.config.delta_layers:
                places.append(KVLayer(jnp.int32(used[-1]), len(groups)))
                used[-1] += i in self.layers
                continue
            source, group = self.config.kv_source(i), groups.index(self._kv_group(i))
            if source == i:
                places.append(KVLayer(jnp.int32(used[group]), group))
                used[group] += i in self.layers
            else:
                places.append(dataclasses.replace(places[source], reuses=True))
        return tuple(places)

    def _kv_group(self, layer: int) -> KVSpec:
        """Return the group of a layer, without the number of its layers."""
        window, shape = self.config.windows[layer], self.kv_shape(layer)
        if window is not None and window >= self.whole_from:
            whole = self.config.windows.index(None) if None in self.config.windows else 0
            window = None if self.kv_shape(whole) == shape else window
        latent = self.config.latent
        return KVSpec(0, *shape, window, None if latent is None else latent.kv_lora_rank)


AnyModel = LaidOutModel[ModelConfig]
"""A model of any family."""
