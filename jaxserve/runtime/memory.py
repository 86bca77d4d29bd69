"""How much goes where: weights, the KV pool, and the context that fits it."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

import jax
import psutil

from jaxserve.config.schema import EngineConfig
from jaxserve.errors import ConfigError

logger = logging.getLogger("jaxserve.runtime")

DEFAULT_FRACTION = 0.88
CPU_POOL_BYTES = 2**29


@dataclasses.dataclass(frozen=True)
class PoolPlan:
    """Pages of the KV pool, and the context length that fits it."""

    num_pages: int
    context_length: int


def plan_pool(
    config: EngineConfig,
    *,
    device: Any,
    weight_bytes: int,
    activation_bytes: int,
    bytes_per_token: int,
    model_context: int,
    max_running: int,
) -> PoolPlan:
    """Size the pool from `--max-total-tokens` or from memory, and fit the context to it.

    Raises `ConfigError` naming the flag to turn where nothing is left for the cache.
    """
    wanted = config.context_length or model_context
    if wanted > model_context:
        raise ConfigError(
            f"context_length={wanted} is longer than the model's {model_context} tokens; lower --context-length"
        )
    tokens = config.max_total_tokens
    if tokens is None:
        free = _free_bytes(config, device, weight_bytes + activation_bytes)
        # More than every running request at full length can't be used.
        usable = max_running * -(-wanted // config.page_size) * config.page_size
        tokens = min(free // bytes_per_token, usable)
        if tokens < min(config.page_size * 2, usable):
            raise ConfigError(
                f"no memory is left for the KV cache: {weight_bytes / 2**30:.2f} GiB of weights and "
                f"{activation_bytes / 2**30:.2f} GiB of activations; raise --mem-fraction-static or lower "
                f"--chunked-prefill-size"
            )
    num_pages = tokens // config.page_size
    if num_pages < 1:
        raise ConfigError(f"max_total_tokens={tokens} is less than one page of {config.page_size} tokens")
    fitted = min(wanted, num_pages * config.page_size)
    if fitted < wanted:
        logger.info(
            "context length fitted to the KV cache: %d tokens instead of %d; more memory for the cache "
            "(--mem-fraction-static, --max-total-tokens) allows more",
            fitted,
            wanted,
        )
    return PoolPlan(num_pages, fitted)


def _free_bytes(config: EngineConfig, device: Any, taken: int) -> int:
    """Bytes the pool may take. A CPU's pool is capped: the machine is shared, and zeroing it costs start-up."""
    fraction = config.mem_fraction_static or DEFAULT_FRACTION
    if device.platform == "cpu":
        return min(CPU_POOL_BYTES, int(psutil.virtual_memory().available * fraction) - taken)
    stats = device.memory_stats() or {}
    return int(stats.get("bytes_limit", 0) * fraction) - taken


def tree_bytes(specs: Any) -> int:
    """Bytes of all arrays of a tree of specs."""
    return sum(spec.nbytes for spec in jax.tree.leaves(specs))
