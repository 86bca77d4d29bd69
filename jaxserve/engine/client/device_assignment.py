"""Assigns resources of the machine to replicas: separate devices on GPUs and TPUs, a part of the threads on a CPU.

The resources are set by the environment of each engine process, out of those that the parent may use. This module
starts no engine; a separate process lists the devices and ends before any engine starts.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Mapping, Sequence

import msgspec

from jaxserve.accelerators import CUDA_DEVICES, TPU_BOUNDS, TPU_CHIPS, tpu_environment, visible_devices
from jaxserve.api_types import Devices
from jaxserve.config.device_numbers import device_numbers
from jaxserve.config.schema import EngineConfig
from jaxserve.config.threads import divide_threads
from jaxserve.engine.client.aggregate import replica_name
from jaxserve.engine.process.launch_protocol import ReplicaResources
from jaxserve.errors import ConfigError, EngineDeadError

LIST_DEVICES_MODULE = "jaxserve.runtime.devices.list_devices"

_CPU = Devices(platform="cpu", num_devices=1, num_chips=1)
# The settings on which it depends which devices are listed.
_OF_DEVICES = ("device", "device_ids", "base_gpu_id", "gpu_id_step", "tp_size", "dp_size", "pp_size", "dp_mode")
# Any CPU may run this many replicas, as for a test on a small machine; a larger one may run one replica per core.
_MIN_CPU_LIMIT = 8


async def find_devices(config: EngineConfig) -> Devices:
    """Return the devices that jax finds for `--device`, or those of them that the configuration names.

    They are listed in a separate process unless the device is the CPU. Raise `ConfigError` if there is none,
    `EngineDeadError` if the listing process fails.
    """
    if config.device == "cpu" or (config.device == "auto" and os.environ.get("JAX_PLATFORMS") == "cpu"):
        return _CPU
    settings = msgspec.json.encode({name: getattr(config, name) for name in _OF_DEVICES}).decode()
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", LIST_DEVICES_MODULE, settings, stdout=asyncio.subprocess.PIPE
    )
    try:
        output, _ = await process.communicate()
    except BaseException:
        process.kill()
        await process.wait()
        raise
    if process.returncode:
        raise EngineDeadError(f"listing jax's devices failed with exit code {process.returncode}; see the log above")
    found = msgspec.json.decode(output.splitlines()[-1], type=Devices)
    if found.problem is not None:
        raise ConfigError(found.problem)
    return found


def assign_devices(config: EngineConfig, devices: Devices, environment: Mapping[str, str]) -> list[ReplicaResources]:
    """Return the resources of each of `dp_size` replicas; `environment` is that of this process.

    Raise `ConfigError` if there are too few devices, or if they can't be divided this way.
    """
    count, each = config.dp_size, config.tp_size * config.pp_size
    names = [replica_name(number) for number in range(count)]
    numbers = device_numbers(config, devices.platform)
    if devices.platform == "cpu":
        most = max(os.cpu_count() or 1, _MIN_CPU_LIMIT)
        if count > most:
            raise ConfigError(f"dp_size={count}: this CPU has cores for at most {most} replicas; lower --dp-size")
        return [ReplicaResources(name, divide_threads(environment, count), index) for index, name in enumerate(names)]
    if count * each > devices.num_devices:
        raise ConfigError(
            f"tp_size={config.tp_size} and dp_size={count}{_with_stages(config)} take {count * each} devices, and "
            f"there are {devices.num_devices}; what fits: {_sizes_that_fit(config, devices.num_devices)}"
        )
    if devices.platform == "tpu":
        return [
            ReplicaResources(name, own, index)
            for index, (name, own) in enumerate(zip(names, _tpu_environments(config, devices, environment)))
        ]
    visible = _visible_devices(environment, CUDA_DEVICES, numbers or range(devices.num_devices))
    return [
        ReplicaResources(name, {CUDA_DEVICES: ",".join(visible[number * each : (number + 1) * each])}, number)
        for number, name in enumerate(names)
    ]


def _with_stages(config: EngineConfig) -> str:
    return f" with pp_size={config.pp_size}" if config.pp_size > 1 else ""


def _sizes_that_fit(config: EngineConfig, num_devices: int) -> str:
    stages = min(config.pp_size, num_devices)
    replicas = num_devices // (config.tp_size * config.pp_size)
    tensor, data = (config.tp_size, replicas) if replicas else (num_devices // stages, 1)
    return f"--tp-size {tensor} --dp-size {data}" + (f" --pp-size {stages}" if config.pp_size > 1 else "")


def _tpu_environments(config: EngineConfig, devices: Devices, environment: Mapping[str, str]) -> list[dict[str, str]]:
    each = config.tp_size * config.pp_size
    num_chips, rest = divmod(each * devices.num_chips, devices.num_devices)
    if rest or num_chips not in TPU_BOUNDS:
        raise ConfigError(
            f"tp_size={config.tp_size}{_with_stages(config)} gives each replica "
            f"{each * devices.num_chips / devices.num_devices:g} TPU chips, and a process can have "
            f"{', '.join(map(str, TPU_BOUNDS))} of its host: choose another --tp-size, or --dp-mode mesh"
        )
    visible = _visible_devices(environment, TPU_CHIPS, config.device_ids or range(devices.num_chips))
    return [tpu_environment(visible[number * num_chips : (number + 1) * num_chips]) for number in range(config.dp_size)]


def _visible_devices(environment: Mapping[str, str], variable: str, numbers: Sequence[int]) -> list[str]:
    """Return the names of the devices with these numbers; numbers count the devices that this process may use."""
    listed = visible_devices(variable, environment)
    return [listed[number] if listed else str(number) for number in numbers]
