"""What an engine process and its parent say to each other outside the wire: how to start, whether it did, why it ended.

The order to start comes on stdin, which stays open: its end is the parent's. Reports go through a pipe whose
descriptor the order names; a pipe loses nothing when the process ends right after writing. Both are length and msgpack.
"""

from __future__ import annotations

import os
import struct

import msgspec

from jaxserve.api_types import EngineInfo
from jaxserve.config.schema import EngineConfig
from jaxserve.errors import ConfigError, EngineDeadError, JaxserveError, ModelNotFoundError

_LENGTH = struct.Struct("<I")

ASKED_TO_END = b"end"
"""Comes on stdin before it ends, where an end is asked for; a parent that is killed says nothing."""


class Share(msgspec.Struct, frozen=True):
    """What an engine process has of the machine. `name` stands in its log lines; `environment` goes over its parent's,
    which is how devices are given to it."""

    name: str = ""
    environment: dict[str, str] = {}


WHOLE_MACHINE = Share()


class LaunchOrder(msgspec.Struct, frozen=True):
    """All an engine process needs to know. `report_fd` is the pipe to report through, `spawned_at` the time by
    `time.monotonic` (one clock for all processes of a machine) when its process was started."""

    config: EngineConfig
    share: Share
    command_address: str
    client_addresses: list[str]
    report_fd: int
    parent_pid: int
    spawned_at: float


class Started(msgspec.Struct, frozen=True, tag=True):
    """The engine is ready."""

    info: EngineInfo


class Ended(msgspec.Struct, frozen=True, tag=True):
    """The engine failed to start, or while it ran. `kind` names the class of an error that is the person's."""

    message: str
    kind: str = ""


Report = Started | Ended

_PERSONS_ERRORS: dict[str, type[JaxserveError]] = {kind.__name__: kind for kind in (ConfigError, ModelNotFoundError)}


def ended_by(error: Exception) -> Ended:
    """The report of an error."""
    for name, kind in _PERSONS_ERRORS.items():
        if isinstance(error, kind):
            return Ended(str(error), name)
    return Ended(str(error) if isinstance(error, JaxserveError) else f"{type(error).__name__}: {error}")


def start_error(report: Ended) -> JaxserveError:
    """The error a parent raises for an engine that did not start: the engine's own where a person can mend it."""
    if report.kind:
        return _PERSONS_ERRORS[report.kind](report.message)
    return EngineDeadError(f"the engine process failed to start: {report.message}")


def write_frame(fd: int, value: LaunchOrder | Report) -> None:
    """Write one value."""
    body = msgspec.msgpack.encode(value)
    frame = memoryview(_LENGTH.pack(len(body)) + body)
    while frame:
        frame = frame[os.write(fd, frame) :]


def read_order(fd: int) -> LaunchOrder | None:
    """Wait for the order to start; None when there is nobody to give one."""
    body = _read_frame(fd)
    return None if body is None else msgspec.msgpack.decode(body, type=LaunchOrder)


def read_report(fd: int) -> Report | None:
    """Wait for the next report; None when the pipe has ended, or (if it is non-blocking) holds none."""
    body = _read_frame(fd)
    return None if body is None else msgspec.msgpack.decode(body, type=Report)


def _read_frame(fd: int) -> bytes | None:
    head = _read_exactly(fd, _LENGTH.size)
    return None if head is None else _read_exactly(fd, _LENGTH.unpack(head)[0])


def _read_exactly(fd: int, size: int) -> bytes | None:
    parts = b""
    while len(parts) < size:
        try:
            part = os.read(fd, size - len(parts))
        except BlockingIOError:
            return None
        if not part:
            return None
        parts += part
    return parts
