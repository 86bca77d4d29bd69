"""Chooses which linear layers of a model are packed, and in how many bits.

On a CPU every weight that can be packed is: quantized blocks of the file keep their bits, other weights are packed in
16 bits, which changes no number. The choice needs only types and shapes, so it is made before any weight is read.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import jax
import numpy as np

from jaxserve.errors import ConfigError
from jaxserve.params import ParamSpec, Path, path_of
from pallas_kernels.cpu import refusal
from pallas_kernels.quantized_matmul import BLOCK, STRIP, Bits

BITS: Mapping[str, Bits] = {"Q4_0": 4, "Q4_1": 4, "Q4_K": 4, "Q5_0": 8, "Q5_1": 8, "Q5_K": 8, "Q8_0": 8}
"""The bits in which each stored type is packed; other types are dequantized, or were never quantized."""

HEAD: Path = ("output",)
EMBEDDING: Path = ("embedding",)
"""A tied head is made from the embedding: it has no tensor of its own."""

_DENSE_TYPES = {"F64", "F32", "F16", "BF16"}

QuantizationSetting = Literal["auto", "none", "gguf"]
StoredTypes = Mapping[str, str]
"""The types of a checkpoint's tensors by name; empty for a file format without quantized blocks."""


@dataclasses.dataclass(frozen=True)
class WeightPacking:
    """Which of the `num_linears` weights of linear layers are packed.

    `bits` maps the paths of packed parameters to their bits; `dense` lists the weights of linear layers that aren't
    packed. `reason` says why no weight stays quantized; it is empty if some do, if the checkpoint has no quantized
    tensors, or if the setting is "none".
    """

    bits: Mapping[Path, Bits] = dataclasses.field(default_factory=dict)
    num_linears: int = 0
    reason: str = ""
    dense: tuple[Path, ...] = ()

    @property
    def quantized(self) -> dict[Path, Bits]:
        """The bits of the weights that stay quantized."""
        return {path: bits for path, bits in self.bits.items() if bits < 16}


def choose_packing(
    setting: QuantizationSetting,
    abstract: Any,
    stored: StoredTypes,
    *,
    platform: str,
    dtype: np.dtype,
    tensor: int,
) -> WeightPacking:
    """Choose the packing of a model with these `ParamSpec`s.

    Raises `ConfigError` if the setting is "gguf" and no weight can stay quantized.
    """
    obstacle = _obstacle(platform, dtype, tensor)
    linears = dict(_linears(abstract))
    quantized = {} if obstacle or setting == "none" else _quantized_bits(linears, stored)
    reason = "" if quantized else obstacle or _unpackable_reason(stored)
    if setting == "gguf" and reason:
        raise ConfigError(f"quantization=gguf: {reason}; leave it at auto, or set none")
    if setting == "none" or _DENSE_TYPES.issuperset(stored.values()):
        reason = ""
    tied = abstract.output is None
    bits = quantized if obstacle else quantized | _dense_bits(abstract, linears.keys() - quantized.keys(), linears)
    packed = {HEAD if tied and path == EMBEDDING else path for path in bits}
    return WeightPacking(bits, len(linears), reason, tuple(path for path in linears if path not in packed))


def _obstacle(platform: str, dtype: np.dtype, tensor: int) -> str:
    if platform != "cpu":
        return f"only a CPU multiplies by packed weights so far, and the device is a {platform}"
    if dtype == np.float32:
        return "with dtype=float32 weights are dequantized, so that products are exact in float32"
    if tensor > 1:
        return f"packed weights can't be split yet, and tp_size is {tensor}"
    if (why := refusal()) is not None:
        return f"this machine can't compile the products of packed weights: {why}"
    return ""


def _unpackable_reason(stored: StoredTypes) -> str:
    if not stored:
        return "the model has no quantized blocks: only GGUF files have them"
    found = ", ".join(sorted(set(stored.values())))
    return (
        f"no linear layer of this file can be kept as it is stored (it holds {found}; {', '.join(BITS)} can be, with "
        f"a multiple of {STRIP} outputs and of {BLOCK} inputs)"
    )


def _quantized_bits(linears: Mapping[Path, ParamSpec], stored: StoredTypes) -> dict[Path, Bits]:
    """Return the bits by path of the weights that can stay quantized.

    A parameter made of several tensors takes the widest one's bits, and stays dense if one of them can't be packed.
    """
    found: dict[Path, Bits] = {}
    for path, spec in linears.items():
        widths = [BITS.get(stored.get(part.name, "")) for part in spec.parts]
        known = [bits for bits in widths if bits is not None]
        if known and len(known) == len(widths) and _is_packable(spec) and spec.shape[-1] % BLOCK == 0:
            found[path] = max(known)
    return found


def _dense_bits(abstract: Any, paths: Iterable[Path], linears: Mapping[Path, ParamSpec]) -> dict[Path, Bits]:
    """Return 16 bits for each of `paths` that can be packed; a tied head is packed together with the embedding."""
    tied = abstract.output is None
    packable = [path for path in sorted(paths, key=str) if _is_packable(linears[path])]
    return {EMBEDDING if tied and path == HEAD else path: 16 for path in packable}


def _linears(abstract: Any) -> Iterable[tuple[Path, ParamSpec]]:
    """Yield the weights of linear layers; a tied head counts as a parameter of its own."""
    for keys, spec in jax.tree_util.tree_leaves_with_path(abstract):
        if spec.inputs:
            yield path_of(keys), spec
    if abstract.output is None:
        yield HEAD, dataclasses.replace(abstract.embedding, inputs=1)


def _is_packable(spec: ParamSpec) -> bool:
    split = len(spec.shape) - spec.inputs
    outputs, inputs = math.prod(spec.shape[:split]), math.prod(spec.shape[split:])
    return spec.stored_shape == spec.shape and inputs % BLOCK == 0 and outputs % STRIP == 0
