"""From host buffers to jax arrays: one buffer a parameter, filled by a caller's function, handed to its sharding.

Owns how much memory loading takes: besides what has become a jax array there are at most two buffers, one a thread.
On a CPU the array is the buffer itself (jax takes memory aligned to 64 bytes as it is), so nothing is held twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

from jaxserve.params import ParamSpec

Path = tuple[str | int, ...]
Fill = Callable[[Path, ParamSpec, np.ndarray[Any, Any]], None]

_THREADS = 2
_ALIGNMENT = 64


def flatten(abstract: Any) -> tuple[list[tuple[Path, ParamSpec]], Any]:
    """The parameters of a tree with their paths (attribute names, keys and list indices), and the tree's structure."""
    leaves, structure = jax.tree_util.tree_flatten_with_path(abstract)
    return [(tuple(_part(key) for key in keys), spec) for keys, spec in leaves], structure


def dotted(path: Path) -> str:
    """A path as messages show it: `layers.0.attention.qkv`."""
    return ".".join(str(part) for part in path)


def build(abstract: Any, shardings: Any, fill: Fill, order: Sequence[int] | None = None) -> Any:
    """A tree of jax arrays like `abstract`: each parameter is filled on the host, in `order`, then put."""
    leaves, structure = flatten(abstract)
    placed = jax.tree_util.tree_leaves(shardings)
    assert len(placed) == len(leaves), (len(placed), len(leaves))

    def make(i: int) -> jax.Array:
        path, spec = leaves[i]
        buffer = _aligned_empty(spec.stored_shape, spec.dtype)
        fill(path, spec, buffer)
        array = jax.make_array_from_callback(spec.shape, placed[i], lambda index: spec.shard(buffer, index or ()))
        return array.block_until_ready()

    order = range(len(leaves)) if order is None else order
    assert sorted(order) == list(range(len(leaves)))
    arrays: list[jax.Array | None] = [None] * len(leaves)
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="weights") as pool:
        for i, array in zip(order, pool.map(make, order)):
            arrays[i] = array
    return jax.tree_util.tree_unflatten(structure, arrays)


def _part(key: Any) -> str | int:
    for attribute in ("name", "idx", "key"):
        if hasattr(key, attribute):
            part: str | int = getattr(key, attribute)
            return part
    raise AssertionError(f"a parameter tree is made of dataclasses, tuples and dicts, not {type(key)}")


def _aligned_empty(shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    nbytes = int(np.prod(shape)) * dtype.itemsize
    raw = np.empty(nbytes + _ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT
    return raw[start : start + nbytes].view(dtype).reshape(shape)
