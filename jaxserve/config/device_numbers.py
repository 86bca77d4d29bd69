"""Reads which devices of this node `device_ids`, or `base_gpu_id` and `gpu_id_step`, name. Never looks for devices."""

from __future__ import annotations

import msgspec

from jaxserve.config.data_parallel import parallelism
from jaxserve.config.schema import EngineConfig
from jaxserve.errors import ConfigError

_ALL = {"device_ids": None, "base_gpu_id": 0, "gpu_id_step": 1}


def device_numbers(config: EngineConfig, platform: str) -> tuple[int, ...] | None:
    """Return the numbers of the devices that a configuration names, or None if it names none and uses the first ones.

    The `dp_mode` of `config` must be resolved. A number is that of a GPU, or of a TPU chip, among those that this
    process may see. Raises `ConfigError` if fewer GPUs are named than the sizes need, or if `platform` has none to
    choose.
    """
    named = devices_named(config)
    if not named:
        return None
    if platform == "cpu":
        raise ConfigError(f"{named} chooses among GPUs or TPU chips, and this runs on the CPU: leave it out")
    num_needed = devices_needed(config)
    if config.device_ids is None:
        if platform == "tpu":
            raise ConfigError(f"{named} counts GPUs, and this is a TPU: set device_ids to the numbers of its chips")
        return tuple(config.base_gpu_id + number * config.gpu_id_step for number in range(num_needed))
    if platform == "tpu":  # a chip may be two devices
        return config.device_ids
    if len(config.device_ids) < num_needed:
        raise ConfigError(f"{named} names {len(config.device_ids)} devices, and {_sizes(config)} need {num_needed}")
    return config.device_ids[:num_needed]


def devices_needed(config: EngineConfig) -> int:
    """Return the number of devices that all engine processes on this node use."""
    divided = parallelism(config)
    return divided.num_devices * divided.replicas // config.nnodes


def devices_named(config: EngineConfig) -> str:
    """Return the settings that choose devices, for messages; "" if none does."""
    ids = "" if config.device_ids is None else f"device_ids={','.join(map(str, config.device_ids))}"
    numbers = (("base_gpu_id", config.base_gpu_id), ("gpu_id_step", config.gpu_id_step))
    return ids or " ".join(f"{name}={value}" for name, value in numbers if value != _ALL[name])


def on_all_devices(config: EngineConfig) -> EngineConfig:
    """Return the configuration of a process that sees only the devices that it is to use."""
    return msgspec.structs.replace(config, **_ALL)


def _sizes(config: EngineConfig) -> str:
    sizes = {"tp_size": config.tp_size, "dp_size": config.dp_size, "pp_size": config.pp_size}
    return " ".join(f"{name}={size}" for name, size in sizes.items() if size > 1 or name == "tp_size")
