"""How much goes where: weights, the state, the KV pool, and the context that fits it. All sizes are of one device."""

from __future__ import annotations

import dataclasses
import logging

from jaxserve.config.schema import DEFAULT_MEM_FRACTION, EngineConfig
from jaxserve.errors import ConfigError

logger = logging.getLogger("jaxserve.runtime")

CPU_POOL_BYTES = 2**29


class NoRoomError(ConfigError):
    """Weights and activations leave nothing for the KV cache."""


@dataclasses.dataclass(frozen=True)
class Footprint:
    """Bytes of one device besides the pool, and of a token in it.

    `state` is what is kept by slot; `activations` the largest program's working memory: the compiler's figure, or an
    estimate before there is one.
    """

    weights: int
    state: int
    activations: int
    kv_per_token: int

    @property
    def taken(self) -> int:
        """What the pool can't have."""
        return self.weights + self.state + self.activations


@dataclasses.dataclass(frozen=True)
class PoolPlan:
    """Pages of the KV pool, and the context length that fits it. Memory alone keeps it from being larger where it is
    `memory_bound`."""

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
    max_running: int,
    num_devices: int = 1,
) -> PoolPlan:
    """Size the pool from `--max-total-tokens` or from memory, and fit the context to it.

    Raises `ConfigError`: `NoRoomError` where nothing is left for the cache.
    """
    wanted = config.context_length or model_context
    if wanted > model_context:
        raise ConfigError(
            f"context_length={wanted} is longer than the model's {model_context} tokens; lower --context-length"
        )
    tokens, memory_bound = config.max_total_tokens, False
    free = usable_bytes(config, memory_bytes) - footprint.taken
    if tokens is None:
        # More than every running request at full length can't be used.
        usable = max_running * -(-wanted // config.page_size) * config.page_size
        if platform == "cpu":
            # The machine is shared, and zeroing the pool costs start-up.
            usable = min(usable, CPU_POOL_BYTES // num_devices // footprint.kv_per_token)
        tokens = min(free // footprint.kv_per_token, usable)
        memory_bound = tokens < usable
        if tokens < min(config.page_size * 2, usable):
            raise _no_room(config, footprint, memory_bytes)
    elif footprint.weights + footprint.state + tokens * footprint.kv_per_token > memory_bytes:
        # An estimate of the activations must not refuse what was seen to run, as a bundle's pool was.
        fitting = free // footprint.kv_per_token // config.page_size * config.page_size
        if fitting < config.page_size:
            raise _no_room(config, footprint, memory_bytes)
        raise ConfigError(
            f"max_total_tokens={tokens} takes {tokens * footprint.kv_per_token / 2**30:.2f} GiB of each device, of "
            f"whose {memory_bytes / 2**30:.2f} GiB {free / 2**30:.2f} are left for the KV cache: at most "
            f"--max-total-tokens {fitting} fits"
        )
    num_pages = tokens // config.page_size
    if num_pages < 1:
        if config.max_total_tokens is not None:
            raise ConfigError(f"max_total_tokens={tokens} is less than one page of {config.page_size} tokens")
        raise NoRoomError(
            f"a KV cache of {tokens} tokens is all that each of dp_size={config.dp_size} ranks gets, less than one "
            f"page of page_size={config.page_size}"
        )
    fitted = min(wanted, num_pages * config.page_size)
    return PoolPlan(num_pages, fitted, memory_bound)


def _no_room(config: EngineConfig, footprint: Footprint, memory_bytes: int) -> NoRoomError:
    return NoRoomError(
        f"no memory is left for the KV cache: {footprint.weights / 2**30:.2f} GiB of weights, "
        f"{footprint.state / 2**30:.2f} GiB of state and {footprint.activations / 2**30:.2f} GiB of "
        f"activations on a device of which {usable_bytes(config, memory_bytes) / 2**30:.2f} GiB may be used"
    )


def usable_bytes(config: EngineConfig, memory_bytes: int) -> int:
    """What `--mem-fraction-static` gives a deployment of a device's memory."""
    return int(memory_bytes * (config.mem_fraction_static or DEFAULT_MEM_FRACTION))
