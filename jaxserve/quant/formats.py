"""Which linear layers of a model are packed, in how many bits, and why not in the blocks of the file where none is.

On a CPU all are that can be: what is in blocks as it is, what isn't in 16 bits, which changes no number. Decided from
types and shapes alone, before anything is read: what is stored, and what multiplies by it.
"""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import jax
import numpy as np

from jaxserve.errors import ConfigError
from jaxserve.params import ParamSpec, Path, Placement, path_of
from pallas_kernels.cpu import refusal
from pallas_kernels.packed_matmul import BLOCK, STRIP, Bits

BITS: Mapping[str, Bits] = {"Q4_0": 4, "Q4_1": 4, "Q4_K": 4, "Q5_0": 8, "Q5_1": 8, "Q5_K": 8, "Q8_0": 8}
"""Bits in which a stored type is packed; a type that isn't here is dequantized, or was never quantized."""

HEAD: Path = ("output",)
EMBEDDING: Path = ("embedding",)
"""What a tied head is made from: it has no tensor of its own."""

_DENSE = {"F64", "F32", "F16", "BF16"}

Asked = Literal["auto", "none", "gguf"]
Stored = Mapping[str, str]
"""The types of a checkpoint's tensors by name; empty where it can't have blocks."""


@dataclasses.dataclass(frozen=True)
class Packing:
    """Bits by path of the parameters that are packed, of `num_linears` that are linear layers' weights; `dense` are
    those of them that aren't. `reason` says why none is kept in its blocks, of a checkpoint that has them and where
    nobody asked for that."""

    bits: Mapping[Path, Bits] = dataclasses.field(default_factory=dict)
    num_linears: int = 0
    reason: str = ""
    dense: tuple[Path, ...] = ()

    @property
    def kept(self) -> dict[Path, Bits]:
        """Those that stay quantized."""
        return {path: bits for path, bits in self.bits.items() if bits < 16}


def choose(
    asked: Asked,
    abstract: Any,
    placements: Mapping[str, Placement],
    stored: Stored,
    *,
    platform: str,
    dtype: np.dtype,
    tensor: int,
) -> Packing:
    """What is packed of a model with these `ParamSpec`s. Raises `ConfigError` where blocks were asked for and can't be
    kept."""
    obstacle = _obstacle(platform, dtype, tensor)
    linears = dict(_linears(abstract))
    kept = {} if obstacle or asked == "none" else _bits_by_path(linears, placements, stored)
    reason = "" if kept else obstacle or _nothing_to_keep(stored)
    if asked == "gguf" and reason:
        raise ConfigError(f"quantization=gguf: {reason}; leave it at auto, or set none")
    if asked == "none" or _DENSE.issuperset(stored.values()):
        reason = ""
    tied = abstract.output is None
    bits = kept if obstacle else kept | _dense_bits(abstract, linears.keys() - kept.keys(), linears)
    packed = {HEAD if tied and path == EMBEDDING else path for path in bits}
    return Packing(bits, len(linears), reason, tuple(path for path in linears if path not in packed))


def _obstacle(platform: str, dtype: np.dtype, tensor: int) -> str:
    if platform != "cpu":
        return f"only a CPU multiplies by packed weights so far, and the device is a {platform}"
    if dtype == np.float32:
        return "with dtype=float32 weights are dequantized, so that products are as exact"
    if tensor > 1:
        return f"packed weights can't be split yet, and tp_size is {tensor}"
    if (why := refusal()) is not None:
        return f"this machine can't compile the products that take packed weights: {why}"
    return ""


def _nothing_to_keep(stored: Stored) -> str:
    if not stored:
        return "the model has no quantized blocks: only GGUF files have them"
    found = ", ".join(sorted(set(stored.values())))
    return (
        f"no linear layer of this file can be kept as it is stored (it holds {found}; {', '.join(BITS)} can, where "
        f"there are a multiple of {STRIP} outputs and of {BLOCK} inputs)"
    )


def _bits_by_path(
    linears: Mapping[Path, ParamSpec], placements: Mapping[str, Placement], stored: Stored
) -> dict[Path, Bits]:
    """The widest of the tensors that a parameter is made of; one that isn't packable leaves it dense."""
    kinds: dict[Path, list[Bits | None]] = defaultdict(list)
    for name, placement in placements.items():
        kinds[placement.path].append(BITS.get(stored.get(name, "")))
    found: dict[Path, Bits] = {}
    for path, spec in linears.items():
        widths = kinds[EMBEDDING if path == HEAD and HEAD not in kinds else path]
        known = [bits for bits in widths if bits is not None]
        if known and len(known) == len(widths) and _fits(spec) and spec.shape[-1] % BLOCK == 0:
            found[path] = max(known)
    return found


def _dense_bits(abstract: Any, paths: Iterable[Path], linears: Mapping[Path, ParamSpec]) -> dict[Path, Bits]:
    """Those that are read as they are; a tied head is the embedding, which then is packed for both."""
    tied = abstract.output is None
    return {EMBEDDING if tied and path == HEAD else path: 16 for path in sorted(paths, key=str) if _fits(linears[path])}


def _linears(abstract: Any) -> Iterable[tuple[Path, ParamSpec]]:
    """Weights of linear layers; a tied head as the parameter that it would be."""
    for keys, spec in jax.tree_util.tree_leaves_with_path(abstract):
        if spec.inputs:
            yield path_of(keys), spec
    if abstract.output is None:
        yield HEAD, dataclasses.replace(abstract.embedding, inputs=1)


def _fits(spec: ParamSpec) -> bool:
    split = len(spec.shape) - spec.inputs
    outputs, inputs = math.prod(spec.shape[:split]), math.prod(spec.shape[split:])
    return spec.stored_shape == spec.shape and inputs % BLOCK == 0 and outputs % STRIP == 0
