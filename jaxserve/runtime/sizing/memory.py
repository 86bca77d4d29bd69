"""Divides the memory of a device between weights, state and KV pool, and fits the context length to the pool."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from jaxserve.config.schema import EngineConfig
from jaxserve.config.settings import as_flag
from jaxserve.errors import ConfigError
from jaxserve.runtime.sizing.kv_division import KVDivision, expected_tokens

CPU_POOL_BYTES = 2**29


class InsufficientMemoryError(ConfigError):
    """Weights, state and activations leave no memory for the KV cache."""


@dataclasses.dataclass(frozen=True)
class Footprint:
    """Bytes that a deployment takes on one device besides the KV pools, and the bytes of a token in each of them.

    `state` is the state by slot, with the `states` of sequences in models that keep some. `activations` is the working
    memory of the largest program: an estimate, or the compiler's figure once there is one.
    """

    weights: int
    state: int
    activations: int
    kv_per_token: tuple[int, ...]
    states: int = 0

    @property
    def non_pool(self) -> int:
        """Bytes that the pool can't have."""
        return self.weights + self.state + self.activations


@dataclasses.dataclass(frozen=True)
class PoolPlan:
    """The pages of each KV group and the context length that fits them.

    `memory_bound` says that the pools would be larger if the device had more memory.
    """

    pages: tuple[int, ...]
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
    chunk: int = 0,
    windows: Sequence[int | None] = (None,),
    whole_sequences: bool = True,
    most_pages: Sequence[int] | None = None,
    num_devices: int = 1,
) -> PoolPlan:
    """Size the pools as settings say or from memory, and fit the context length to them.

    `windows` are those of the KV groups, and `most_pages` the most pages that each may have. Without
    `whole_sequences`, all layers of the model have windows. A rank prefills at most `chunk` tokens in a step.
    Raises `ConfigError` for sizes that don't fit, `InsufficientMemoryError` if no memory is left for the cache.
    """
    wanted = config.context_length or model_context
    longest = longest_context or model_context
    if wanted > longest:
        raise ConfigError(
            f"context_length={wanted} is longer than the model's {longest} tokens; lower --context-length"
        )
    page = config.page_size
    division = KVDivision(
        footprint.kv_per_token,
        tuple(windows),
        page,
        expected_tokens(
            wanted, windows, whole_sequences=whole_sequences, context_is_set=config.context_length is not None
        ),
        max_running,
        min(chunk, wanted),
        config.swa_full_tokens_ratio,
    )
    memory_bound = False
    free = usable_bytes(config, memory_bytes) - footprint.non_pool
    # This holds every running request at full length: more is used only if memory for it was asked for. Pages that cost
    # nothing also hold as many cached prefixes.
    usable = max_running * division.pages_for(wanted) * (1 if whole_sequences else 2)
    if (tokens := config.pool_tokens) is not None:
        num_pages = tokens // page
        if num_pages < 1:
            raise ConfigError(f"max_total_tokens={tokens} is less than one page of {page} tokens")
        _check_memory(config, footprint, division, num_pages, free, memory_bytes)
    elif (nbytes := config.kv_cache_memory_bytes) is not None:
        usable = nbytes // (page * footprint.kv_per_token[0]) if footprint.kv_per_token[0] else usable
        if most_pages is not None:
            usable = division.largest_within(most_pages, usable)
        num_pages = division.largest_in(nbytes, usable)
        if num_pages < 1:
            raise ConfigError(
                f"kv_cache_memory_bytes={nbytes} is less than the {division.nbytes(1)} bytes of one page of {page} "
                "tokens; raise it"
            )
        _check_memory(config, footprint, division, num_pages, free, memory_bytes)
    else:
        if most_pages is not None:
            usable = division.largest_within(most_pages, usable)
        if platform == "cpu":
            # Other programs share the machine, and filling the pool with zeros takes start-up time.
            usable = division.largest_in(CPU_POOL_BYTES // num_devices, usable)
            if usable < 1:
                raise InsufficientMemoryError(
                    f"each of dp_size={config.dp_size} ranks gets a KV cache of {CPU_POOL_BYTES // num_devices} bytes, "
                    f"which is less than one page of page_size={page}; lower --page-size"
                )
        num_pages = division.largest_in(free, usable)
        memory_bound = num_pages < usable
        if num_pages < min(2, usable):
            raise _insufficient_memory(config, footprint, memory_bytes)
    fitted = min(wanted, num_pages * page)
    _check_windows(division, num_pages, fitted)
    return PoolPlan(division.pages(num_pages), fitted, memory_bound)


def _check_memory(
    config: EngineConfig, footprint: Footprint, division: KVDivision, num_pages: int, free: int, memory_bytes: int
) -> None:
    """Raise `ConfigError` if memory can't hold the pages that a setting asks for.

    Activations are left out of this check: they are an estimate, and a pool that was seen to run, such as that of a
    bundle, must not be refused for it.
    """
    taken = division.nbytes(num_pages)
    if footprint.weights + footprint.state + taken <= memory_bytes:
        return
    largest = division.largest_in(free, num_pages)
    if largest < 1:
        raise _insufficient_memory(config, footprint, memory_bytes)
    fitting = {
        "kv_cache_memory_bytes": free,
        "num_gpu_blocks_override": largest,
        "max_total_tokens": largest * config.page_size,
    }
    name = next(name for name in fitting if getattr(config, name) is not None)
    raise ConfigError(
        f"{name}={getattr(config, name)} takes {taken / 2**30:.2f} GiB of each device, but "
        f"{free / 2**30:.2f} of its {memory_bytes / 2**30:.2f} GiB are left for the KV cache: at most "
        f"{as_flag(name)} {fitting[name]} fits"
    )


def _check_windows(division: KVDivision, num_pages: int, context: int) -> None:
    """Raise `ConfigError` if `--swa-full-tokens-ratio` gives a window group too few pages for a single request."""
    for window, pages in zip(division.windows, division.pages(num_pages)):
        if window is None or division.ratio is None:
            continue
        least = min(division.least_pages(window), division.pages_for(context))
        if pages < least:
            page = division.page_size
            raise ConfigError(
                f"swa_full_tokens_ratio={division.ratio:g} gives the layers with a window of {window} tokens a KV "
                f"cache of {pages * page} tokens, and a request needs {least * page}: raise --swa-full-tokens-ratio "
                f"to {math.ceil(least / num_pages * 1000) / 1000:g}, or leave it out"
            )


def _insufficient_memory(config: EngineConfig, footprint: Footprint, memory_bytes: int) -> InsufficientMemoryError:
    return InsufficientMemoryError(
        f"no memory is left for the KV cache: {footprint.weights / 2**30:.2f} GiB of weights, "
        f"{footprint.state / 2**30:.2f} GiB of state and {footprint.activations / 2**30:.2f} GiB of "
        f"activations on a device of which {usable_bytes(config, memory_bytes) / 2**30:.2f} GiB may be used"
    )


def usable_bytes(config: EngineConfig, memory_bytes: int) -> int:
    """Return how many bytes of a device's memory a deployment may use, by `--mem-fraction-static`."""
    return int(memory_bytes * config.memory_fraction)
