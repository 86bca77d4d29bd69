"""Checks that a model and the devices allow a mesh shape, and suggests the nearest that they allow.

It computes with sizes alone: `devices/mesh.py` makes meshes, and the axes of a parameter say how it is split.
"""

from __future__ import annotations

from jaxserve.config.data_parallel import ranks_and_replicas
from jaxserve.config.schema import EngineConfig
from jaxserve.config.settings import as_flag
from jaxserve.errors import ConfigError
from jaxserve.models.config import ModelConfig
from jaxserve.runtime.devices.device import DeviceFacts

_SIMULATED = "--xla_force_host_platform_device_count"


def check_mesh(config: EngineConfig, model: ModelConfig, device: DeviceFacts) -> None:
    """Raise `ConfigError` if `--tp-size` can't split the model, or if there are too few devices for the mesh."""
    tensor, (data, _), most = config.tp_size, ranks_and_replicas(config), device.max_devices
    if not model.splits_into(tensor):
        works = [_flags(tp_size=size) for size in _nearest(model, tensor, max(most, 1))]
        raise ConfigError(
            f"tp_size={tensor} can't split this model evenly ({model.num_heads} attention heads, {model.num_kv_heads} "
            f"KV heads, an MLP of {model.intermediate_size}); the nearest that can: {' or '.join(works)}"
        )
    if tensor * data <= most:
        return
    fits = []
    if tensor <= most:
        fits.append(_flags(tp_size=tensor, dp_size=most // tensor))
    if data > 1 or tensor > most:
        largest = max((size for size in range(1, most // min(data, most) + 1) if model.splits_into(size)), default=1)
        fits.append(_flags(tp_size=largest, dp_size=min(data, most)))
    hint = f"; XLA_FLAGS={_SIMULATED}={tensor * data} makes a CPU simulate them" if device.platform == "cpu" else ""
    raise ConfigError(
        f"tp_size={tensor} and dp_size={data} take {tensor * data} devices, and there are {most}; what fits: "
        f"{' or '.join(dict.fromkeys(fits))}{hint}"
    )


def _nearest(model: ModelConfig, wanted: int, most: int) -> list[int]:
    """Return the sizes next to `wanted` that split the model: one below, and one above if there are enough devices."""
    below = max(size for size in range(1, wanted) if model.splits_into(size))
    above = next((size for size in range(wanted + 1, most + 1) if model.splits_into(size)), None)
    return [below] if above is None else [below, above]


def _flags(**sizes: int) -> str:
    return " ".join(f"{as_flag(name)} {size}" for name, size in sizes.items())
