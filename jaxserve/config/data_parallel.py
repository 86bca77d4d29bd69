"""Resolves how a configuration divides a model: ranks of one program or replicas, tensor shards, and experts.

It only decides; `engine/` runs the processes, and `runtime/` the programs.
"""

from __future__ import annotations

import dataclasses

import msgspec

from jaxserve.config.processes import ALL_DEVICES, ranks_and_shards
from jaxserve.config.schema import EngineConfig
from jaxserve.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class Parallelism:
    """`replicas` engine processes, each of `stages` pipeline stages, each of `data` ranks of `tensor` devices.

    The experts of a mixture are divided into `expert_parts`, among the devices of a rank, or of all ranks if they are
    `over_ranks`; the devices that share a part divide each of its experts.
    """

    data: int
    tensor: int
    replicas: int = 1
    expert_parts: int = 1
    over_ranks: bool = False
    stages: int = 1

    @property
    def num_devices(self) -> int:
        """The number of devices of an engine process, or of all processes of its mesh."""
        return self.stages * self.data * self.tensor

    @property
    def expert(self) -> int:
        """The number of parts into which the devices of a rank divide the experts."""
        return self.expert_parts // self.data if self.over_ranks else self.expert_parts


ONE_DEVICE = Parallelism(1, 1)


def resolve_dp_mode(config: EngineConfig) -> EngineConfig:
    """Return the configuration as a server runs it, with `dp_mode` resolved to `mesh` or `replicas`.

    `auto` is `replicas` on one node, as there no rank waits for the fullest one at each step. It is `mesh` with several
    nodes, and where ranks divide experts among them. Raises `ConfigError` if the sizes don't fit each other.
    """
    if config.dp_mode != "auto" and (config.dp_size > 1 or config.enable_dp_attention):
        parallelism(config)
        return config
    mesh = msgspec.structs.replace(config, dp_mode="mesh")
    divided = parallelism(mesh)
    if divided.data == 1 or divided.over_ranks or config.nnodes > 1:
        return mesh
    return msgspec.structs.replace(config, dp_mode="replicas")


def require_single_process(config: EngineConfig, caller: str) -> EngineConfig:
    """Return the configuration as `caller` runs it, in one engine process.

    Raise `ConfigError` for replicas, and for sockets that only an engine process opens.
    """
    if config.kv_events_config is not None:
        raise ConfigError(f"kv_events_config: {caller} publishes no events: leave it out, or use `jaxserve serve`")
    if config.dp_mode == "replicas" and config.dp_size > 1:
        raise ConfigError(
            f"dp_mode=replicas starts {config.dp_size} engine processes, and {caller} runs only one: leave it out for "
            "dp_mode=mesh, or use `jaxserve serve`"
        )
    return msgspec.structs.replace(config, dp_mode="mesh")


def parallelism(config: EngineConfig) -> Parallelism:
    """Return how a configuration, whose `dp_mode` is resolved, divides a model.

    Raises `ConfigError` if the sizes don't fit each other.
    """
    data, tensor = ranks_and_shards(
        tensor=config.tp_size, data=config.dp_size, parts=config.ep_size, dp_attention=config.enable_dp_attention
    )
    parts, replicas = config.ep_size, 1
    if config.dp_mode == "replicas":
        if config.enable_dp_attention:
            raise ConfigError("enable_dp_attention needs ranks of one program: leave dp_mode out, or set it to mesh")
        data, replicas = 1, data
    within = divisors(tensor)
    across = [data * part for part in within] if data > 1 else []
    over_ranks = data > 1 and (config.enable_dp_attention or parts == ALL_DEVICES or (parts or 1) > tensor)
    if parts == ALL_DEVICES or (parts is None and config.enable_dp_attention):
        parts = max(across if over_ranks else within)
    if (parts := parts or 1) not in (across if over_ranks else within):
        fits = across if config.enable_dp_attention else sorted({*within, *across})
        raise ConfigError(
            f"ep_size={parts} doesn't fit tp_size={config.tp_size} and dp_size={config.dp_size}; sizes that do: "
            f"{', '.join(map(str, fits))}"
        )
    return Parallelism(data, tensor, replicas, parts, over_ranks, config.pp_size)


def divisors(number: int) -> list[int]:
    """Return the divisors of a number, in order."""
    return [i for i in range(1, number + 1) if number % i == 0]
