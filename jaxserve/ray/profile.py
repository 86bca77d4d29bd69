"""What a replica is made of: the settings of a profile, and the resources of Ray that they need.

A profile is a YAML file as `jaxserve serve --config` takes it. A replica has no port and is not started by hand, so
settings that are about either are refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ray

from jaxserve.config.data_parallel import resolve_dp_mode
from jaxserve.config.device_numbers import devices_needed
from jaxserve.config.load import GivenSetting, LoadedConfig, load_config, read_yaml
from jaxserve.config.schema import EngineConfig
from jaxserve.config.settings import as_key
from jaxserve.errors import ConfigError

# Harmless, as many profiles have them: Serve's own options say where its proxies listen.
_UNUSED = frozenset({"host", "port"})
_PROXY = "Serve's proxies read the requests, http_options of its configuration has their limits"
_REFUSED = {
    "uds": "Serve's proxies listen on ports, http_options of its configuration says which",
    "api_server_count": "a replica has one API process: have more replicas, or more of the deployment `ingress`",
    "node_rank": "each replica starts the processes of its own mesh",
    "dist_init_addr": "each replica chooses an address on the node where it runs",
    "root_path": "Serve's route_prefix is taken off each path",
    **dict.fromkeys(("device_ids", "base_gpu_id", "gpu_id_step"), "Ray chooses the devices of each replica"),
    **dict.fromkeys(("max_header_bytes", "request_read_timeout", "keep_alive_timeout"), _PROXY),
    "ssl_certfile": "a proxy in front of Serve, or its http_options, ends TLS",
}
_SWITCHES = {"true": True, "false": False}
# A replica chooses the address when its node is known.
_ANY_ADDRESS = "any:1"
_RESOURCES = {"cuda": "GPU", "tpu": "TPU"}


def load_profile(profile: str | Path | None, settings: Mapping[str, Any]) -> LoadedConfig:
    """Return the configuration of a profile in which `settings` have other values, or texts as flags have them. Raises
    `ConfigError`."""
    path = None if profile is None else Path(profile).expanduser()
    given = [
        GivenSetting(
            as_key(name),
            _SWITCHES.get(value, value) if isinstance(value, str) else value,
            "flag" if isinstance(value, str) else "argument",
            f"settings: {name}",
        )
        for name, value in settings.items()
    ]
    written = {one.key: one.value for one in (*(() if path is None else read_yaml(path)), *given)}
    if str(written.get("nnodes", 1)) != "1" and "dist_init_addr" not in written:
        given.append(GivenSetting("dist_init_addr", _ANY_ADDRESS, "argument", "jaxserve.ray"))
    loaded = load_config(given, path)
    notes = list(loaded.notes)
    for value in loaded.values:
        name = value.setting.name
        if value.value in (value.setting.default, _ANY_ADDRESS):
            continue
        if (reason := _REFUSED.get(name)) is not None:
            raise ConfigError(f"{value.place}: {name} has no meaning in a replica of Ray Serve: {reason}")
        if name in _UNUSED:
            notes.append(f"{value.place}: not used, http_options of Serve's configuration say where it listens")
    return LoadedConfig(loaded.engine, loaded.server, loaded.values, tuple(notes))


def bundles(config: EngineConfig, num_cpus: float) -> list[dict[str, float]]:
    """Return what each process of a replica needs of its node: one bundle for each of `nnodes`, with its devices.

    Raises `ConfigError` if the sizes don't fit each other, or if the device is unknown.
    """
    bundle = {"CPU": num_cpus}
    platform = _platform_of_cluster() if config.device == "auto" else config.device
    if (resource := _RESOURCES.get(platform)) is not None:
        bundle[resource] = float(devices_needed(resolve_dp_mode(config)))
    return [dict(bundle) for _ in range(config.nnodes)]


def _platform_of_cluster() -> str:
    """Return the platform of the cluster's accelerators. Raises `ConfigError` if this process is in no cluster."""
    if not ray.is_initialized():
        raise ConfigError("device=auto, and there is no cluster here to look at: set device to cuda, tpu or cpu")
    found = ray.cluster_resources()
    return next((platform for platform, resource in _RESOURCES.items() if found.get(resource)), "cpu")
