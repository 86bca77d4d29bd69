"""What attention is asked to do, and on which device: facts known before anything is compiled."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np


@dataclasses.dataclass(frozen=True)
class Target:
    """The device that kernels are compiled for, attached or not. `capability` is CUDA's, as (9, 0).

    `blocks` are block sizes that the caller wants instead of tuned ones: (`decode` or `prefill`, name, size) each.
    """

    platform: str
    kind: str = ""
    capability: tuple[int, int] | None = None
    blocks: frozenset[tuple[str, str, int]] = frozenset()


CPU = Target("cpu")


@dataclasses.dataclass(frozen=True)
class Problem:
    """What a model asks of attention on one shard, known before anything is compiled."""

    heads: int
    kv_heads: int
    head_dim: int
    page_size: int
    dtype: np.dtype
    kv_dtype: np.dtype


def target_of(device: Any) -> Target:
    """The target that a jax device is, or a device of a topology that isn't attached."""
    capability = getattr(device, "compute_capability", None)
    if capability is None:
        return Target(device.platform, device.device_kind)
    major, _, minor = str(capability).partition(".")
    return Target(device.platform, device.device_kind, (int(major), int(minor)))


def is_float8(dtype: Any) -> bool:
    """Whether a dtype is the fp8 that KV caches are kept in (e4m3)."""
    return bool(np.dtype(dtype) == jax.numpy.float8_e4m3fn)
