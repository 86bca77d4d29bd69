"""The shapes and dtypes of an attention call, and the device it runs on: facts known before anything is compiled."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np


@dataclasses.dataclass(frozen=True)
class KernelTarget:
    """The device that kernels are compiled for, attached or not. `capability` is CUDA's compute capability: (9, 0).

    `blocks` are block sizes that replace tuned ones: (`decode` or `prefill`, name, size) each. `cores` are a GPU's
    streaming multiprocessors.
    """

    platform: str
    kind: str = ""
    capability: tuple[int, int] | None = None
    blocks: frozenset[tuple[str, str, int]] = frozenset()
    cores: int | None = None


CPU = KernelTarget("cpu")


@dataclasses.dataclass(frozen=True)
class Problem:
    """The shapes and dtypes of a model's attention on one shard."""

    heads: int
    kv_heads: int
    head_dim: int
    page_size: int
    dtype: np.dtype
    kv_dtype: np.dtype


def target_of(device: Any) -> KernelTarget:
    """Return the target of a jax device, attached or of a topology description."""
    capability = getattr(device, "compute_capability", None)
    if capability is None:
        return KernelTarget(device.platform, device.device_kind)
    major, _, minor = str(capability).partition(".")
    cores = getattr(device, "core_count", None)
    return KernelTarget(device.platform, device.device_kind, (int(major), int(minor)), cores=cores)


def is_float8(dtype: Any) -> bool:
    """Return whether a dtype is float8_e4m3fn, the fp8 type of KV caches."""
    return bool(np.dtype(dtype) == jax.numpy.float8_e4m3fn)
