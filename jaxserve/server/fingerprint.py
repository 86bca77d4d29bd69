"""The `system_fingerprint` of answers: by it, clients see that a server isn't the one it was."""

from __future__ import annotations

import hashlib

import msgspec

import jaxserve
from jaxserve.config.data_parallel import parallelism
from jaxserve.config.schema import LOCAL_SETTINGS, EngineConfig
from jaxserve.config.server_schema import ServerConfig


def system_fingerprint(config: ServerConfig, engine: EngineConfig) -> str | None:
    """Return the fingerprint that `fingerprint_mode` asks for, with vLLM's parts: sizes of 1 are left out."""
    if config.fingerprint_mode in ("none", "custom"):
        return config.fingerprint_value
    named = {name: value for name, value in msgspec.to_builtins(engine).items() if name not in LOCAL_SETTINGS}
    settings = msgspec.json.encode((named, config.weight_version), order="sorted")
    parts = [f"jaxserve-{jaxserve.__version__}"]
    if config.fingerprint_mode == "full":
        divided = parallelism(engine)
        sizes = {
            "tp": divided.tensor,
            "pp": divided.stages,
            "dp": divided.data * divided.replicas,
            "ep": divided.expert_parts,
        }
        parts += [f"{name}{size}" for name, size in sizes.items() if size > 1]
    return "-".join([*parts, hashlib.sha256(settings).hexdigest()[:8]])
