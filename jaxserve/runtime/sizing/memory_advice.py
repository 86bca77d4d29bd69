"""Finds flags that would make a deployment fit, by trying each: a flag that it names is known to work."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import msgspec

from jaxserve.config.schema import EngineConfig
from jaxserve.config.settings import as_flag
from jaxserve.errors import ConfigError
from jaxserve.models.config import ModelConfig
from jaxserve.quant import Stored
from jaxserve.runtime.devices.device import DeviceFacts
from jaxserve.runtime.sizing.deployment import Deployment, deploy
from jaxserve.runtime.sizing.memory import InsufficientMemoryError
from jaxserve.runtime.sizing.sizes import defaults_of
from pallas_kernels.paged_attention import REFERENCE

_FRACTIONS = (0.9, 0.92, 0.94, 0.95)
_SMALLEST_CHUNK = 128
_SMALLEST_PAGE = 16


def deploy_or_advise(
    config: EngineConfig, model: ModelConfig, device: DeviceFacts, stored: Stored | None = None
) -> Deployment:
    """Call `deploy`. If memory is too small, the error names the flags that would make room. Raises `ConfigError`."""
    try:
        return deploy(config, model, device, stored=stored)
    except InsufficientMemoryError as error:
        found = find_fixes(config, model, device, lambda _: True, stored)
        advice = f"{' or '.join(found)} makes room" if found else "no single flag makes room: use a larger device"
        raise InsufficientMemoryError(f"{error}; {advice}") from None


def find_fixes(
    config: EngineConfig,
    model: ModelConfig,
    device: DeviceFacts,
    is_good: Callable[[Deployment], bool],
    stored: Stored | None = None,
) -> list[str]:
    """Return flags with values, each of which alone makes a deployment that `is_good` accepts.

    Each flag has the mildest value that works. An fp8 KV cache is left out if no kernel supports it.
    """
    found: dict[str, str] = {}
    for name, value in _candidates(config, device):
        if name not in found:
            try:
                made = deploy(msgspec.structs.replace(config, **{name: value}), model, device, stored=stored)
            except ConfigError:
                continue
            if is_good(made) and (name != "kv_cache_dtype" or made.backend.name != REFERENCE.name):
                found[name] = f"{as_flag(name)} {value}"
    return list(found.values())


def _candidates(config: EngineConfig, device: DeviceFacts) -> Iterator[tuple[str, object]]:
    """Yield settings that need less memory or allow more of it to be used, the mildest value of each first."""
    defaults = defaults_of(device)
    for fraction in _FRACTIONS:
        if fraction > config.memory_fraction:
            yield "mem_fraction_static", fraction
    if device.platform != "cpu":  # the devices of a CPU share its memory
        ranks = 1 if config.enable_dp_attention else config.dp_size
        for count in range(config.tp_size + 1, device.max_devices // (ranks * config.pp_size) + 1):
            yield "tp_size", count
        for count in range(config.pp_size + 1, device.max_devices // (ranks * config.tp_size) + 1):
            yield "pp_size", count
    if config.dtype == "float32":
        yield "dtype", "bfloat16"
    if config.kv_cache_dtype == "auto":
        yield "kv_cache_dtype", "fp8_e4m3"
    page = config.page_size
    while page > _SMALLEST_PAGE:
        page //= 2
        yield "page_size", page
    running = config.max_running_requests or defaults.running
    while running > 1:
        running //= 2
        yield "max_running_requests", running
    chunk = config.chunked_prefill_size or defaults.chunk
    chunk = defaults.chunk * 2 if chunk < 0 else chunk
    while chunk > _SMALLEST_CHUNK:
        chunk //= 2
        yield "chunked_prefill_size", chunk
    batched = config.max_num_batched_tokens or 0
    while batched > _SMALLEST_CHUNK:
        batched //= 2
        yield "max_num_batched_tokens", batched
