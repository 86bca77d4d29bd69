"""Gets the devices that an engine runs on from jax, and explains why an accelerator can't be used.

No other module asks jax for its devices. A requested device that can't be used is a `ConfigError`; an accelerator that
this machine has but jax doesn't use is a warning. Both say what is missing and what to install.
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

from jaxserve.accelerators import CUDA_DEVICES, PLUGINS, TPU_CHIPS, Accelerator, find_accelerators
from jaxserve.config.device_numbers import devices_named
from jaxserve.config.schema import EngineConfig
from jaxserve.errors import ConfigError
from jaxserve.runtime.devices.device import reserve_memory
from jaxserve.runtime.devices.restriction import check_restricted, restrict_devices

logger = logging.getLogger("jaxserve.runtime")

_PLATFORMS = {"cuda": "NVIDIA GPU with its driver", "tpu": "TPU"}
_SERVED = ("cpu", "cuda", "gpu", "tpu")
_HIDING = {"cuda": CUDA_DEVICES, "tpu": TPU_CHIPS}


def attach(config: EngineConfig, join: Callable[[], None] | None = None) -> list[Any]:
    """Return the jax devices to run on: with `join`, which makes this process one of several, those of all processes.

    They are those that `config` names, if it does. Raises `ConfigError` if there is no device, or if `nnodes` is more
    than 1 and `join` is not given.
    """
    if join is None and config.nnodes > 1:
        raise ConfigError(
            f"nnodes={config.nnodes}: only `jaxserve serve` runs one mesh in several processes; leave it out"
        )
    reserve_memory(config)
    requested = config.device if config.device != "auto" else os.environ.get("JAX_PLATFORMS", "")
    if config.device != "auto":
        jax.config.update("jax_platforms", config.device)
    count = restrict_devices(config, _expected_platform(requested)) if devices_named(config) else 0
    if join is not None:
        join()
    with _captured_jax_log() as messages:
        devices, problem = _jax_devices()
        if count and problem is None:
            check_restricted(config, count, devices, _reason(messages))
        if problem is not None:
            messages.append(problem)
            if requested or count or join is not None:
                platform = requested.partition(",")[0].replace("gpu", "cuda")
                missing = explain_missing(platform, find_accelerators(), installed_extras(), messages)
                messages.clear()
                of_environment = f" with JAX_PLATFORMS={requested}" if requested not in ("", config.device) else ""
                raise ConfigError(f"device={config.device}{of_environment}: {missing}")
            jax.config.update("jax_platforms", "cpu")
            clear_backends()
            devices = jax.devices()
        if not requested and devices[0].platform == "cpu":
            _warn_of_unused(find_accelerators(), problem, messages)
    return devices


def _expected_platform(requested: str) -> str:
    """Return the platform that jax will choose, if it can use what this machine has."""
    found = [accelerator.platform for accelerator in find_accelerators()]
    best = next((platform for platform in ("tpu", "cuda") if platform in found), "cpu")
    return requested.partition(",")[0].replace("gpu", "cuda") or best


def _warn_of_unused(found: Sequence[Accelerator], problem: str | None, messages: list[str]) -> None:
    for accelerator in found:
        why = explain_obstacle(accelerator, installed_extras(), messages)
        logger.warning("%s is not used, serving on the CPU: %s", accelerator.name, why)
    if problem is not None and not found:
        logger.warning("serving on the CPU: %s", _reason(messages))
    if problem is not None or found:
        messages.clear()


def explain_missing(
    platform: str, found: Sequence[Accelerator], plugins: Collection[str], messages: Sequence[str]
) -> str:
    """Return whether a platform lacks a device, a driver or a plug-in here, and what to do about it.

    `found` are the accelerators of this machine, `plugins` the installed extras, `messages` the log messages of jax.
    """
    for accelerator in found:
        if accelerator.platform == platform:
            return f"{accelerator.name} can't be used: {explain_obstacle(accelerator, plugins, messages)}"
    if platform not in _PLATFORMS:
        return _reason(messages)
    lacks = f"no {_PLATFORMS[platform]} is found here"
    if not _of_platform(platform, plugins):
        lacks += f", nor jax's plug-in for one (pip install 'jaxserve[{_of_platform(platform, PLUGINS)[0]}]')"
    else:
        lacks += f" (jax says: {_reason(messages)})"
    others = f"; there is {', '.join(accelerator.name for accelerator in found)}" if found else ""
    return f"{lacks}{others}; --device auto serves on the best available device"


def explain_obstacle(accelerator: Accelerator, plugins: Collection[str], messages: Sequence[str]) -> str:
    """Return why jax can't use an accelerator of this machine, and what to do; see `explain_missing`."""
    extra = accelerator.extra
    if extra is None:
        return accelerator.problem
    have = _of_platform(accelerator.platform, plugins)
    if not have:
        return f"jax's plug-in for it is not installed; {_install(extra)}"
    variable = _HIDING[accelerator.platform]
    hidden = f" ({variable}={os.environ[variable]!r} is set)" if variable in os.environ else ""
    fails = f"jax's plug-in {have[0]} is installed and fails{hidden}: {_reason(messages)}"
    if extra == "cuda12" and have == ["cuda13"]:
        return f"{fails}; cuda13 needs driver 580 and compute capability 7.5, or newer; {_install(extra)}"
    return fails


def installed_extras() -> list[str]:
    """Return the extras whose jax plug-ins are installed."""
    return [extra for extra, module in PLUGINS.items() if importlib.util.find_spec(module) is not None]


def _jax_devices() -> tuple[list[Any], str | None]:
    """Return jax's devices, and why they can't be used, or None."""
    try:
        devices = jax.devices()
    except RuntimeError as error:
        return [], str(error)
    except AssertionError:  # the only error of jax if it was told to use a platform and has no device of it
        return [], "jax finds no device"
    first = devices[0]
    # The compute capability of an AMD GPU is a name, such as gfx942, not a number.
    if first.platform in _SERVED and re.fullmatch(r"\d+\.\d+|", str(getattr(first, "compute_capability", ""))):
        return devices, None
    return devices, f"jaxserve has no programs for {first.device_kind}, which jax finds ({first.platform})"


@contextlib.contextmanager
def _captured_jax_log() -> Iterator[list[str]]:
    """Collect the messages that jax logs while it looks for devices, instead of logging them.

    A caller that has reported the messages clears the list. Messages that are left in it at the end are logged.
    """
    messages: list[str] = []
    held: list[logging.LogRecord] = []

    def hold(record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        messages.append(f"{record.getMessage()}{f': {error}' if error else ''}")
        held.append(record)
        return False

    log = logging.getLogger("jax._src.xla_bridge")
    log.addFilter(hold)
    try:
        yield messages
    finally:
        log.removeFilter(hold)
        if messages:
            for record in held:
                log.handle(record)


def _reason(messages: Sequence[str]) -> str:
    """Return the first message of jax: it has the cause, later ones say how jax went on."""
    if not messages:
        return "jax finds no device"
    return re.sub(r" \((set JAX_PLATFORMS|you may need to).*\)$", "", messages[0].strip().replace("\n", " "))


def _of_platform(platform: str, extras: Collection[str]) -> list[str]:
    return [extra for extra in extras if extra.startswith(platform)]


def _install(extra: str) -> str:
    return f"to install {extra}: `make install` in a checkout, or pip install 'jaxserve[{extra}]'"
