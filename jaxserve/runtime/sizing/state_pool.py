"""Sizes the pool of states of models that keep a state of fixed size for each sequence, and how many requests run.

A state takes as much memory as the keys and values of thousands of tokens. So the number of requests that run at once
follows from memory, if it isn't set, and with it the number of states: one for each request, and some for prefixes.
"""

from __future__ import annotations

import numpy as np

from jaxserve.config.schema import EngineConfig
from jaxserve.errors import ConfigError
from jaxserve.models.layout import AnyModel
from jaxserve.runtime.devices.device import DeviceFacts
from jaxserve.runtime.sizing.memory import CPU_POOL_BYTES, usable_bytes
from pallas_kernels.dispatch import Backend
from pallas_kernels.gated_delta import DeltaProblem, choose_backend
from pallas_kernels.target import KernelTarget

# Length of the requests for which memory is divided between states and the KV cache
_EXPECTED_TOKENS = 4096

_LEAST_SNAPSHOTS = 8


def delta_backend(model: AnyModel, dtype: np.dtype, target: KernelTarget) -> Backend | None:
    """Return the backend that computes a model's gated delta nets on each shard, None if it has none."""
    spec = model.state_spec()
    if spec is None:
        return None
    heads = spec.key_heads // model.shards, spec.value_heads // model.shards
    return choose_backend(target, DeltaProblem(*heads, spec.key_dim, spec.value_dim, spec.taps, dtype))


def resolve_running(
    config: EngineConfig,
    device: DeviceFacts,
    *,
    default: int,
    multiple: int,
    slot_bytes: int,
    state_bytes: int | None,
    token_bytes: int,
    weight_bytes: int,
    num_devices: int,
) -> tuple[int, int]:
    """Return how many requests of a rank run at once, and how many states it keeps: 0 if `state_bytes` is None.

    By default, `default` requests run, or a `multiple` with which states and requests of 4,096 tokens fit the memory;
    there is half a state more for each, for cached prefixes, and at least 8. Bytes are those of a device: `slot_bytes`
    of a slot, `token_bytes` of a token in all KV groups. Raises `ConfigError` if fewer states are asked for than there
    are requests.
    """
    running, states = config.max_running_requests, config.max_mamba_cache_size
    if state_bytes is None:
        if states is not None:
            raise ConfigError(
                f"max_mamba_cache_size={states}: no layer of this model keeps a state for each sequence; leave it out"
            )
        return running or default, 0
    if states is not None:
        most = running or min(default, states)
        if states < most:
            raise ConfigError(
                f"max_mamba_cache_size={states} is less than max_running_requests={most}, and each running request has "
                "a state: raise the former, or lower the latter"
            )
        return most, states
    if running is None:
        each = slot_bytes + state_bytes * 3 // 2
        if device.platform == "cpu":
            fit = CPU_POOL_BYTES // num_devices // each
        else:
            free = usable_bytes(config, device.memory_bytes) - weight_bytes - _LEAST_SNAPSHOTS * state_bytes
            free -= config.kv_cache_memory_bytes or 0
            fit = free // (each + _EXPECTED_TOKENS * token_bytes)
        running = min(default, max(fit // multiple * multiple, 1))
    return running, running + max(running // 2, _LEAST_SNAPSHOTS)
