"""Builds the Serve application of a profile: the deployments `engine` and `ingress`, with what Ray must know of them.

Whatever Serve's own configuration sets for a deployment has precedence.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any

from ray import serve
from ray.serve import Application

from jaxserve.config.load import LoadedConfig
from jaxserve.errors import ConfigError
from jaxserve.ray.ingress import Ingress
from jaxserve.ray.profile import bundles, load_profile
from jaxserve.ray.replica import EngineReplica
from jaxserve.server.loading import ModelLoader, load_model

logger = logging.getLogger("ray.serve")

_ARGUMENTS = ("profile", "settings", "replicas", "num_cpus")
# The engine has a queue of its own, with limits of its own.
_MAX_ONGOING = 10_000
# The ingress of a node that ends would take all its requests along. Without its head, a cluster ends anyway.
_HEAD = {"node:__internal_head__": 0.001}
_HEALTH_SECONDS, _HEALTH_TIMEOUT_SECONDS = 2.0, 10.0
_STATS_SECONDS = 5.0
# On top of drain_timeout, for the end of the engine process.
_STOP_SECONDS = 15.0


def build(arguments: dict[str, Any]) -> Application:
    """Return the application for the `args` of Serve's configuration, or of `serve run jaxserve.ray:build KEY=VALUE`.

    `profile` is the path of a YAML file, on the nodes; `settings` maps names of settings to values, which have
    precedence. `replicas` is a number, or a mapping with `min` and `max` for `scale_on_queue` (default: 1). `num_cpus`
    is what each process asks of its node (default: 1). Any other argument is a setting too. Raises `ConfigError`.
    """
    named = {name: value for name, value in arguments.items() if name in _ARGUMENTS}
    settings = named.get("settings") or {}
    if not isinstance(settings, Mapping):
        raise ConfigError(f"settings must map names of settings to values, got {settings!r}")
    others = {name: value for name, value in arguments.items() if name not in _ARGUMENTS}
    loaded = load_profile(named.get("profile"), {**settings, **others})
    try:
        num_cpus = float(named.get("num_cpus", 1))
        if not 0 <= num_cpus < math.inf:
            raise ValueError
    except (TypeError, ValueError):
        raise ConfigError(f"num_cpus must be a number of at least 0, got {named['num_cpus']!r}") from None
    return application(loaded, replicas=named.get("replicas", 1), num_cpus=num_cpus)


def application(
    loaded: LoadedConfig,
    *,
    replicas: int | str | Mapping[str, Any] = 1,
    num_cpus: float = 1.0,
    load: ModelLoader = load_model,
    engine_module: str = "jaxserve.worker",
) -> Application:
    """Return the application of a configuration. `load` and `engine_module` are those of `EngineReplica`.

    Raises `ConfigError` if `replicas` is neither a number nor a range, or as `bundles` does.
    """
    for note in loaded.notes:
        logger.warning(note)
    options = _number_of(replicas)
    each = bundles(loaded.engine, num_cpus)
    if len(each) > 1:
        options |= {"placement_group_bundles": each, "placement_group_strategy": "STRICT_SPREAD"}
    first = dict(each[0])
    engine = serve.deployment(
        name="engine",
        ray_actor_options={"num_cpus": first.pop("CPU"), "num_gpus": first.pop("GPU", 0), "resources": first},
        max_ongoing_requests=_MAX_ONGOING,
        request_router_config={
            "request_router_class": "jaxserve.ray.prefix_router:CachedPrefixRouter",
            "request_routing_stats_period_s": _STATS_SECONDS,
        },
        health_check_period_s=_HEALTH_SECONDS,
        health_check_timeout_s=_HEALTH_TIMEOUT_SECONDS,
        graceful_shutdown_timeout_s=loaded.server.drain_timeout + _STOP_SECONDS,
        graceful_shutdown_wait_loop_s=0.5,
        **options,
    )(EngineReplica)
    ingress = serve.deployment(
        name="ingress",
        ray_actor_options={"num_cpus": 0, "resources": _HEAD},
        max_ongoing_requests=_MAX_ONGOING,
        graceful_shutdown_timeout_s=loaded.server.drain_timeout + _STOP_SECONDS,
        graceful_shutdown_wait_loop_s=0.5,
        max_surge_percent=100,  # a new one is cheap, and there may be no other
    )(serve.ingress(None)(Ingress))
    bound = engine.bind(loaded.engine, loaded.server, load, engine_module)
    return ingress.bind(bound, loaded.server.max_body_bytes)


def _number_of(replicas: int | str | Mapping[str, Any]) -> dict[str, Any]:
    """Return Serve's options for a number of replicas, or a range of it."""
    limits = replicas if isinstance(replicas, Mapping) else {"min": replicas, "max": replicas}
    try:
        fewest, most = int(str(limits["min"])), int(str(limits["max"]))
        if len(limits) > 2 or not 1 <= fewest <= most:
            raise ValueError
    except (KeyError, ValueError):
        raise ConfigError(
            f"replicas must be a whole number of at least 1, or have min and max, got {replicas!r}"
        ) from None
    if limits is not replicas:
        return {"num_replicas": fewest}
    policy = {"policy_function": "jaxserve.ray.autoscaling:scale_on_queue"}
    return {
        "num_replicas": None,
        "autoscaling_config": {"min_replicas": fewest, "max_replicas": most, "policy": policy},
    }
