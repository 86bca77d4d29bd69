"""The socket on which a server listens: a port, or a Unix domain socket with its file.

Owns the file from its start to its end. Accepts no connection.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from collections.abc import Iterator

from jaxserve.config.server_schema import ServerConfig
from jaxserve.errors import ConfigError

_BACKLOG = 2048


@contextlib.contextmanager
def listening(config: ServerConfig) -> Iterator[socket.socket]:
    """Listen as the settings say, until the context is left. Raises `ConfigError` if that is not possible."""
    if config.uds is None:
        with _bind_port(config) as listener:
            yield listener
        return
    with _bind_path(config.uds) as listener:
        own = _identity(config.uds)
        try:
            yield listener
        finally:
            with contextlib.suppress(OSError):
                if _identity(config.uds) == own:
                    os.unlink(config.uds)


def url_of(listener: socket.socket, config: ServerConfig) -> str:
    """Return the URL of a server that listens here, or `unix:PATH`."""
    if config.uds is not None:
        return f"unix:{config.uds}"
    host, port = listener.getsockname()[:2]
    scheme = "http" if config.ssl_certfile is None else "https"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def _bind_port(config: ServerConfig) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ConfigError(f"--host {config.host} is not an address to listen on: {error}") from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"can't listen on {config.host}:{config.port}: {error}; choose another with --host or --port"
        ) from error
    listener.setblocking(False)
    return listener


def _bind_path(path: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX)
    try:
        _remove_stale(path)
        listener.bind(path)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise ConfigError(f"can't listen on --uds {path}: {error}; choose another path") from error
    except ConfigError:
        listener.close()
        raise
    listener.setblocking(False)
    return listener


def _identity(path: str) -> tuple[int, ...]:
    found = os.lstat(path)
    return found.st_dev, found.st_ino, found.st_mtime_ns  # a number may be given again to a later file


def _remove_stale(path: str) -> None:
    """Remove the socket of a server that has ended. Raises `ConfigError` if another one listens on it, or if it is no
    socket."""
    try:
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            raise ConfigError(f"--uds {path} exists and is not a socket: remove it, or choose another path")
    except FileNotFoundError:
        return
    with socket.socket(socket.AF_UNIX) as client:
        client.setblocking(False)
        try:
            client.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)
            return
        except BlockingIOError:  # its queue of connections is full
            pass
    raise ConfigError(f"a server listens on --uds {path}: end it, or choose another path")
