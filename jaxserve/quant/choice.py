"""Chooses how a deployment holds the weights of its linear layers: quantized as stored, quantized now, or in 16 bits.

On a CPU other weights are packed in 16 bits, which changes no number. The choice needs only types and shapes, so it is
made before any weight is read.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.error_texts import join_first
from jaxserve.errors import ConfigError
from jaxserve.params import ParamSpec, Path, dotted, path_of
from jaxserve.quant.checkpoint import OnTheFly
from jaxserve.quant.stored import Stored, StoredWeight, join
from pallas_kernels import grouped_matmul
from pallas_kernels.cpu import refusal
from pallas_kernels.quantized_matmul import BACKENDS, BLOCK, STRIP, Backend, NumberType, Scheme, arrangement
from pallas_kernels.target import KernelTarget

HEAD: Path = ("output",)
EMBEDDING: Path = ("embedding",)
"""A tied head is made from the embedding: it has no tensor of its own."""

_FEW_OUTPUTS = {"router", "shared_gate", "gates"}
_AFTER_POOLING = "pooled"
_OF_HEADS = "the parts of kv_b_proj multiply queries and sums of latent vectors, one weight a head, in 16 bits"
_POOLED = "layers after pooling keep their type"
_GROUPS = (128, 64, 32)
_BF16 = np.dtype(jnp.bfloat16)


@dataclasses.dataclass(frozen=True)
class WeightForm:
    """How a deployment holds one weight. Without a `scheme` it is bfloat16, packed for a CPU.

    `factors` is the type of its scales, `zeros` the type of its zeros; `reordered` tells whether its inputs have an
    order of their own. `backend` multiplies by a weight in rows of outputs with an `arrangement` (see
    `QuantizedWeight`); it is None for the packed layout of a CPU.
    """

    scheme: Scheme | None = None
    factors: np.dtype = _BF16
    zeros: np.dtype = _BF16
    reordered: bool = False
    backend: Backend | None = None
    arrangement: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class WeightChoice:
    """The forms of weights by path, and for every other weight of a linear layer the reason why it isn't quantized.

    `method` tells where quantized weights come from: `gguf`, a `quant_method`, the setting that quantizes them now
    (`on_the_fly`), or `none`. `checkpoint` is the method of the checkpoint, empty if it isn't quantized.
    """

    method: str = "none"
    checkpoint: str = ""
    on_the_fly: bool = False
    forms: Mapping[Path, WeightForm] = dataclasses.field(default_factory=dict)
    others: Mapping[Path, str] = dataclasses.field(default_factory=dict)

    @property
    def quantized(self) -> dict[Path, Scheme]:
        """The schemes of the weights that are quantized."""
        return {path: form.scheme for path, form in self.forms.items() if form.scheme is not None}

    @property
    def summary(self) -> str:
        """The method and schemes of quantized weights, as text; empty if neither checkpoint nor deployment has any."""
        if not self.quantized:
            return self.checkpoint and f"{self.checkpoint}, dequantized"
        counts = Counter(self.quantized.values())
        schemes = ", ".join(f"{scheme.bits} bits ({scheme}) x {count}" for scheme, count in counts.items())
        total = len(self.quantized) + len(self.others)
        now = ", quantized now" if self.on_the_fly else ""
        return f"{self.method}{now}, {len(self.quantized)} of {total} linear layers in {schemes}"

    @property
    def reasons(self) -> str:
        """Which other weights of linear layers are not quantized, and why."""
        by_reason: dict[str, list[str]] = defaultdict(list)
        for path, reason in self.others.items():
            by_reason[reason].append(dotted(path))
        return "; ".join(f"{join_first(paths, 3)}: {reason}" for reason, paths in by_reason.items())

    @property
    def dense(self) -> tuple[Path, ...]:
        """The weights of linear layers that XLA multiplies by."""
        packed = {HEAD if path == EMBEDDING else path for path in self.forms}
        return tuple(path for path in self.others if path not in packed)


class Shards(NamedTuple):
    """The number of shards of a weight, and of each expert of a mixture."""

    tensor: int = 1
    expert: int = 1


ONE_SHARD = Shards()


def choose_weights(
    setting: str,
    abstract: Any,
    stored: Stored,
    method: str | None,
    *,
    target: KernelTarget,
    dtype: np.dtype,
    shards: Shards = ONE_SHARD,
    splits_into: Callable[[int], bool] = lambda shards: True,
) -> WeightChoice:
    """Choose the forms of the weights of a model with these `ParamSpec`s.

    The checkpoint is quantized by `method`, or not if it is None. `splits_into` tells whether a number of shards can
    split the model. Raises `ConfigError` if the setting asks for another method, or if `shards` would cut groups of
    inputs.
    """
    on_the_fly = _check_setting(setting, method)
    converted = method if any(one.packing == "converted" for one in stored.values()) else None
    linears = dict(_linears(abstract))
    obstacle = _obstacle(target, dtype) if target.platform == "cpu" else ""
    forms: dict[Path, WeightForm] = {}
    others: dict[Path, str] = {}
    for path, spec in linears.items():
        if _AFTER_POOLING in path:
            weight: StoredWeight | str = _POOLED
        elif made := on_the_fly or converted:
            weight = weight_on_the_fly(made, path, spec, shards if on_the_fly else ONE_SHARD)
        else:
            weight = _stored_weight(spec, stored)
        if isinstance(weight, str):
            others[path] = weight
            continue
        why_not = "--quantization none" if setting == "none" else obstacle
        form = why_not or _form(path, spec, weight, target, shards, splits_into)
        if isinstance(form, str):
            others[path] = form
        else:
            forms[path] = form
    kept = on_the_fly or method or "none"
    if setting not in ("auto", "none") and not forms:
        reasons = "; ".join(dict.fromkeys(others.values()))
        raise ConfigError(
            f"quantization={setting}: no linear layer can be held quantized here ({reasons}); leave it at auto"
        )
    packed = (
        {} if obstacle else _packed_in_16_bits(abstract, linears, others, shards) if target.platform == "cpu" else {}
    )
    return WeightChoice(kept if forms else "none", method or "", bool(on_the_fly and forms), forms | packed, others)


def _check_setting(setting: str, method: str | None) -> str | None:
    """Return the scheme to quantize weights to, or None. Raises `ConfigError` if the checkpoint has another method."""
    if setting in ("auto", "none", method):
        return None
    if method is not None:
        raise ConfigError(f"quantization={setting}: the checkpoint is quantized by {method}; leave it at auto")
    if setting in get_args(OnTheFly):
        return setting
    raise ConfigError(
        f"quantization={setting}: the checkpoint is not quantized; leave it at auto, or set "
        f"{', '.join(get_args(OnTheFly))} to quantize it as it is loaded"
    )


def _obstacle(target: KernelTarget, dtype: np.dtype) -> str:
    """Return why a CPU packs no weight, or an empty text."""
    if dtype == np.float32:
        return "with dtype=float32 weights are dequantized, so that products are exact in float32"
    if (why := refusal()) is not None:
        return f"this machine can't compile the products of packed weights: {why}"
    return ""


def _stored_weight(spec: ParamSpec, stored: Stored) -> StoredWeight | str:
    """Return how the tensors of a parameter are stored, or why they can't be used as they are."""
    if spec.by_head:
        return _OF_HEADS
    tensors = [stored.get(part.name) or StoredWeight("16 bits") for part in spec.parts]
    return join(tensors)


