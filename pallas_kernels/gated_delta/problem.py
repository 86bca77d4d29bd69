"""The static facts of an operation, by which a backend says whether it supports it."""

from __future__ import annotations

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True)
class DeltaProblem:
    """The sizes of a layer on one shard, and the dtype of its inputs."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int
    dtype: np.dtype
