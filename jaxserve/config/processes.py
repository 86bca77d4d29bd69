"""The settings of a mesh over several processes: where they meet, and which sizes can be spread over them."""

from __future__ import annotations

from jaxserve.errors import ConfigError


def parse_address(text: str) -> tuple[str, int]:
    """Host and port of `HOST:PORT` or `[IPv6]:PORT`. Raises `ConfigError`."""
    host, colon, port = text.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    if not colon or not host or (":" in host and not bracketed):
        raise ConfigError(f"dist_init_addr must be HOST:PORT, such as 10.0.0.1:5000 or [fd00::1]:5000; got {text!r}")
    if not (port.isascii() and port.isdigit()) or not 1 <= int(port) <= 65535:
        raise ConfigError(f"dist_init_addr must end in a port between 1 and 65535, got {port!r} in {text!r}")
    return host[1:-1] if bracketed else host, int(port)


def check_processes(*, nnodes: int, node_rank: int, address: str | None, tensor: int, data: int, mode: str) -> None:
    """Raises `ConfigError` where the settings don't belong together, or the sizes can't be spread evenly."""
    if not 0 <= node_rank < nnodes:
        most = "only 0 is there" if nnodes == 1 else f"it must be in [0, {nnodes - 1}]"
        raise ConfigError(f"node_rank={node_rank} with nnodes={nnodes}: {most}")
    if address is not None:
        parse_address(address)
    if nnodes == 1:
        if address is not None:
            raise ConfigError("dist_init_addr is where several processes meet: set nnodes to how many, or leave it out")
        return
    if address is None:
        raise ConfigError(
            f"nnodes={nnodes} needs dist_init_addr: HOST:PORT of a free port of node rank 0, the same on every node"
        )
    if mode == "replicas" and data > 1:
        raise ConfigError(f"dp_mode=replicas starts its engines on one machine, and nnodes={nnodes}: leave it out")
    if not _spreads(tensor, data, nnodes):
        nearest = [(t, d) for t, d in ((nnodes * tensor, data), (tensor, nnodes * data), (nnodes, 1), (1, nnodes))]
        fits = dict.fromkeys(f"tp_size={t} dp_size={d}" for t, d in nearest if _spreads(t, d, nnodes))
        raise ConfigError(
            f"tp_size={tensor} and dp_size={data} can't be spread over nnodes={nnodes}: each process has whole ranks, "
            f"or an equal part of one; what can: {' or '.join(fits)}"
        )


def _spreads(tensor: int, data: int, nnodes: int) -> bool:
    each, left = divmod(tensor * data, nnodes)
    return not left and (each % tensor == 0 or tensor % each == 0)
