"""Restricts jax to the devices that a configuration names, before it takes any, and checks that it has taken them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import jax
from jax._src import xla_bridge

from jaxserve.accelerators import TPU_BOUNDS, TPU_CHIPS, tpu_environment, visible_devices
from jaxserve.config.device_numbers import device_numbers, devices_named
from jaxserve.config.schema import EngineConfig
from jaxserve.errors import ConfigError

_VISIBLE_GPUS = "jax_cuda_visible_devices"


def restrict_devices(config: EngineConfig, platform: str) -> int:
    """Have jax take only the devices that `config` names; return their number, or 0 if it names none.

    Raises `ConfigError` if `platform`, `cuda`, `tpu` or `cpu`, can't give them, or if jax has taken others already.
    """
    numbers = device_numbers(config, platform)
    if numbers is None:
        return 0
    asked = ",".join(map(str, numbers))
    # A process may make one engine after another: jax keeps its devices.
    has_others = platform == "tpu" or jax.config.read(_VISIBLE_GPUS) != asked
    if has_others and xla_bridge.backends_are_initialized():
        raise ConfigError(
            f"{devices_named(config)}: jax has taken its devices in this process already, and takes no others: choose "
            "them before anything uses jax, or in another process"
        )
    if platform == "tpu":
        os.environ.update(tpu_environment(_chips(config, numbers)))
    else:
        jax.config.update(_VISIBLE_GPUS, asked)
    return len(numbers)


def check_restricted(config: EngineConfig, count: int, devices: Sequence[Any], reason: str) -> None:
    """Raise `ConfigError` unless this process has got the `count` GPUs or chips that `config` names.

    `reason` is why jax has none, if so.
    """
    named = devices_named(config)
    own = [device for device in devices if device.process_index == jax.process_index()]
    if own[0].platform == "cpu":
        raise ConfigError(f"{named}: none of these devices can be used: {reason}")
    found = len({str(getattr(device, "coords", device)) for device in own})
    if found != count:
        raise ConfigError(f"{named}: {count} devices are chosen, of which jax finds {found} here; choose others")


def _chips(config: EngineConfig, numbers: Sequence[int]) -> list[str]:
    listed = visible_devices(TPU_CHIPS, os.environ)
    if listed and max(numbers) >= len(listed):
        raise ConfigError(f"{devices_named(config)} counts among the {len(listed)} chips of {TPU_CHIPS}, from 0")
    if len(numbers) not in TPU_BOUNDS:
        counts = ", ".join(map(str, TPU_BOUNDS))
        raise ConfigError(f"{devices_named(config)} names {len(numbers)} TPU chips, and a process can have {counts}")
    return [listed[number] if listed else str(number) for number in numbers]
