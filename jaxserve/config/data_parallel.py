"""What `--dp-mode` comes to: ranks of one program, or replicas in processes of their own.

Owns that decision alone; who runs the processes, and who the programs, is the engine's and the runtime's business.
"""

from __future__ import annotations

import msgspec

from jaxserve.config.schema import EngineConfig
from jaxserve.errors import ConfigError


def when_serving(config: EngineConfig) -> EngineConfig:
    """The configuration as a server runs it, with `dp_mode` decided.

    A dense model, as all are so far, runs best as replicas: nobody waits for the fullest rank at each step. Several
    processes are there to share one mesh.
    """
    if config.dp_size == 1:
        return msgspec.structs.replace(config, dp_mode="mesh")
    if config.dp_mode == "auto" and config.nnodes == 1:
        return msgspec.structs.replace(config, dp_mode="replicas")
    return msgspec.structs.replace(config, dp_mode="mesh") if config.dp_mode == "auto" else config


def in_one_process(config: EngineConfig, who: str) -> EngineConfig:
    """The configuration as `who` runs it, who has one engine process. Raises `ConfigError` for replicas."""
    if config.dp_mode == "replicas" and config.dp_size > 1:
        raise ConfigError(
            f"dp_mode=replicas starts {config.dp_size} engine processes, and {who} has one: leave it out for "
            "dp_mode=mesh, or ask a `jaxserve serve`"
        )
    return msgspec.structs.replace(config, dp_mode="mesh")


def ranks_and_replicas(config: EngineConfig) -> tuple[int, int]:
    """Data-parallel ranks of each engine process, and how many of these there are."""
    return (1, config.dp_size) if config.dp_mode == "replicas" else (config.dp_size, 1)
