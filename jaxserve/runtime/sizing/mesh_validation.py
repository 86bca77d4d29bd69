"""Checks that a model and the devices allow a mesh shape, and suggests the nearest shapes that they allow.

It computes with sizes alone: `devices/mesh.py` makes meshes, and the axes of a parameter say how it is split.
"""

from __future__ import annotations

from jaxserve.config.data_parallel import Parallelism, divisors, parallelism
from jaxserve.config.processes import ALL_DEVICES
from jaxserve.config.schema import EngineConfig
from jaxserve.config.settings import as_flag
from jaxserve.errors import ConfigError
from jaxserve.models.config import ModelConfig
from jaxserve.runtime.devices.device import DeviceFacts

_SIMULATED = "--xla_force_host_platform_device_count"


def check_mesh(config: EngineConfig, model: ModelConfig, device: DeviceFacts) -> None:
    """Raise `ConfigError` if the sizes can't split the model, or if there are too few devices for the mesh."""
    divided = parallelism(config)
    tensor, data, most = divided.tensor, divided.data, device.max_devices
    if model.bidirectional and (tensor > 1 or divided.stages > 1):
        asked, size = ("tp_size", tensor) if tensor > 1 else ("pp_size", divided.stages)
        raise ConfigError(
            f"{asked}={size}: models that read a text in both directions are small, and are not divided; set dp_size "
            f"to use {size} devices"
        )
    stages = min(divided.stages, max(most, 1))
    room = most // stages
    if not model.splits_into(tensor):
        nearest = _nearest(model, tensor, max(room, 1))
        works = [_flags(config, size, data, dp_size=config.enable_dp_attention) for size in nearest]
        sizes = [f"{name} of {width}" for name, width in model.split_sizes.items()]
        sizes = sizes if model.delta is None else [f"delta nets of {model.delta.key_heads} key heads", *sizes]
        raise ConfigError(
            f"tp_size={tensor} can't split this model evenly ({model.num_heads} attention heads, {model.num_kv_heads} "
            f"KV heads, {', '.join(sizes)}); the nearest that can: {' or '.join(works)}"
        )
    _check_experts(config, divided, model)
    if divided.num_devices <= most:
        return
    fits = []
    if tensor <= room:
        fits.append(_flags(config, tensor, room // tensor, stages))
    if data > 1 or tensor > room:
        largest = max((size for size in range(1, room // min(data, room) + 1) if model.splits_into(size)), default=1)
        fits.append(_flags(config, largest, min(data, room), stages))
    if divided.stages > 1 and tensor * data <= most:
        fits.append(_flags(config, tensor, data, most // (tensor * data)))
    hint = f"; XLA_FLAGS={_SIMULATED}={divided.num_devices} makes a CPU simulate them"
    raise ConfigError(
        f"tp_size={config.tp_size} and dp_size={config.dp_size}{_stages(config)} take {divided.num_devices} devices, "
        f"and there are {most}; what fits: {' or '.join(dict.fromkeys(fits))}{hint if device.platform == 'cpu' else ''}"
    )


def _stages(config: EngineConfig) -> str:
    return f" with pp_size={config.pp_size}" if config.pp_size > 1 else ""


def _check_experts(config: EngineConfig, divided: Parallelism, model: ModelConfig) -> None:
    """Raise `ConfigError` if the model's experts can't be divided evenly."""
    parts = divided.expert_parts
    if not model.num_experts:
        if parts > 1 or config.enable_dp_attention or config.all2all_backend != "auto":
            asked = "enable_dp_attention" if config.enable_dp_attention else f"ep_size={config.ep_size}"
            asked = f"all2all_backend={config.all2all_backend}" if config.all2all_backend != "auto" else asked
            raise ConfigError(f"{asked} is for mixtures of experts, and this model has no experts; leave it out")
        return
    if config.all2all_backend == "ragged_all_to_all" and not divided.over_ranks:
        raise ConfigError(
            "all2all_backend=ragged_all_to_all: every rank has all experts, so no token is sent to another; leave it "
            "out, or set enable_dp_attention and a dp_size"
        )
    devices = divided.tensor * (divided.data if divided.over_ranks else 1)

    def fits(parts: int) -> bool:
        return model.num_experts % parts == 0 and model.expert_size % (devices // parts) == 0

    if fits(parts):
        return
    ranks = divided.data if divided.over_ranks else 1
    works = [str(ranks * part) for part in divisors(divided.tensor) if fits(ranks * part)]
    raise ConfigError(
        f"ep_size={parts} on {devices} devices can't divide {model.num_experts} experts of width {model.expert_size} "
        f"evenly; {f'sizes that can: {", ".join(works)}' if works else 'no size can: use fewer devices'}"
    )


def _nearest(model: ModelConfig, wanted: int, most: int) -> list[int]:
    """Return the sizes next to `wanted` that split the model: one below, and one above if there are enough devices."""
    below = max(size for size in range(1, wanted) if model.splits_into(size))
    above = next((size for size in range(wanted + 1, most + 1) if model.splits_into(size)), None)
    return [below] if above is None else [below, above]


def _flags(config: EngineConfig, tensor: int, data: int, stages: int | None = None, *, dp_size: bool = True) -> str:
    """Return the flags that ask for `tensor` shards, `data` ranks and, if there are several, `stages`.

    `ep_size` is among them if it is set.
    """
    sizes = {"tp_size": tensor * (data if config.enable_dp_attention else 1)}
    sizes |= {"dp_size": data} if dp_size else {}
    sizes |= {"pp_size": stages} if stages and config.pp_size > 1 else {}
    sizes |= {"ep_size": ALL_DEVICES} if config.ep_size is not None else {}
    return " ".join(f"{as_flag(name)} {size}" for name, size in sizes.items())
