"""Divides the memory of a device between weights, state and KV pool, and fits the context length to the pool."""

from __future__ import annotations

import dataclasses
import logging

from jaxserve.config.schema import DEFAULT_MEM_FRACTION, EngineConfig
from jaxserve.errors import ConfigError

logger = logging.getLogger("jaxserve.runtime")

CPU_POOL_BYTES = 2**29


class InsufficientMemoryError(ConfigError):
    """Weights, state and activations leave no memory for the KV cache."""


@dataclasses.dataclass(frozen=True)
class Footprint:
    """Bytes that a deployment takes on one device besides the KV pool, and the bytes of a token in the pool.

    `state` is the state by slot. `activations` is the working memory of the largest program: an estimate, or the
    compiler's figure once there is one.
    """

    weights: int
    state: int
    activations: int
    kv_per_token: int

    @property
    def non_pool(self) -> int:
        """Bytes that the pool can't have."""
        return self.weights + self.state + self.activations


@dataclasses.dataclass(frozen=True)
class PoolPlan:
    """The size of the KV pool and the context length that fits it.

    `memory_bound` says that the pool would be larger if the device had more memory.
    """

    num_pages: int
    context_length: int
    memory_bound: bool = False


def plan_pool(
    config: EngineConfig,
    footprint: Footprint,
    *,
    platform: str,
    memory_bytes: int,
    model_context: int,
    longest_context: int | None = None,
    max_running: int,
    num_devices: int = 1,
) -> PoolPlan:
    """Size the pool from `--max-total-tokens` or from memory, and fit the context length to it.

    Raises `ConfigError` for sizes that don't fit, `InsufficientMemoryError` if no memory is left for the cache.
    """
    wanted = config.context_length or model_context
    longest = longest_context or model_context
    if wanted > longest:
        raise ConfigError(
            f"context_length={wanted} is longer than the model's {longest} tokens; lower --context-length"
        )
    tokens, memory_bound = config.max_total_tokens, False
    free = usable_bytes(config, memory_bytes) - footprint.non_pool
    if tokens is None:
        # Enough for every running request at full length: more would never be used.
        usable = max_running * -(-wanted // config.page_size) * config.page_size
        if platform == "cpu":
            # Other programs share the machine, and filling the pool with zeros takes start-up time.
            usable = min(usable, CPU_POOL_BYTES // num_devices // footprint.kv_per_token)
        tokens = min(free // footprint.kv_per_token, usable)
        memory_bound = tokens < usable
        if tokens < min(config.page_size * 2, usable):
            raise _insufficient_memory(config, footprint, memory_bytes)
    elif footprint.weights + footprint.state + tokens * footprint.kv_per_token > memory_bytes:
        # Activations are left out of this check: they are an estimate, and a pool that was seen to run, such as that of
        # a bundle, must not be refused for it.
        largest = free // footprint.kv_per_token // config.page_size * config.page_size
        if largest < config.page_size:
            raise _insufficient_memory(config, footprint, memory_bytes)
        raise ConfigError(
            f"max_total_tokens={tokens} takes {tokens * footprint.kv_per_token / 2**30:.2f} GiB of each device, but "
            f"{free / 2**30:.2f} of its {memory_bytes / 2**30:.2f} GiB are left for the KV cache: at most "
            f"--max-total-tokens {largest} fits"
        )
    num_pages = tokens // config.page_size
    if num_pages < 1:
        if config.max_total_tokens is not None:
            raise ConfigError(f"max_total_tokens={tokens} is less than one page of {config.page_size} tokens")
        raise InsufficientMemoryError(
            f"each of dp_size={config.dp_size} ranks gets a KV cache of {tokens} tokens, which is less than one "
            f"page of page_size={config.page_size}"
        )
    fitted = min(wanted, num_pages * config.page_size)
    return PoolPlan(num_pages, fitted, memory_bound)


def _insufficient_memory(config: EngineConfig, footprint: Footprint, memory_bytes: int) -> InsufficientMemoryError:
    return InsufficientMemoryError(
        f"no memory is left for the KV cache: {footprint.weights / 2**30:.2f} GiB of weights, "
        f"{footprint.state / 2**30:.2f} GiB of state and {footprint.activations / 2**30:.2f} GiB of "
        f"activations on a device of which {usable_bytes(config, memory_bytes) / 2**30:.2f} GiB may be used"
    )


def usable_bytes(config: EngineConfig, memory_bytes: int) -> int:
    """Return how many bytes of a device's memory a deployment may use, by `--mem-fraction-static`."""
    return int(memory_bytes * (config.mem_fraction_static or DEFAULT_MEM_FRACTION))
