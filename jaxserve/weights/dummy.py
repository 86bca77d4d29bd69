"""Made-up weights, from `ParamSpec`s and a seed alone, for `--load-format dummy`.

Each parameter depends on the seed and its own path only, not on the order or on what else the model has. Normal values
come from one block of random numbers read at random offsets, so that a large model is made at the speed of a copy:
good for benchmarks and tests of plumbing, and not independent draws.
"""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np

from jaxserve.params import ParamSpec
from jaxserve.weights.arrays import Path, build, dotted, flatten

_BLOCK = 1 << 20
_SEED_MASK = (1 << 64) - 1


def dummy_params(abstract: Any, shardings: Any, seed: int) -> Any:
    """The parameters of `abstract` as jax arrays on `shardings`, filled as each spec's `init` says."""
    twice = np.tile(np.random.default_rng(seed & _SEED_MASK).standard_normal(_BLOCK, dtype=np.float32), 2)
    scaled = {
        (spec.scale, spec.dtype): (twice * np.float32(spec.scale)).astype(spec.dtype)
        for _, spec in flatten(abstract)[0]
        if spec.init == "normal"
    }

    def fill(path: Path, spec: ParamSpec, buffer: np.ndarray[Any, Any]) -> None:
        if spec.init != "normal":
            buffer.fill(1 if spec.init == "ones" else 0)
            return
        block = scaled[spec.scale, spec.dtype]
        rng = np.random.default_rng([seed & _SEED_MASK, zlib.crc32(dotted(path).encode())])
        flat = buffer.reshape(-1)
        for start in range(0, flat.size, _BLOCK):
            part = flat[start : start + _BLOCK]
            offset = int(rng.integers(_BLOCK))
            part[:] = block[offset : offset + part.size]

    return build(abstract, shardings, fill)
