"""Generates random weights from `ParamSpec`s and a seed, for `--load-format dummy`.

Each parameter depends only on the seed and its own path, not on the order or on the rest of the model. Normal values
come from one block of random numbers that is read at random offsets, so a large model is generated at the speed of a
copy. The values are therefore not independent draws, which is good enough for benchmarks and for tests of loading.
"""

from __future__ import annotations

import math
import os
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from jaxserve.params import ParamSpec, Path, Window, dotted
from jaxserve.weights.arrays import WeightReader, build_params, flatten

_BLOCK = 1 << 20
_SEED_MASK = (1 << 64) - 1


def dummy_params(abstract: Any, shardings: Any, seed: int) -> Any:
    """Return the parameters of `abstract` as jax arrays on `shardings`, filled as each spec's `init` says."""
    return build_params(abstract, shardings, dummy_reader(abstract, seed))


def dummy_reader(abstract: Any, seed: int) -> WeightReader:
    """Return a reader that generates any window of a parameter; its values don't depend on how it is split."""
    leaves, _ = flatten(abstract)
    twice = np.tile(np.random.default_rng(seed & _SEED_MASK).standard_normal(_BLOCK, dtype=np.float32), 2)
    scaled = {
        (spec.scale, spec.dtype): _as_type(twice * np.float32(spec.scale), spec.dtype)
        for _, spec in leaves
        if spec.init == "normal"
    }

    def fill(path: Path, spec: ParamSpec, window: Window, out: np.ndarray[Any, Any]) -> None:
        if spec.init == "range":
            out[...] = np.arange(window[0].start, window[0].stop)
            return
        if spec.init != "normal":
            out.fill({"ones": 1, "zeros": 0, "constant": spec.scale}[spec.init])
            return
        block = scaled[spec.scale, spec.dtype]
        rng = np.random.default_rng([seed & _SEED_MASK, zlib.crc32(dotted(path).encode())])
        offsets = [int(rng.integers(_BLOCK)) for _ in range(0, math.prod(spec.stored_shape), _BLOCK)]
        for first, run in _runs(spec.stored_shape, window, out):
            done = 0
            while done < run.size:
                number, inside = divmod(first + done, _BLOCK)
                part = run[done : done + _BLOCK - inside]
                start = offsets[number] + inside
                part[:] = block[start : start + part.size]
                done += part.size

    return WeightReader(fill, tuple(range(len(leaves))), os.cpu_count() or 1)


def _as_type(values: np.ndarray[Any, Any], dtype: np.dtype) -> np.ndarray[Any, Any]:
    """Return random values converted to a type; integers keep only the bits that the type holds."""
    return values.astype(np.int64).astype(dtype) if dtype.kind in "iu" else values.astype(dtype)


def _runs(
    shape: tuple[int, ...], window: Window, out: np.ndarray[Any, Any]
) -> Iterator[tuple[int, np.ndarray[Any, Any]]]:
    """Split `out`, a window of an array of `shape`, into runs that are contiguous in both.

    Yields each run as a vector, with the flat index in that array of its first element.
    """
    inner = out.ndim
    while inner > 1 and out.shape[inner - 1] == shape[inner - 1] and out[(0,) * (inner - 2)].flags.c_contiguous:
        inner -= 1
    strides = [math.prod(shape[axis + 1 :]) for axis in range(out.ndim)]
    start = sum(part.start * stride for part, stride in zip(window, strides))
    for index in np.ndindex(out.shape[: inner - 1]):
        yield start + sum(i * stride for i, stride in zip(index, strides)), out[index].reshape(-1)
