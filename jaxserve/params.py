"""One declaration of a parameter gives its shape, dtype, logical axes and initializer."""

from __future__ import annotations

import dataclasses
from typing import Literal

import numpy as np

Initializer = Literal["normal", "ones", "zeros"]


@dataclasses.dataclass(frozen=True)
class ParamSpec:
    """A parameter before it exists. `axes` names each dimension (or None); `runtime/mesh.py` maps names to mesh axes.

    `init` is what `--load-format dummy` fills it with; `normal` has standard deviation `scale`.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    axes: tuple[str | None, ...]
    init: Initializer = "normal"
    scale: float = 0.02

    def __post_init__(self) -> None:
        assert len(self.shape) == len(self.axes), (self.shape, self.axes)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole parameter, over all shards."""
        return int(np.prod(self.shape)) * self.dtype.itemsize


@dataclasses.dataclass(frozen=True)
class Placement:
    """Where one checkpoint tensor goes: reshaped to `shape` and written at `index` of the parameter at `path`.

    `path` is the parameter's place in the tree, attribute names and list indices; `shape` has the rank of the
    parameter; `index` holds the start of each dimension.
    """

    path: tuple[str | int, ...]
    shape: tuple[int, ...]
    index: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class KVSpec:
    """A group of layers that share one page table. `window` is None for full attention, else tokens seen back."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    window: int | None = None
