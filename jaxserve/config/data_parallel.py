"""Resolves `--dp-mode`: ranks of one program, or replicas in separate processes.

It only decides; `engine/` runs the processes, and `runtime/` the programs.
"""

from __future__ import annotations

import msgspec

from jaxserve.config.schema import EngineConfig
from jaxserve.errors import ConfigError


def resolve_dp_mode(config: EngineConfig) -> EngineConfig:
    """Return the configuration as a server runs it, with `dp_mode` resolved to `mesh` or `replicas`.

    `auto` is `replicas` on one node: a dense model, as all are so far, runs best when no rank waits for the fullest one
    at each step. With several nodes, `auto` is `mesh`.
    """
    if config.dp_size == 1:
        return msgspec.structs.replace(config, dp_mode="mesh")
    if config.dp_mode == "auto" and config.nnodes == 1:
        return msgspec.structs.replace(config, dp_mode="replicas")
    return msgspec.structs.replace(config, dp_mode="mesh") if config.dp_mode == "auto" else config


def require_single_process(config: EngineConfig, caller: str) -> EngineConfig:
    """Return the configuration as `caller` runs it, in one engine process. Raise `ConfigError` for replicas."""
    if config.dp_mode == "replicas" and config.dp_size > 1:
        raise ConfigError(
            f"dp_mode=replicas starts {config.dp_size} engine processes, and {caller} runs only one: leave it out for "
            "dp_mode=mesh, or use `jaxserve serve`"
        )
    return msgspec.structs.replace(config, dp_mode="mesh")


def ranks_and_replicas(config: EngineConfig) -> tuple[int, int]:
    """Return the number of data-parallel ranks of each engine process, and the number of engine processes."""
    return (1, config.dp_size) if config.dp_mode == "replicas" else (config.dp_size, 1)