def weight_on_the_fly(scheme: str, path: Path, spec: ParamSpec, shards: Shards) -> StoredWeight | str:
    """Return how a weight of 16 bits is quantized for these shards, or why it isn't."""
    if path == HEAD:
        return "the output head keeps its type"
    if spec.by_head:
        return _OF_HEADS
    if _AFTER_POOLING in path:
        return _POOLED
    if _FEW_OUTPUTS & set(path):
        return "routers, and the gates of shared experts and of delta nets, keep their type"
    numbers: NumberType = "fp8" if scheme == "fp8" else "int8" if scheme == "int8" else "int4"
    if numbers == "fp8":
        return StoredWeight("fp8", Scheme("fp8", activations="token"), factors=np.dtype(np.float32))
    _, inputs = shard_sizes(spec, shards)
    group = next((size for size in _GROUPS if inputs % size == 0), None)
    if group is None:
        return f"its {inputs} inputs are no multiple of {_GROUPS[-1]}"
    return StoredWeight(scheme, Scheme(numbers, group, zeros=numbers == "int4"), factors=_BF16)


def _form(
    path: Path,
    spec: ParamSpec,
    weight: StoredWeight,
    target: KernelTarget,
    shards: Shards,
    splits_into: Callable[[int], bool],
) -> WeightForm | str:
    """Return the form of a weight that is quantized, or why it must be dequantized."""
    scheme = weight.scheme
    assert scheme is not None, weight
    outputs, inputs = shard_sizes(spec, shards)
    total = math.prod(spec.shape[len(spec.shape) - spec.inputs :])
    if spec.num_experts and weight.order:
        return "experts with inputs in an order of their own (act-order) are not multiplied as they are stored"
    if inputs < total and weight.order:
        return "inputs in an order of their own (act-order) can't be divided among shards"
    on_cpu = target.platform == "cpu"
    group = scheme.group or 1
    # A CPU has factors for every 32 inputs
    unit = math.gcd(group, BLOCK) if on_cpu and scheme.activations != "group" else group
    if inputs % unit and total % unit == 0 and spec.num_experts:
        raise ConfigError(
            f"{shards.expert} devices that divide each expert would cut the groups of {group} inputs of "
            f"{dotted(path)}, which has {total}; raise --ep-size, so that fewer devices divide an expert"
        )
    if inputs % unit and total % unit == 0:
        fitting = [n for n in range(1, 65) if total % (n * unit) == 0 and splits_into(n)]
        raise ConfigError(
            f"tp_size={shards.tensor} would cut the groups of {group} inputs of {dotted(path)}, which has {total}; "
            f"sizes that don't: {', '.join(map(str, fitting))}"
        )
    if inputs % group and (not on_cpu or scheme.activations == "group"):
        return f"its {inputs} inputs are no multiple of the group of {group}"
    if on_cpu:
        if not _is_packable(spec, shards) or (group % BLOCK and scheme.group):
            return (
                f"the CPU's kernel needs multiples of {STRIP} outputs and of {BLOCK} inputs a group, and this weight "
                f"has {outputs} x {inputs}{f' in groups of {group}' if scheme.group else ''}"
            )
        return WeightForm(scheme, weight.factors, weight.zeros, bool(weight.order))
    backends: Any = grouped_matmul.BACKENDS if spec.num_experts else BACKENDS
    backend = backends.choose(target, (outputs, inputs, scheme))
    if backend.name == "reference" and scheme.numbers == "fp4":
        # Twice these numbers are integers
        scheme = dataclasses.replace(scheme, numbers="int8")
        backend = backends.choose(target, (outputs, inputs, scheme))
    if backend.name == "reference":
        return f"no kernel for {target.kind or target.platform} multiplies by {weight.type} of {outputs} x {inputs}"
    order = arrangement(backend, inputs, scheme)
    return WeightForm(scheme, weight.factors, weight.zeros, bool(weight.order), backend, order)


