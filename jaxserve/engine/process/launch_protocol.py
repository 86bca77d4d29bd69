"""Messages between an engine process and its parent about its life: how to start, whether it started, why it ended.

The launch order comes on stdin, which stays open: stdin ends when the parent does. Reports go through a pipe whose
descriptor the order names; what was written to a pipe can be read even after the process has ended. Requests and tokens
go through `transport`.
"""

from __future__ import annotations

import functools
import os
from typing import Any

import msgspec

from jaxserve.api_types import EngineInfo
from jaxserve.config.schema import EngineConfig
from jaxserve.errors import ConfigError, EngineDeadError, JaxserveError, ModelNotFoundError
from jaxserve.framing import FrameFormat

_FRAMES = FrameFormat()

STOP_MESSAGE = b"end"
"""Written to stdin before it is closed when a stop is intended; a parent that is killed writes nothing."""


class ReplicaResources(msgspec.Struct, frozen=True):
    """The part of the machine that an engine process gets. `name` stands in its log lines; `environment` is added to
    its parent's, and assigns devices or threads; `index` is the number of the replica."""

    name: str = ""
    environment: dict[str, str] = {}
    index: int = 0


WHOLE_MACHINE = ReplicaResources()


class EngineEndpoint(msgspec.Struct, frozen=True):
    """A running engine process as its clients see it. Client `i` binds `client_addresses[i]`; `name` is that of the
    replica, or empty."""

    pid: int
    command_address: str
    client_addresses: tuple[str, ...]
    info: EngineInfo
    name: str = ""


class LaunchOrder(msgspec.Struct, frozen=True):
    """All that an engine process needs to start. It reports through the pipe `report_fd`; `spawned_at` is when its
    process was started, by `time.monotonic` (the same clock in all processes of a machine)."""

    config: EngineConfig
    resources: ReplicaResources
    command_address: str
    client_addresses: list[str]
    report_fd: int
    parent_pid: int
    spawned_at: float


class Started(msgspec.Struct, frozen=True, tag=True):
    """The engine is ready."""

    info: EngineInfo


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The engine failed to start, or while it ran. `kind` is the class of an error that the user can correct."""

    message: str
    kind: str = ""


Report = Started | Failed

_USER_ERRORS: dict[str, type[JaxserveError]] = {kind.__name__: kind for kind in (ConfigError, ModelNotFoundError)}


def failure_report(error: Exception) -> Failed:
    """Return the report of an error."""
    for name, kind in _USER_ERRORS.items():
        if isinstance(error, kind):
            return Failed(str(error), name)
    return Failed(str(error) if isinstance(error, JaxserveError) else f"{type(error).__name__}: {error}")


def startup_error(report: Failed) -> JaxserveError:
    """Return the error to raise for an engine that did not start: the engine's own where the user can correct it."""
    if report.kind:
        return _USER_ERRORS[report.kind](report.message)
    return EngineDeadError(f"the engine process failed to start: {report.message}")


def write_message(fd: int, message: LaunchOrder | Report) -> None:
    """Write one message."""
    frame = memoryview(_FRAMES.encode(msgspec.msgpack.encode(message)))
    while frame:
        frame = frame[os.write(fd, frame) :]


def read_order(fd: int) -> LaunchOrder | None:
    """Wait for the launch order; return None when the input ends without one."""
    order: LaunchOrder | None = _read_message(fd, LaunchOrder)
    return order


def read_report(fd: int) -> Report | None:
    """Wait for the next report; return None when the pipe has ended or, if it is non-blocking, holds none."""
    report: Report | None = _read_message(fd, Report)
    return report


def _read_message(fd: int, kind: Any) -> Any:
    try:
        _, body = _FRAMES.read(functools.partial(os.read, fd))
    except (EOFError, BlockingIOError):
        return None
    return msgspec.msgpack.decode(body, type=kind)
