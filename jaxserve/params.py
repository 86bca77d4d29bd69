"""Declares parameters: one `ParamSpec` gives shape, dtype, logical axes, initializer and the checkpoint's tensors."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import numpy as np

Initializer = Literal["normal", "ones", "zeros", "constant", "range"]
Window = tuple[slice, ...]
Path = tuple[str | int, ...]
"""A parameter's place in its tree: attribute names, keys and list indices."""


EXPERT_AXES = ("experts", "experts_of_ranks")
"""The logical axes of experts: split among the shards of a rank, or among those of all ranks."""


class Order(NamedTuple):
    """Another order of dimension `axis`: the parameter's entry j is the tensor's entry `entries[j]`."""

    axis: int
    entries: tuple[int, ...]


class View(NamedTuple):
    """How to read a tensor that is stored otherwise: with dimensions `shape`, in the order of `axes`."""

    shape: tuple[int, ...]
    axes: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class TensorPart:
    """The place in a parameter of a checkpoint tensor, or of the part of a fused one that starts at row `first_row`.

    It is reshaped to `shape`, which has the parameter's rank, and written at `index`, the start in each dimension of
    `ParamSpec.stored_shape`. With `some_rows`, no other part needs to have the tensor's other rows, and another
    parameter may have these, too. `offset` is added to its values. A `view` reshapes and transposes it first;
    `quantized_view` does so with quantized numbers, which always have inputs last.
    """

    name: str
    shape: tuple[int, ...]
    index: tuple[int, ...]
    first_row: int = 0
    some_rows: bool = False
    order: Order | None = None
    offset: float = 0.0
    view: View | None = None
    quantized_view: View | None = None


@dataclasses.dataclass(frozen=True)
class ParamSpec:
    """The declaration of a parameter, which is made of the `parts`.

    `axes` names each dimension (or None); `runtime/devices/mesh.py` maps the names to mesh axes. `init` says what
    `--load-format dummy` fills it with: `normal` has standard deviation `scale`, `constant` is `scale`, `range` is the
    index.

    A parameter may be larger on a mesh than in a checkpoint, so that it can be split evenly; `shape` is the one on the
    mesh. There each stored KV head is repeated `kv_replicas` times. The next axis is split evenly between the replicas,
    except for its last `kv_shared` entries, which every replica has. `padding` rows of zeros follow on the first axis.

    If it is a linear layer's weight, a product sums over its last `inputs` dimensions; else `inputs` is 0. With
    `by_head`, each entry of the first dimension is a weight of its own, which multiplies the vectors of one head.
    `unused` are names of tensors that a checkpoint may hold beside the parts, and that the model doesn't need; one that
    ends with a dot stands for all that begin with it.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    axes: tuple[str | None, ...]
    init: Initializer = "normal"
    scale: float = 0.02
    kv_replicas: int = 1
    kv_shared: int = 0
    padding: int = 0
    inputs: int = 0
    by_head: bool = False
    parts: tuple[TensorPart, ...] = ()
    unused: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        assert len(self.shape) == len(self.axes), (self.shape, self.axes)

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The shape in a checkpoint, which doesn't depend on the mesh."""
        shape = list(self.shape)
        shape[0] -= self.padding
        if self.kv_replicas > 1:
            heads = self.axes.index("kv_heads")
            shape[heads] //= self.kv_replicas
            shape[heads + 1] = (shape[heads + 1] - self.kv_shared) * self.kv_replicas + self.kv_shared
        return tuple(shape)

    def windows(self, index: Window) -> Iterator[tuple[Window, Window]]:
        """Yield the stored windows that make up a shard, each with its window in the shard.

        `index` is the shard's part of the parameter on the mesh. What no window covers is zero.
        """
        bounds = [part.indices(size)[:2] for part, size in zip(index, self.shape, strict=True)]
        stored = [slice(*bound) for bound in bounds]
        inside = [slice(0, stop - start) for start, stop in bounds]
        if self.padding:
            start, stop = bounds[0]
            length = min(stop, self.shape[0] - self.padding) - start
            if length <= 0:
                return
            stored[0], inside[0] = slice(start, start + length), slice(0, length)
        if self.kv_replicas == 1:
            yield tuple(stored), tuple(inside)
            return
        heads = self.axes.index("kv_heads")
        split = self.shape[heads + 1] - self.kv_shared
        shared = slice(split * self.kv_replicas, split * self.kv_replicas + self.kv_shared)
        first, last = bounds[heads]
        for at in range(first, last):
            head, replica = divmod(at, self.kv_replicas)
            stored[heads], inside[heads] = slice(head, head + 1), slice(at - first, at - first + 1)
            stored[heads + 1] = slice(replica * split, (replica + 1) * split)
            inside[heads + 1] = slice(0, split)
            yield tuple(stored), tuple(inside)
            if self.kv_shared:
                stored[heads + 1], inside[heads + 1] = shared, slice(split, split + self.kv_shared)
                yield tuple(stored), tuple(inside)

    @property
    def num_experts(self) -> int:
        """The number of experts, over all shards, if this is a parameter of experts; else 0."""
        return self.shape[0] if self.axes and self.axes[0] in EXPERT_AXES else 0

    @property
    def stacked(self) -> int:
        """The number of leading dimensions that count weights: 1 for those of experts and of heads, else 0."""
        return 1 if self.num_experts or self.by_head else 0

    @property
    def nbytes(self) -> int:
        """Bytes of the whole parameter, over all shards."""
        return int(np.prod(self.shape)) * self.dtype.itemsize


@dataclasses.dataclass(frozen=True)
class KVSpec:
    """A group of layers that share one page table. `window` is a sliding window in tokens, None for full attention.

    With `value_dim`, the group keeps latent rows of `head_dim` numbers, of which the first `value_dim` are the value;
    its `num_kv_heads` counts the copies of a row, one for each shard.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    window: int | None = None
    value_dim: int | None = None


@dataclasses.dataclass(frozen=True)
class StateSpec:
    """A group of layers that keep a state of fixed size for each sequence: gated delta nets.

    A head of keys has `value_heads / key_heads` heads of values; `taps` is the size of the convolution's kernel.
    """

    num_layers: int
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int


def path_of(keys: tuple[Any, ...]) -> Path:
    """Return a path as a tuple of names and indices, from jax's keys."""
    return tuple(_part(key) for key in keys)


def dotted(path: Path) -> str:
    """Return a path as messages show it: `layers.0.attention.qkv`."""
    return ".".join(str(part) for part in path)


def _part(key: Any) -> str | int:
    for attribute in ("name", "idx", "key"):
        if hasattr(key, attribute):
            part: str | int = getattr(key, attribute)
            return part
    raise AssertionError(f"a parameter tree is made of dataclasses, tuples and dicts, not {type(key)}")
