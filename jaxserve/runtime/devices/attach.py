"""The devices of jax that an engine runs on, and what a person is told where jax has not found the right ones.

The one place that asks jax for its devices. A device that was asked for and can't be used is a `ConfigError`; one that
is here while jax computes on the CPU is a warning. Both say what is missing, and what to install.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import jax
from jax.extend.backend import clear_backends

from jaxserve.accelerators import PLUGINS, Accelerator, find
from jaxserve.config.schema import EngineConfig
from jaxserve.errors import ConfigError
from jaxserve.runtime.devices.device import reserve_memory

logger = logging.getLogger("jaxserve.runtime")

_PLATFORMS = {"cuda": "NVIDIA GPU with its driver", "tpu": "TPU"}
_SERVED = ("cpu", "cuda", "gpu", "tpu")
_HIDING = {"cuda": "CUDA_VISIBLE_DEVICES", "tpu": "TPU_VISIBLE_CHIPS"}


def attach(config: EngineConfig, join: Callable[[], None] | None = None) -> list[Any]:
    """The jax devices there are to run on, of all processes where `join` makes this one of several. Raises
    `ConfigError` if there is none, or if `nnodes` asks for several processes and `join` is not given."""
    if join is None and config.nnodes > 1:
        raise ConfigError(
            f"nnodes={config.nnodes}: only `jaxserve serve` runs one mesh in several processes; leave it out"
        )
    reserve_memory(config)
    asked = config.device if config.device != "auto" else os.environ.get("JAX_PLATFORMS", "")
    if config.device != "auto":
        jax.config.update("jax_platforms", config.device)
    if join is not None:
        join()
    with _jax_log() as said:
        devices, obstacle = _ask()
        if obstacle is not None:
            said.append(obstacle)
            if asked or join is not None:
                platform = asked.partition(",")[0].replace("gpu", "cuda")
                missing = explain_missing(platform, find(), installed(), said)
                said.clear()
                of_environment = f" with JAX_PLATFORMS={asked}" if asked not in ("", config.device) else ""
                raise ConfigError(f"device={config.device}{of_environment}: {missing}")
            jax.config.update("jax_platforms", "cpu")
            clear_backends()
            devices = jax.devices()
        if not asked and devices[0].platform == "cpu":
            _warn_of_unused(find(), obstacle, said)
    return devices


def _warn_of_unused(found: Sequence[Accelerator], obstacle: str | None, said: list[str]) -> None:
    for accelerator in found:
        why = explain_obstacle(accelerator, installed(), said)
        logger.warning("%s is not used, the CPU is: %s", accelerator.name, why)
    if obstacle is not None and not found:
        logger.warning("serving on the CPU: %s", _reason(said))
    if obstacle is not None or found:
        said.clear()


def explain_missing(platform: str, found: Sequence[Accelerator], plugins: Collection[str], said: Sequence[str]) -> str:
    """Which of device, driver and plug-in a platform lacks here, and what to do. `found` is this machine's, `plugins`
    are those installed, `said` is what jax says of it."""
    for accelerator in found:
        if accelerator.platform == platform:
            return f"{accelerator.name} can't be used: {explain_obstacle(accelerator, plugins, said)}"
    if platform not in _PLATFORMS:
        return _reason(said)
    lacks = f"no {_PLATFORMS[platform]} is found here"
    if not _of_platform(platform, plugins):
        lacks += f", nor jax's plug-in for one (pip install 'jaxserve[{_of_platform(platform, PLUGINS)[0]}]')"
    else:
        lacks += f" (jax says: {_reason(said)})"
    others = f"; there is {', '.join(accelerator.name for accelerator in found)}" if found else ""
    return f"{lacks}{others}; --device auto serves on the best there is"


def explain_obstacle(accelerator: Accelerator, plugins: Collection[str], said: Sequence[str]) -> str:
    """What keeps jax from an accelerator that is here, and what to do; the arguments are those of `explain_missing`."""
    extra = accelerator.extra
    if extra is None:
        return accelerator.problem
    have = _of_platform(accelerator.platform, plugins)
    if not have:
        return f"jax's plug-in for it is not installed; {_install(extra)}"
    variable = _HIDING[accelerator.platform]
    hidden = f" ({variable}={os.environ[variable]!r} is set)" if variable in os.environ else ""
    fails = f"jax's plug-in {have[0]} is installed and fails{hidden}: {_reason(said)}"
    if extra == "cuda12" and have == ["cuda13"]:
        return f"{fails}; cuda13 needs driver 580 and compute capability 7.5, or newer; {_install(extra)}"
    return fails


def installed() -> list[str]:
    """The extras whose plug-ins of jax this Python has."""
    return [extra for extra, module in PLUGINS.items() if importlib.util.find_spec(module) is not None]


def _ask() -> tuple[list[Any], str | None]:
    """jax's devices, and why these can't be served on."""
    try:
        devices = jax.devices()
    except RuntimeError as error:
        return [], str(error)
    except AssertionError:  # all that jax has to say where it was told of one platform, and has no device of it
        return [], "jax finds no device"
    first = devices[0]
    # Of a GPU that isn't NVIDIA's the capability is a name, such as gfx942.
    if first.platform in _SERVED and re.fullmatch(r"\d+\.\d+|", str(getattr(first, "compute_capability", ""))):
        return devices, None
    return devices, f"jaxserve has no programs for {first.device_kind}, which jax finds ({first.platform})"


@contextlib.contextmanager
def _jax_log() -> Iterator[list[str]]:
    """What jax logs when it looks for devices, in place of its log; of what is still listed in the end nothing was
    told, so that it goes there after all."""
    said: list[str] = []
    held: list[logging.LogRecord] = []

    def hold(record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        said.append(f"{record.getMessage()}{f': {error}' if error else ''}")
        held.append(record)
        return False

    log = logging.getLogger("jax._src.xla_bridge")
    log.addFilter(hold)
    try:
        yield said
    finally:
        log.removeFilter(hold)
        if said:
            for record in held:
                log.handle(record)


def _reason(said: Sequence[str]) -> str:
    """The first words of jax's are the cause; what follows is how it went on."""
    if not said:
        return "jax finds no device"
    return re.sub(r" \((set JAX_PLATFORMS|you may need to).*\)$", "", said[0].strip().replace("\n", " "))


def _of_platform(platform: str, extras: Collection[str]) -> list[str]:
    return [extra for extra in extras if extra.startswith(platform)]


def _install(extra: str) -> str:
    return f"to install {extra}: `make install` in a checkout, or pip install 'jaxserve[{extra}]'"