def _packed_in_16_bits(
    abstract: Any, linears: Mapping[Path, ParamSpec], paths: Iterable[Path], shards: Shards
) -> dict[Path, WeightForm]:
    """Return the forms of those of `paths` that a CPU packs in 16 bits; a tied head is packed with the embedding."""
    tied = ties_head(abstract)
    packable = [path for path in sorted(paths, key=str) if _is_packable(linears[path], shards)]
    return {EMBEDDING if tied and path == HEAD else path: WeightForm() for path in packable}


def convert_forms(scheme: str, abstract: Any) -> dict[Path, WeightForm]:
    """Return the forms in which `jaxserve convert` stores the weights that it quantizes, in rows."""
    found = ((path, weight_on_the_fly(scheme, path, spec, ONE_SHARD)) for path, spec in _linears(abstract))
    return {
        path: WeightForm(weight.scheme, weight.factors, backend=Backend())
        for path, weight in found
        if isinstance(weight, StoredWeight)
    }


def ties_head(abstract: Any) -> bool:
    """Return whether the embedding of a tree of parameters is its head, too; a head that drafts may have neither, and a
    model that only pools has no head."""
    embedding, output = (getattr(abstract, name, None) for name in ("embedding", "output"))
    return output is None and embedding is not None and getattr(abstract, "has_head", True)


def _linears(abstract: Any) -> Iterable[tuple[Path, ParamSpec]]:
    """Yield the weights of linear layers; a tied head counts as a parameter of its own."""
    for keys, spec in jax.tree_util.tree_leaves_with_path(abstract):
        if spec.inputs:
            yield path_of(keys), spec
    if ties_head(abstract):
        yield HEAD, dataclasses.replace(abstract.embedding, inputs=1)


def shard_sizes(spec: ParamSpec, shards: Shards) -> tuple[int, int]:
    """Return the outputs and inputs of one shard of a linear layer's weight, or of each of its experts or heads."""
    split = len(spec.shape) - spec.inputs
    first, parts = spec.stacked, shards.expert if spec.num_experts else shards.tensor
    sizes = [math.prod(spec.shape[first:split]), math.prod(spec.shape[split:])]
    for i, axes in enumerate((spec.axes[first:split], spec.axes[split:])):
        if any(axis is not None for axis in axes):
            sizes[i] //= parts
    return sizes[0], sizes[1]


def split_axis(spec: ParamSpec) -> int:
    """Return the dimension of outputs that shards divide, of each expert or head; the first if there is none."""
    first = spec.stacked
    outputs = range(first, len(spec.axes) - spec.inputs)
    return next((i for i in outputs if spec.axes[i] is not None), first)


def _is_packable(spec: ParamSpec, shards: Shards) -> bool:
    """Return whether strips and blocks of a CPU's layout divide one shard of a weight."""
    outputs, inputs = shard_sizes(spec, shards)
    outer = spec.shape[spec.stacked : split_axis(spec)]
    return inputs % BLOCK == 0 and outputs // math.prod(outer) % STRIP == 0
