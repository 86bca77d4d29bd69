"""What each replica gets of the machine: devices of its own on a GPU or TPU, its part of the threads on a CPU.

Both are given by the environment that an engine process starts with, out of what its parent may use. It starts no
engine; which devices there are it asks a process that ends before any of them starts.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Mapping

import msgspec

from jaxserve.api_types import Devices
from jaxserve.config.schema import EngineConfig
from jaxserve.config.threads import threads_of_each
from jaxserve.engine.client.aggregate import replica_name
from jaxserve.engine.process.launch_protocol import Share
from jaxserve.errors import ConfigError, EngineDeadError

PROBE = "jaxserve.runtime.devices.list_devices"

_CPU = Devices(platform="cpu", num_devices=1, num_chips=1)
_CUDA_DEVICES = "CUDA_VISIBLE_DEVICES"
_TPU_CHIPS = "TPU_VISIBLE_CHIPS"
# Replicas that any CPU may be parted among, as for a test on a small machine; beyond them, one for each core.
_MOST_ON_FEW_CORES = 8
# How libtpu is told that a process has so many chips of its host, and that it is alone.
_TPU_BOUNDS = {1: "1,1,1", 2: "1,2,1", 4: "2,2,1", 8: "2,4,1"}


async def find_devices(config: EngineConfig) -> Devices:
    """What jax finds here for `--device`, asked in a process of its own unless it is a CPU anyway.

    Raises `ConfigError` where there is nothing, `EngineDeadError` where the question fails.
    """
    if config.device == "cpu" or (config.device == "auto" and os.environ.get("JAX_PLATFORMS") == "cpu"):
        return _CPU
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", PROBE, config.device), stdout=asyncio.subprocess.PIPE
    )
    try:
        output, _ = await process.communicate()
    except BaseException:
        process.kill()
        await process.wait()
        raise
    if process.returncode:
        raise EngineDeadError(f"asking jax for its devices ended with code {process.returncode}; see the log above")
    found = msgspec.json.decode(output.splitlines()[-1], type=Devices)
    if found.problem is not None:
        raise ConfigError(found.problem)
    return found


def shares(config: EngineConfig, devices: Devices, environment: Mapping[str, str]) -> list[Share]:
    """One for each of `dp_size` replicas; `environment` is this process's.

    Raises `ConfigError` where there are too few devices, or they can't be parted so.
    """
    count, each = config.dp_size, config.tp_size
    names = [replica_name(number) for number in range(count)]
    if devices.platform == "cpu":
        most = max(os.cpu_count() or 1, _MOST_ON_FEW_CORES)
        if count > most:
            raise ConfigError(f"dp_size={count}: this CPU has cores for at most {most} replicas; lower --dp-size")
        return [Share(name, threads_of_each(environment, count)) for name in names]
    if count * each > devices.num_devices:
        fits = devices.num_devices // each
        hint = f"--tp-size {each} --dp-size {fits}" if fits else f"--tp-size {devices.num_devices} --dp-size 1"
        raise ConfigError(
            f"tp_size={each} and dp_size={count} take {count * each} devices, and there are {devices.num_devices}; "
            f"what fits: {hint}"
        )
    if devices.platform == "tpu":
        return [Share(name, own) for name, own in zip(names, _chips(count, each, devices, environment))]
    visible = _listed(environment, _CUDA_DEVICES, devices.num_devices)
    return [
        Share(name, {_CUDA_DEVICES: ",".join(visible[number * each : (number + 1) * each])})
        for number, name in enumerate(names)
    ]


def _chips(count: int, each: int, devices: Devices, environment: Mapping[str, str]) -> list[dict[str, str]]:
    num_chips, rest = divmod(each * devices.num_chips, devices.num_devices)
    if rest or num_chips not in _TPU_BOUNDS:
        raise ConfigError(
            f"tp_size={each} gives each replica {each * devices.num_chips / devices.num_devices:g} TPU chips, and a "
            f"process can have {', '.join(map(str, _TPU_BOUNDS))} of its host: choose another --tp-size, or "
            "--dp-mode mesh"
        )
    visible = _listed(environment, _TPU_CHIPS, devices.num_chips)
    return [
        {
            _TPU_CHIPS: ",".join(visible[number * num_chips : (number + 1) * num_chips]),
            "TPU_CHIPS_PER_PROCESS_BOUNDS": _TPU_BOUNDS[num_chips],
            "TPU_PROCESS_BOUNDS": "1,1,1",
        }
        for number in range(count)
    ]


def _listed(environment: Mapping[str, str], variable: str, count: int) -> list[str]:
    """The devices this process may use, by the names it was given for them."""
    listed = [name.strip() for name in environment.get(variable, "").split(",") if name.strip()]
    return listed or [str(number) for number in range(count)]
