"""The messages that two processes of a mesh exchange when they connect, and the settings that must be equal in both.

The order of the handshake is `rendezvous`'s. Each message follows bytes that no other protocol begins with, so that a
connection from any other program is recognized.
"""

from __future__ import annotations

import importlib.metadata
import socket
from typing import Any

import msgspec

import jaxserve
from jaxserve.config.schema import LOCAL_SETTINGS, EngineConfig
from jaxserve.framing import FrameFormat, read_exactly

_MAGIC = b"jaxserve/mesh/2\n"
_FRAMES = FrameFormat(max_bytes=1 << 20)


class JoinRequest(msgspec.Struct, frozen=True, tag=True):
    """A follower asks to join; `facts` must be the same in every process."""

    node_rank: int
    facts: dict[str, Any]


class DialRequest(msgspec.Struct, frozen=True, tag=True):
    """A follower asks that this connection be forwarded to the jax coordinator."""

    secret: str


class Acknowledged(msgspec.Struct, frozen=True, tag=True):
    """The follower was accepted and waits for the others."""


class AllJoined(msgspec.Struct, frozen=True, tag=True):
    """Every process has joined; `secret` goes into each `DialRequest`."""

    secret: str


class JoinRefused(msgspec.Struct, frozen=True, tag=True):
    """The request was refused, or process 0 has stopped waiting."""

    message: str


HandshakeRequest = JoinRequest | DialRequest
HandshakeReply = Acknowledged | AllJoined | JoinRefused


def send(connected: socket.socket, message: HandshakeRequest | HandshakeReply) -> None:
    """Send one message. Raises `OSError` when the connection has ended."""
    connected.sendall(_MAGIC + _FRAMES.encode(msgspec.msgpack.encode(message)))


def receive(connected: socket.socket, kind: Any) -> Any:
    """Return the next message, of type `kind`. Raises `OSError` when the connection has ended, `ValueError` for bytes
    that are no such message."""
    try:
        if (start := read_exactly(connected.recv, len(_MAGIC))) != _MAGIC:
            raise ValueError(f"it sent {start!r}")
        _, body = _FRAMES.read(connected.recv)
        return msgspec.msgpack.decode(body, type=kind)
    except EOFError:
        raise ConnectionResetError("the connection was closed") from None
    except msgspec.MsgspecError as error:
        raise ValueError(f"its message can't be decoded: {error}") from None


def shared_facts(config: EngineConfig) -> dict[str, Any]:
    """Return the versions and settings that must be the same in every process."""
    versions = {name: importlib.metadata.version(name) for name in ("jax", "jaxlib")}
    settings = {name: value for name, value in msgspec.to_builtins(config).items() if name not in LOCAL_SETTINGS}
    return {"jaxserve": jaxserve.__version__, **versions, **settings}
