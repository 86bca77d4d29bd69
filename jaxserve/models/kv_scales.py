"""The names that checkpoints give the scales of an fp8 KV cache, which no parameter of a model is made of."""

from __future__ import annotations

import re
from typing import NamedTuple

# compressed-tensors and Quark: self_attn.k_scale, or k_proj.output_scale before; NVIDIA's Model Optimizer:
# k_proj.k_scale; AutoFP8: one kv_scale for both. Scales of queries and of the softmax are for other kernels.
_NAME = re.compile(
    r"model\.layers\.(\d+)\.self_attn\.(?:"
    r"(?:attn\.)?(k|v|kv|q|prob)_scale|([qkv])_proj\.(?:\3_scale|output_scale)|(prob)_output_scale)"
)


class KVScaleName(NamedTuple):
    """The layer of a scale, and what it scales: `k`, `v`, `kv` (both), `q`, or `prob` (probabilities)."""

    layer: int
    scaled: str


def parse_kv_scale_name(name: str) -> KVScaleName | None:
    """Return what the tensor `name` scales; None if it is no scale of attention."""
    found = _NAME.fullmatch(name)
    if found is None:
        return None
    layer, *kinds = found.groups()
    return KVScaleName(int(layer), next(kind for kind in kinds if kind))
