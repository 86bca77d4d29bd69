"""What two processes of a mesh say when they meet, and what must be the same in both.

It knows nothing of who waits for whom (`meeting`): messages over a connected socket, each behind words that no other
protocol begins with, and the facts that are compared.
"""

from __future__ import annotations

import importlib.metadata
import socket
import struct
from collections.abc import Mapping
from typing import Any

import msgspec

import jaxserve
from jaxserve.config.schema import EngineConfig

_MAGIC = b"jaxserve/mesh/1\n"
_SIZE = struct.Struct("<I")
_MOST_BYTES = 1 << 20
_DIFFERENCES_SHOWN = 4

# What each process may have its own way.
_OF_ONE_PROCESS = {
    "node_rank", "dist_init_addr", "dist_timeout", "log_level", "program_cache_dir", "disable_program_cache",
    "profile_dir", "watchdog_timeout", "decode_log_interval",
}  # fmt: skip


class Join(msgspec.Struct, frozen=True, tag=True):
    """A follower says who it is; `facts` are what must be the same everywhere."""

    node_rank: int
    facts: dict[str, Any]


class Carry(msgspec.Struct, frozen=True, tag=True):
    """A follower wants this connection carried on to the coordinator."""

    secret: str


class Noted(msgspec.Struct, frozen=True, tag=True):
    """It belongs here, and waits for the others."""


class Complete(msgspec.Struct, frozen=True, tag=True):
    """All are there; `secret` opens tunnels."""

    secret: str


class Refused(msgspec.Struct, frozen=True, tag=True):
    """It doesn't belong here, or it is over."""

    message: str


Hello = Join | Carry
Answer = Noted | Complete | Refused


def send(connected: socket.socket, message: Hello | Answer) -> None:
    """Raises `OSError` when the other is gone."""
    body = msgspec.msgpack.encode(message)
    connected.sendall(_MAGIC + _SIZE.pack(len(body)) + body)


def receive(connected: socket.socket, kind: Any) -> Any:
    """Raises `OSError` when the other is gone, `ValueError` for what is no message."""
    if (start := _read(connected, len(_MAGIC))) != _MAGIC:
        raise ValueError(f"it says {start[:16]!r}")
    [size] = _SIZE.unpack(_read(connected, _SIZE.size))
    if size > _MOST_BYTES:
        raise ValueError("its message is too long")
    try:
        return msgspec.msgpack.decode(_read(connected, size), type=kind)
    except msgspec.MsgspecError as error:
        raise ValueError(f"its message can't be read: {error}") from None


def _read(connected: socket.socket, size: int) -> bytes:
    parts = b""
    while len(parts) < size:
        part = connected.recv(size - len(parts))
        if not part:
            raise ConnectionResetError("the connection was closed")
        parts += part
    return parts


def facts_of(config: EngineConfig) -> dict[str, Any]:
    """What must be the same in every process: versions, and the settings that shape the service."""
    versions = {name: importlib.metadata.version(name) for name in ("jax", "jaxlib")}
    settings = {name: value for name, value in msgspec.to_builtins(config).items() if name not in _OF_ONE_PROCESS}
    return {"jaxserve": jaxserve.__version__, **versions, **settings}


def differences(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> list[str]:
    """Names with both values, of what differs."""
    names = [*ours, *(name for name in theirs if name not in ours)]
    return [
        f"{name} is {theirs.get(name)!r} there and {ours.get(name)!r} on node rank 0"
        for name in names
        if theirs.get(name) != ours.get(name)
    ]


def listed(found: list[str]) -> str:
    """Some of them, and how many more."""
    more = f" and {len(found) - _DIFFERENCES_SHOWN} more" if len(found) > _DIFFERENCES_SHOWN else ""
    return "; ".join(found[:_DIFFERENCES_SHOWN]) + more
