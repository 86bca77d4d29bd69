"""Reads the scales of an fp8 KV cache from a checkpoint: numbers by which stored keys and values are divided."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from jaxserve.errors import ConfigError
from jaxserve.models.layout import AnyModel
from jaxserve.weights.scales import check_input_scales
from jaxserve.weights.source import TensorSource

_KEYS_AND_VALUES = ("k", "v")

# compressed-tensors and Quark: self_attn.k_scale, or k_proj.output_scale before; NVIDIA's Model Optimizer:
# k_proj.k_scale; AutoFP8: one kv_scale for both. Scales of queries and of the softmax are for other kernels.
_NAME = re.compile(
    r"model\.layers\.(\d+)\.self_attn\.(?:"
    r"(?:attn\.)?(k|v|kv|q|prob)_scale|([qkv])_proj\.(?:\3_scale|output_scale)|(prob)_output_scale)"
)


class KVScaleName(NamedTuple):
    """The layer of a scale, and the name of the numbers that it scales: `k`, `v`, `kv` (both), `q`, or `prob`
    (probabilities)."""

    layer: int
    scaled: str


def parse_kv_scale_name(name: str) -> KVScaleName | None:
    """Return the layer and the numbers that the tensor `name` scales; None if it is no scale of attention."""
    found = _NAME.fullmatch(name)
    if found is None:
        return None
    layer, *kinds = found.groups()
    return KVScaleName(int(layer), next(kind for kind in kinds if kind))


@dataclasses.dataclass(frozen=True)
class KVScales:
    """Scales by KV group, float32 `[2, layers, kv_heads]`, keys first; 1 for layers without any in the checkpoint.

    `num_layers` is the number of layers that have scales there.
    """

    by_group: tuple[np.ndarray, ...]
    num_layers: int


def read_kv_scales(source: TensorSource, model: AnyModel) -> KVScales | None:
    """Read the scales for the layers of `model`, whose KV heads may be repeated for its shards; None if there are none.

    A layer has one scale for all heads or one for each. Raises `ConfigError` naming a scale that is missing beside its
    counterpart, has another shape, or is out of range.
    """
    names: dict[tuple[int, str], str] = {}
    for name in source.infos:
        found = parse_kv_scale_name(name)
        if found is not None:
            names[found] = name
    by_group = tuple(np.ones((2, spec.num_layers, spec.num_kv_heads), np.float32) for spec in model.kv_specs())
    counted = 0
    at = model.kv_layers()
    places = [(i, at[i]) for i in model.layers if not at[i].reuses]
    for layer, place in places:
        own = _of_layer(source, names, layer)
        counted += bool(own)
        for which, name in enumerate(own):
            by_group[place.group][which, int(place.index)] = _per_head(source, name, model, layer)
    return KVScales(by_group, counted) if counted else None


def _of_layer(source: TensorSource, names: Mapping[tuple[int, str], str], layer: int) -> list[str]:
    """Return the names of a layer's scales of keys and of values; empty if it has none."""
    found = [names.get((layer, scaled)) for scaled in _KEYS_AND_VALUES]
    present = [name for name in found if name is not None]
    if len(present) == 1:
        [absent] = [scaled for scaled, name in zip(_KEYS_AND_VALUES, found) if name is None]
        raise ConfigError(
            f"{source.description}: {present[0]} has no counterpart {absent}_scale in layer {layer}, and the KV cache "
            "needs both; check that the download is complete"
        )
    both = names.get((layer, "kv"))
    return [both, both] if not present and both is not None else present


def _per_head(source: TensorSource, name: str, model: AnyModel, layer: int) -> np.ndarray[Any, Any]:
    """Return a scale as one number or as one for each KV head on the mesh."""
    info = source.infos[name]
    if info.unreadable:
        raise ConfigError(f"{source.description}: {name} can't be read: {info.unreadable}")
    values = np.empty(info.shape, np.float32)
    source.read(name, tuple(slice(0, size) for size in info.shape), values)
    heads, _ = model.kv_shape(layer)
    replicas = heads // max(values.size, 1)
    if values.size != 1 and (values.size * replicas != heads or replicas != model.replicas_of(values.size)):
        raise ConfigError(
            f"{source.description}: {name} has the shape {list(info.shape)}; layer {layer} takes one scale, or one for "
            f"each of its KV heads"
        )
    check_input_scales(values, name, source.description)
    return values.reshape(-1) if values.size == 1 else np.repeat(values.reshape(-1), replicas)
